"""scripts/gpu_kernels.py compiles kernels without a GPU. A run on the GPU finds them in Triton's cache, also if this
lies in another folder, and even if they were compiled without torch.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import safeops
from benchmarks import standin
from safeops.core import library

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu_kernels.py"
spec = importlib.util.spec_from_file_location("gpu_kernels", SCRIPT)
gpu_kernels = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu_kernels)


def step():
    """Run a training step. Among its kernels are one with a functor and parameters, and one that splits its work among
    blocks."""
    x, y, mask = torch.ones(64, 128, requires_grad=True), torch.ones(64, 128), torch.ones(64, 128) > 0
    safeops.huber_loss(x, y, delta=0.5, mask=mask).backward()
    safeops.masked_var(x, mask, dim=1).sum().backward()
    return safeops.masked_softmax(x, mask)


def wanted():
    with gpu_kernels.planned(standin.ARCH) as results:
        step()
    return [json.loads(text) for text in results]


needs_extension = pytest.mark.skipif(library.cpu_extension is None, reason="the extension is not built")


@needs_extension
def test_what_comes_out_of_json_has_the_key_of_what_went_in(monkeypatch):
    sources, encoded = [], gpu_kernels.encoded
    monkeypatch.setattr(
        gpu_kernels, "encoded", lambda source, options: sources.append(source) or encoded(source, options)
    )
    requests = wanted()
    assert len(requests) == len(sources) >= 5
    assert [gpu_kernels.decoded(request)[0].hash() for request in requests] == [source.hash() for source in sources]


@pytest.fixture
def python(tmp_path, monkeypatch):
    """Path of a Python that can import Triton, but neither torch nor safeops (not as an editable install either)."""
    (tmp_path / "site").mkdir()
    for result in Path(importlib.util.find_spec("triton").origin).parents[1].glob("triton*"):
        (tmp_path / "site" / result.name).symlink_to(result)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "site"} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    code = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('safeops'), u.find_spec('triton'))"
    output = subprocess.run([script, "-c", code], capture_output=True, text=True, cwd=tmp_path).stdout
    assert output.startswith("None None ModuleSpec"), output
    return str(script)


@pytest.mark.slow
@needs_extension
def test_who_compiles_needs_no_torch(python, tmp_path):
    (request,) = [request for request in wanted() if "statistic_kernel" in request["kernel"]]
    gpu_kernels.compile_by(python, standin.ARCH, [request], tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*/*.cubin"))) == 1
    gpu_kernels.pack(tmp_path / "cache", tmp_path / "kernels.tar.xz")
    assert (tmp_path / "kernels.tar.xz").read_bytes()[:6] == b"\xfd7zXZ\0"
    assert gpu_kernels.unpack(tmp_path / "kernels.tar.xz", tmp_path / "ours") == 1


@needs_extension
def test_the_key_needs_no_torch_and_no_order(python, tmp_path):
    """The cache keys are equal without torch and in any order of compiling. Triton's own keys depend on what the
    process compiled before."""
    code = (
        "import importlib.util as u, json, sys\n"
        f"spec = u.spec_from_file_location('g', {str(SCRIPT)!r}); g = u.module_from_spec(spec)\n"
        "spec.loader.exec_module(g); g.prepare_worker()\n"
        "print(json.dumps([g.decoded(x)[0].hash() for x in json.load(sys.stdin)[::-1]][::-1]))"
    )
    requests = wanted()
    options = {"input": json.dumps(requests), "capture_output": True, "text": True, "cwd": tmp_path}
    done = subprocess.run([python, "-c", code], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == [gpu_kernels.decoded(request)[0].hash() for request in requests]


@needs_extension
def test_a_name_that_is_no_op_is_refused():
    with pytest.raises(SystemExit, match="there is no op 'nope'"):
        gpu_kernels.requests(["masked_sum", "nope"], standin.ARCH)


@needs_extension
def test_the_first_calls_of_the_gpu_check_are_among_them():
    from tests.gpu import test_unseen

    (case,) = [case for case in test_unseen.CASES if type(case) is test_unseen.Case and case.op == "masked_mean"]
    with gpu_kernels.planned(standin.ARCH) as results:
        x = torch.ones(case.shape, requires_grad=True)
        safeops.masked_mean(x).backward()
    assert set(results) == set(gpu_kernels.request("unseen", "masked_mean", standin.ARCH)) and len(results) == 2


def test_a_check_that_fails_here_is_no_reason_to_go_on(monkeypatch):
    from safeops.verify import checks

    monkeypatch.setattr(checks, "names", lambda op, full: [checks.KERNEL_RUNS])
    monkeypatch.setattr(checks, "samples", lambda op, full: ())
    with pytest.raises(RuntimeError, match="masked_sum: there are no samples"):
        gpu_kernels.request("verify", "masked_sum", standin.ARCH)


@pytest.mark.slow
@pytest.mark.skipif(bool(standin.unusable()), reason=str(standin.unusable()))
def test_a_run_finds_them(tmp_path):
    cache, file = tmp_path / "cache", tmp_path / "kernels.tar.xz"
    requests = wanted()
    gpu_kernels.compile_by(sys.executable, standin.ARCH, requests, cache)
    gpu_kernels.pack(cache, file)
    shutil.rmtree(cache)
    done = subprocess.run([sys.executable, "-m", __name__, str(file)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[-1]) == len(requests)


def run_with(file):
    """Run `step` on the stand-in for a GPU, where it is an error to compile a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        kept = standin.install(Path(folder))
        brought = gpu_kernels.unpack(file, gpu_kernels.cache_folder())
        from triton.backends.nvidia.compiler import CUDABackend

        def refuse(*_):
            raise RuntimeError("it is compiled")

        CUDABackend.add_stages = refuse
        step()
        with pytest.raises(RuntimeError, match="it is compiled"):  # this dtype was not compiled beforehand
            safeops.masked_softmax(torch.ones(64, 128, dtype=torch.float64))
        assert gpu_kernels.compiled() == brought
        print(brought)
        del kept


if __name__ == "__main__":
    run_with(sys.argv[1])
