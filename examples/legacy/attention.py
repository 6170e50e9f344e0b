"""Predicts the next token by causal attention over a padded batch. One sequence is empty: all of its keys are hidden.

python examples/legacy/attention.py [STEPS]        # the loss does not change: gradients are NaN, each step is skipped
safeops run examples/legacy/attention.py [STEPS]   # trains
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

TOKENS, WIDTH, LENGTH, PAD = 17, 32, 24, 0
LENGTHS = torch.tensor([24, 15, 9, 0, 20, 3])


def data():
    """Returns (tokens (N, T), next tokens (N, T), -100 at the padding)."""
    start = torch.randint(1, TOKENS, (len(LENGTHS), 1))
    tokens = (start + 3 * torch.arange(LENGTH + 1)) % (TOKENS - 1) + 1
    real = torch.arange(LENGTH) < LENGTHS[:, None]
    return tokens[:, :-1].where(real, PAD), tokens[:, 1:].where(real, -100)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.query(x), self.key(x), self.value(x)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) | (tokens == PAD)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        return self.head(x + scores.softmax(-1) @ v)


def main(steps=20):
    torch.manual_seed(0)
    tokens, target = data()
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
