"""Runs cases on several processes at once, over gloo.

Each rank calls the cases of a module in their order, MODULE.CASES: {name: function()}. Ranks are forked from one server
that has imported torch and the tests, which takes longer than most cases.
"""

import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist

SECONDS = 60  # the group's timeout, after which a rank that waits for another raises
LONGEST = 300  # seconds, for all cases of a module


def started(function, world, *operands):
    """Starts `world` processes, each of which calls function(rank, *operands)."""
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *sys.path])  # the server starts with it
    multiprocessing.set_forkserver_preload(["tests.distributed.dtensors"])
    with mock.patch.dict(os.environ, environment):
        return torch.multiprocessing.start_processes(function, operands, world, join=False, start_method="forkserver")


def outcomes(module, world, folder):
    """Returns a dict for each rank: {name: "right", or the error}, without cases that it did not reach."""
    path = folder / f"outcomes{world}"
    with tempfile.TemporaryDirectory() as store:
        ranks = started(start, world, module, world, store, path)
        end = time.monotonic() + LONGEST
        try:
            while not ranks.join(timeout=end - time.monotonic()):
                assert time.monotonic() < end, f"{module} on {world} ranks: not done in {LONGEST} s"
        finally:
            for process in ranks.processes:
                process.kill()
    return [json.loads((folder / f"{path.name}.{rank}").read_text()) for rank in range(world)]


def fixture(module):
    """Returns a pytest fixture: a function (number of processes) -> the outcomes of the module's cases."""

    @pytest.fixture(scope="module")
    def cached_outcomes(tmp_path_factory):
        return functools.cache(lambda world: outcomes(module.__name__, world, tmp_path_factory.mktemp("ranks")))

    return cached_outcomes


def failure(outcomes, name):
    """Returns the failures of a case as text, rank by rank, or None."""
    results = [of_rank.get(name, "it did not come to this case: an earlier one failed") for of_rank in outcomes]
    return "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(results) if text != "right") or None


def raises(kind, *words, call):
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"{kind.__name__} is not raised")


def start(rank, module, world, folder, path):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timeout = datetime.timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=timeout)
    results = {}
    for name, case in importlib.import_module(module).CASES.items():
        try:
            case()
            results[name] = "right"
        except Exception:
            results[name] = traceback.format_exc(limit=-6)
        with open(f"{path}.{rank}", "w") as file:
            json.dump(results, file)
        if results[name] != "right":
            break  # after an error the ranks are in different cases: closed connections stop the others, too
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
