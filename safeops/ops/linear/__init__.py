"""A last linear layer fused with its loss: the logits are computed in chunks and never exist whole."""
