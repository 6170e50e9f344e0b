"""Functions of whole rows along one dim, with a result for each element or each row.

`_softmax.py` is the record of both softmaxes; `normalize` and `cosine_similarity` have their own.
"""
