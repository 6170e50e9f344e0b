"""No contests: the losses of orders are made of other families' functions, whose contests are in those families' files,
and batches of pairs and of lists are small."""
