"""Rows of classes: softmax, and losses of a row's class or class probabilities.

`_classification.py` has the record of losses of rows that have a class each, `_softmax.py` that of both softmaxes.
"""
