"""Every public function on DTensors of two processes, beside the same call on plain tensors. Run as a script:

    python tests/callers/ranks.py OUTCOMES.json

It writes the outcomes of each rank: {case: "right", or what is wrong, or the error}.
"""

import json
import os
import re
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from tests.callers.calls import CALLS, call, tensors
from tests.ops.record import along_a_dim

PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}  # 5 rows: uneven shards
REDUCTIONS = [name for name, arguments in CALLS.items() if "keepdim" in arguments]
LOSSES = [name for name, arguments in CALLS.items() if "denominator" in arguments]


def plain(name):
    """Changes to a loss's call that leave out mask, weight and denominator."""
    return {key: None for key in ("mask", "weight", "denominator") if key in CALLS[name]}


CASES = {
    **{name: (name, {}) for name in CALLS},
    **{f"{name}, plain": (name, plain(name)) for name in LOSSES},
    **{f"{name}, {how}": (name, {**plain(name), "reduction": how}) for name in LOSSES for how in ("sum", "none")},
    **{f"{name}, by weight": (name, {"denominator": None}) for name in LOSSES},
    **{f"{name}, dim {dim}": (name, {"dim": dim}) for name in (*REDUCTIONS, "safe_norm") for dim in (0, None, (0, 1))},
    **{f"{name}, dim 0": (name, {"dim": 0}) for name in along_a_dim()},
    **{f"{name}, plain": (name, {"mask": None, "weight": None, "dim": None}) for name in REDUCTIONS},
    **{f"{name}, nothing kept": (name, {"empty": "raise"}) for name in ("masked_mean", "masked_var", "mse_loss")},
    "safe_div, number": ("safe_div", {"other": 3.0}),
    "masked_fill, number": ("masked_fill", {"value": -1e9}),
    "safe_norm, inf": ("safe_norm", {"ord": float("inf"), "dim": 0}),
    **{
        f"{name}, indices": (name, {**plain(name), "target": torch.tensor([4, 0, 5, 1, 4])})
        for name in ("dice_loss", "tversky_loss")
    },
    "safe_index_select, rows": ("safe_index_select", {"dim": 0, "index": torch.tensor([4, 9, 0, -1, 4])}),
}


def outcome(name, changes, placement, mesh, keep=None):
    """Returns "right", or what is wrong or the error. keep: the argument that stays a plain tensor."""
    plain = {key: x.clone() for key, x in {**tensors(name), **changes}.items() if isinstance(x, torch.Tensor)}
    if changes.get("empty") == "raise":
        plain["mask"][3] = False  # row 3, which rank 1 has, keeps nothing

    def distributed(x):
        fits = isinstance(placement, Shard) and x.dim() > placement.dim
        return distribute_tensor(x, mesh, [placement if fits and x.dim() == 2 else Replicate()])

    shared = {key: x.clone() if key == keep else distributed(x) for key, x in plain.items()}
    pairs = [(x.requires_grad_(), shared[key].requires_grad_()) for key, x in plain.items() if x.is_floating_point()]
    try:
        want = call(name, **{**changes, **plain})
    except ValueError as error:
        want = error
    try:
        got = call(name, **{**changes, **shared})
    except Exception as error:
        same = re.sub(r" as \[[^]]*\]", "", str(error)) == str(want)  # the DTensors' error adds the placements
        return "right" if same else f"{type(error).__name__}: {error}"
    if isinstance(want, ValueError):
        return f"{want} is not raised"
    if isinstance(want, tuple):
        want, got = want[0], got[0]
    wants, gots = [want], [got]
    if want.requires_grad:
        wants += torch.autograd.grad(want.sum(), [x for x, _ in pairs], materialize_grads=True)
        gots += torch.autograd.grad(got.sum(), [x for _, x in pairs], materialize_grads=True)
    # Ranks add in another order than the kernel, so sums of terms that cancel differ; in the sum of a softmax all terms
    # cancel. least: an absolute tolerance.
    least = float(want.detach().abs().max()) if name == "masked_softmax" else 0
    for w, g in zip(wants, gots):
        atol = 1e-6 * max(least, float(w.detach().abs().max()))
        if not isinstance(g, DTensor) or not torch.allclose(g.full_tensor(), w, rtol=1e-4, atol=atol):
            return f"{g}, not {w}"
    return "right"


def main(rank, folder, outcomes):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh, result = init_device_mesh("cpu", (2,)), {}
    for how, placement in PLACEMENTS.items():
        for case, (name, changes) in CASES.items():
            result[f"{how}: {case}"] = outcome(name, changes, placement, mesh)
    for name in CALLS:
        for key, x in list(tensors(name).items())[1:]:
            if x.dim():
                result[f"mixed: {name}, {key}"] = outcome(name, {}, PLACEMENTS["rows"], mesh, keep=key)
    with open(f"{outcomes}.{rank}", "w") as file:
        json.dump(result, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, (folder, sys.argv[1]), nprocs=2)
