"""A loss of the logits of any module: the head runs on chunks of rows, so that its logits never exist all at once."""
