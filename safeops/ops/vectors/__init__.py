"""Functions and losses of vectors along a dim: norms, cosines, distances, contrastive losses, boxes and signals."""
