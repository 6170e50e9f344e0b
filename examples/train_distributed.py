"""Data parallel training whose loss curve does not depend on the number of processes.

    torchrun --nproc-per-node 4 examples/train_distributed.py [STEPS]   (NCCL where there are GPUs, else gloo)
    python examples/train_distributed.py --plot curves.png              (trains on 1, 2 and 4 processes, and plots)

If a batch is sorted by the length of its prompts, one rank has few labels and another many. With a mean over each
rank's own labels, which DDP averages, a label has more weight where there are few. Dividing by `global_count` gives all
labels the same weight, so that one, two and four processes train the same model.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import safeops

IGNORED, LENGTH, BATCH, MICRO_BATCHES = -100, 64, 16, 2


def load():
    """Returns (Python's manual as codes of its characters, the number of different characters)."""
    import pydoc_data.topics

    text = "".join(pydoc_data.topics.topics.values())[:100_000]
    letters = {letter: i for i, letter in enumerate(sorted(set(text)))}
    return torch.tensor([letters[letter] for letter in text]), len(letters)


def network(letters, width=48):
    return torch.nn.Sequential(
        torch.nn.Embedding(letters, width),
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, letters),
    )


def batch(text, generator):
    """Returns (tokens, labels) of all ranks. Prompts, whose labels are ignored, have 0 to LENGTH - 4 tokens."""
    starts = torch.randint(len(text) - LENGTH, (MICRO_BATCHES, BATCH), generator=generator)
    tokens = text[starts[..., None] + torch.arange(LENGTH + 1)]
    prompts = torch.linspace(0, LENGTH - 4, BATCH).long()
    labels = torch.where(torch.arange(LENGTH) < prompts[:, None], IGNORED, tokens[..., 1:])
    return tokens[..., :-1], labels


def train(steps=60, exact=True):
    """Returns the loss of each step, the mean over the labels of all ranks. exact=False: the gradients are of a mean
    over each rank's own labels."""
    running = dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if running else (0, 1)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    (text, letters), losses = load(), []
    model = network(letters).to(device)
    if running:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for _ in range(steps):
        inputs, labels = (x[:, mine].to(device) for x in batch(text, generator))
        count = safeops.distributed.global_count(list(labels != IGNORED))  # 8 bytes, sent beside the forward pass
        loss = torch.zeros((), device=device)
        optimizer.zero_grad()
        for tokens, target in zip(inputs, labels):
            logits, target = model(tokens).flatten(0, 1), target.flatten()
            term = safeops.cross_entropy(logits, target, ignore_index=IGNORED, denominator=count)
            loss += term.detach()
            if not exact:
                term = torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED) / MICRO_BATCHES
            term.backward()
        optimizer.step()
        if running:
            dist.all_reduce(loss)
        losses.append(loss.item() / ranks)
    return losses


def one_rank(rank, ranks, folder, steps, exact):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    losses = train(steps, exact)
    if rank == 0:
        torch.save(losses, f"{folder}/losses")
    dist.destroy_process_group()


def on(ranks, steps, exact):
    """Returns the losses of a training on `ranks` processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(one_rank, (ranks, folder, steps, exact), nprocs=ranks)
        return torch.load(f"{folder}/losses")


def plot(path, steps=80):
    import matplotlib.pyplot as plt

    figure, (curves, distances) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    one = torch.tensor(on(1, steps, exact=True))
    curves.plot(one, "k", label="1 process")
    for exact, color, how in ((False, "tab:red", "mean of each rank's mean"), (True, "tab:green", "global_count")):
        for ranks, style in ((2, "--"), (4, ":")):
            result = torch.tensor(on(ranks, steps, exact))
            label = f"{ranks}, {how}"
            curves.plot(result, style, color=color, label=label)
            distances.semilogy((result - one).abs().clamp(min=1e-8), style, color=color, label=label)
    curves.set(xlabel="step", ylabel="loss of all labels")
    distances.set(xlabel="step", ylabel="distance from one process")
    curves.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=int, nargs="?", default=60)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="the curves of 1, 2 and 4 processes, as a picture")
    given = parser.parse_args()
    if given.plot:
        plot(given.plot)
    else:
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        found = train(given.steps)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
        if dist.is_initialized():
            dist.destroy_process_group()
