"""Losses and statistics of routers, which send each token of a mixture of experts to a few of its experts."""
