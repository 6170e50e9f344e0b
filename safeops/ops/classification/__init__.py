"""Rows of classes: softmax, and the losses of a row's class or class probabilities.

`_classification.py` is the record of a loss whose rows have a class each, `_softmax.py` that of both softmaxes.
"""
