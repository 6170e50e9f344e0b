"""Divergences between the distributions of two rows of logits.

`_divergence.py` has the record and the formulas; the other files have one public function each.
"""
