"""Predicts the next character of Python's manual: cross entropy with ignored labels, gradients accumulated exactly.

    python examples/tokens.py [STEPS]

As in the tuning of a language model, the first part of a sequence is a prompt, whose labels are -100. So micro-batches
have different numbers of labels. `denominator=` is the number of labels in all of them: their gradients then add up to
the gradient of the whole batch. The mean of their means would give more weight to labels in a nearly empty micro-batch.
"""

import argparse

import torch

import safeops

IGNORED = -100


def load():
    """Returns (the text as codes of its characters, the number of different characters)."""
    import pydoc_data.topics

    text = "".join(pydoc_data.topics.topics.values())[:100_000]
    letters = sorted(set(text))
    codes = {letter: i for i, letter in enumerate(letters)}
    return torch.tensor([codes[letter] for letter in text]), len(letters)


def network(letters, width=64):
    return torch.nn.Sequential(
        torch.nn.Embedding(letters, width),
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, letters),
    )


def train(steps=60, micro_batches=4, length=128):
    """Returns the loss of each step."""
    torch.manual_seed(0)
    (text, letters), losses = load(), []
    model = network(letters)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (micro_batches, 8))
        tokens = text[starts[..., None] + torch.arange(length + 1)]  # (micro-batch, 8, length + 1)
        prompt = torch.randint(length // 2, starts.shape)[..., None]
        labels = torch.where(torch.arange(length) < prompt, IGNORED, tokens[..., 1:])
        count, total = (labels != IGNORED).sum(), 0.0
        optimizer.zero_grad()
        for inputs, target in zip(tokens[..., :-1], labels):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(inputs)
            loss = safeops.cross_entropy(
                logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED, denominator=count, z_loss=1e-4
            )
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=60)
    found = train(parser.parse_args().steps)
    print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
