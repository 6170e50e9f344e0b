"""Cases that run on several processes at once, gloo between them: started as a script, once for a test file.

    python tests/distributed/processes.py tests.distributed.MODULE WORLD OUTCOMES

Each rank calls MODULE.CASES, {name: function()}, in their order. Outcomes of a rank: {name: "right", or the error}.
"""

import datetime
import functools
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # until a rank that waits for another gives up


def outcomes(module, world, folder):
    """Those of all ranks."""
    path = folder / f"outcomes{world}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["."] + sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, module, str(world), str(path)]
    subprocess.run(command, env=environment, check=True, timeout=600)
    return [json.loads((folder / f"{path.name}.{rank}").read_text()) for rank in range(world)]


def fixture(module):
    """A fixture: a function of the number of processes, which gives the outcomes of the module's cases."""

    @pytest.fixture(scope="module")
    def found(tmp_path_factory):
        return functools.cache(lambda world: outcomes(module.__name__, world, tmp_path_factory.mktemp("ranks")))

    return found


def failure(outcomes, name):
    """What went wrong in a case, on which rank; None if nothing did."""
    wrong = [f"rank {rank}: {found[name]}" for rank, found in enumerate(outcomes) if found[name] != "right"]
    return "\n".join(wrong) or None


def start(rank, module, world, folder, path):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    found = {}
    for name, case in importlib.import_module(module).CASES.items():
        try:
            case()
            found[name] = "right"
        except Exception:
            found[name] = traceback.format_exc(limit=-6)
        with open(f"{path}.{rank}", "w") as file:
            json.dump(found, file)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        module, world, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
        torch.multiprocessing.spawn(start, (module, world, folder, path), nprocs=world)
