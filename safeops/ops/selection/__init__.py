"""Selection: elements of the input are moved, by a mask or by an index. Nothing is computed.

`_selection.py` has the dtypes that kernels move and the fill for an index out of range; `_indexed.py` has the record of
safe_gather and safe_index_select.
"""
