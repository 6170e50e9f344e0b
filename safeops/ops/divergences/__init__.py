"""Divergences between the distributions of two rows of logits.

`_divergence.py` is the record: a divergence adds its name and its options.
"""
