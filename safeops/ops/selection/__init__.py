"""Selection: which elements of the input go where, by a mask or by an index. Nothing is computed.

`_selection.py` has the dtypes that are moved and the stand-in of an index out of range; `_indexed.py` is the record of
what takes an index.
"""
