"""Scans over lists of tensors, one launch for a list. Raw ops for safeops.debug and safeops.amp, without autograd.

`_scan.py` has the record.
"""
