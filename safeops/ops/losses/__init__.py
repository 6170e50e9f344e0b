"""Losses of elements, and of regions of images: masked, weighted and reduced.

`_pointwise.py` has the record of a loss of elements, `_region.py` the record of a loss of regions (Dice, Tversky).
"""
