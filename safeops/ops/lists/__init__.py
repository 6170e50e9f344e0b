"""Scans over lists of tensors, one launch per list: raw ops without autograd, for safeops.debug and safeops.amp.

`_scan.py` has the record.
"""
