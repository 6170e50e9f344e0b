"""A last linear layer fused with its loss. The logits are computed in chunks; the docstrings name the exceptions."""
