"""No contests: the losses of policies read one number a token, where the logits that it comes from are a vocabulary."""
