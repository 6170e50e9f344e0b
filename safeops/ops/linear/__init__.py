"""A last linear layer fused with its loss: logits are computed in chunks, all at once only by _whole_logits.py."""
