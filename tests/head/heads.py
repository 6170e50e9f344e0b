"""Heads as people have them, small: each a function (hidden size, classes) -> module."""

import torch
from torch import nn
from torch.nn import functional as F


class LoRA(nn.Module):
    """A frozen layer and an adapter of low rank beside it, with dropout before it (Hu et al., 2021)."""

    def __init__(self, width, classes, rank=4, dropout=0.0, scale=2.0):
        super().__init__()
        self.base, self.scale = nn.Linear(width, classes).requires_grad_(False), scale
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, classes, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        return self.base(hidden) + self.scale * self.b(self.a(self.dropout(hidden)))


class Int8(nn.Module):
    """A weight in int8 with a scale for each class, which is trained, as QAT has it."""

    def __init__(self, width, classes):
        super().__init__()
        weight = torch.randn(classes, width) / width**0.5
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.scale = nn.Parameter(scale)

    def forward(self, hidden):
        return F.linear(hidden, self.weight.to(hidden.dtype) * self.scale.to(hidden.dtype))


class Capped(nn.Module):
    """A cap and a scale of the logits, with a trained temperature."""

    def __init__(self, width, classes):
        super().__init__()
        self.layer, self.log_scale = nn.Linear(width, classes, bias=False), nn.Parameter(torch.tensor(0.1))

    def forward(self, hidden):
        return 3.0 * torch.tanh(self.layer(hidden) * self.log_scale.exp() / 3.0)


class Tied(nn.Module):
    """The embedding's weight as last layer; `embedding` is a part of the module."""

    def __init__(self, width, classes):
        super().__init__()
        self.embedding = nn.Embedding(classes, width)

    def forward(self, hidden):
        return F.linear(hidden, self.embedding.weight) * hidden.shape[-1] ** -0.5


def bias(width, classes):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))


def two_layers(width, classes):
    return nn.Sequential(nn.Linear(width, 12), nn.GELU(), nn.Linear(12, classes))


def weight_norm(width, classes):
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, classes))


def hooked(width, classes):
    layer = nn.Linear(width, classes)
    layer.register_forward_hook(lambda module, args, output: output * 1.5 + 0.1)
    return layer


HEADS = {
    "lora": LoRA,
    "int8": Int8,
    "softcap": Capped,
    "tied": Tied,
    "bias": bias,
    "two layers": two_layers,
    "weight norm": weight_norm,
    "hook": hooked,
    "linear": nn.Linear,
}
