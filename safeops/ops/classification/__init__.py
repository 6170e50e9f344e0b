"""Rows of classes: softmax, and losses of a row's class or class probabilities.

`_classification.py` has the record of losses with one class per row, `_softmax.py` the record of both softmaxes.
"""
