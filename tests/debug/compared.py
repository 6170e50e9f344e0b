"""Networks for the tests of compare, and the differences that they plant."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal attention; its mask is an attribute, so that a test can spoil it."""

    def __init__(self, width, heads=2, diagonal=0):
        super().__init__()
        self.heads, self.diagonal = heads, diagonal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # (batch, time, width)
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (width / self.heads) ** 0.5
        hidden = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1 + self.diagonal)
        scores = scores.masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.square, self.drop = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.drop(self.square(self.down(F.gelu(self.up(self.norm2(x))))))


class Transformer(nn.Module):
    def __init__(self, width=32, depth=3, words=50):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens.flatten())


class Perceptron(nn.Module):
    def __init__(self, width=64, depth=5):
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.drop(self.layers(x))).square().mean()


class Convolutions(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(4)]
        )
        self.drop, self.square, self.head = nn.Dropout(0.1), nn.Linear(width, width), nn.Linear(width, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        x = F.max_pool2d(self.stages(F.relu(self.stem(x))), 2).mean((2, 3))
        return self.loss(self.head(self.drop(self.square(x))), torch.arange(len(x), device=x.device) % 10)


def network(name, seed=0):
    """Returns (model, batch), drawn by the seed. Dropout is off."""
    torch.manual_seed(seed)
    if name == "transformer":
        return Transformer().eval(), torch.randint(50, (4, 16))
    if name == "perceptron":
        return Perceptron().eval(), torch.randn(64, 64)
    model, batch = Convolutions(), torch.randn(8, 3, 16, 16)
    model.drop.eval()
    return model, batch


NETWORKS = ("perceptron", "convolutions", "transformer")


def autocast(model, dtype=torch.bfloat16):
    def step(batch):
        with torch.autocast("cpu", dtype):
            return model(batch)

    return step


# ---- planted differences: each changes a copy of the model in one module


class TF32(nn.Module):
    """A linear layer or convolution whose operands are rounded to 10 bits of mantissa."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        layer = self.layer
        weight = layer.weight + (rounded(layer.weight) - layer.weight).detach()
        x = x + (rounded(x) - x).detach()
        if isinstance(layer, nn.Conv2d):
            return F.conv2d(x, weight, layer.bias, padding=layer.padding)
        return F.linear(x, weight, layer.bias)


def rounded(x):
    """To the nearest number with 10 bits after the point, as TF32's."""
    return ((x.detach().contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


class Store(nn.Module):
    """Writes half, where what is beyond its largest number saturates; or leaves float32 as it is."""

    def __init__(self, saturates):
        super().__init__()
        self.saturates = saturates

    def forward(self, x):
        return x.clamp(-65504, 65504).half() if self.saturates else x


class Large(nn.Module):
    """A layer whose largest result is 1.5 times float16's largest number."""

    def __init__(self, layer, saturates):
        super().__init__()
        self.layer, self.store = layer, Store(saturates)

    def forward(self, x):
        x = self.layer(x)
        scale = 1.5 * 65504 / x.detach().abs().amax()
        return self.store(x * scale).float() / scale


def planted(model, name, change):
    """A copy of the model in which `change(module)` replaces (or only changes) the module of that name."""
    model = copy.deepcopy(model)
    module = change(model.get_submodule(name))
    if module is not None:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return model


def transposed(layer):
    layer.weight.data = layer.weight.data.transpose(0, 1).contiguous()


def wrong_mask(attention):
    attention.diagonal = 1  # each token sees the next one


def dropping(dropout):
    dropout.train()


def large(saturates):
    return lambda layer: Large(layer, saturates)
