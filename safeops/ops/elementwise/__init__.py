"""Elementwise functions. `_unary.py` and `_binary.py` have the records of functions of one and of two operands.

The records handle dtypes, fill values, saturation and numbers as operands. An op adds its function and the condition
where the function has no value. `masked_fill` and `apply_where` use neither record.
"""
