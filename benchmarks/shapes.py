"""Shapes of about n elements: rows of several lengths, image channels (strided rows), and logits."""

import torch

from .case import ROW, data

SIDE = 56  # pixels of an image's edge

# suffix of a case's name -> (n -> (shape, dim)); the shape has about n elements
SHAPES = {
    "": lambda n: ((max(1, n // ROW), min(ROW, n)), -1),
    "_64": lambda n: ((max(1, n // 64), 64), -1),
    "_32768": lambda n: ((max(1, n // 32768), 32768), -1),
    "_channels": lambda n: ((max(1, n // (64 * SIDE * SIDE)), 64, SIDE, SIDE), 1),
}


def tensor(n, dtype, device, seed, shape):
    return data(torch.Size(shape).numel(), dtype, device, seed, shape=shape)


def model(rows, classes):
    return lambda n: (rows, classes) if n >= ROW * ROW else (1, classes)


# suffix of a case's name -> (n -> shape). Shapes have about n logits; the last ones are fixed, from language models.
LOGITS = {
    "": lambda n: (max(1, n // 32000), min(32000, n)),
    "_131072": lambda n: (max(1, n // 131072), min(131072, n)),
    "_1024": lambda n: (max(1, n // 1024), min(1024, n)),
    "_images": lambda n: (max(1, n // (21 * SIDE * SIDE)), 21, SIDE, SIDE),
    **{f"_{rows}x{classes}": model(rows, classes) for rows, classes in ((1024, 32000), (4096, 32000), (128, 131072))},
}
