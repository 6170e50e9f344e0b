"""The functions of csrc/cpu/math.h are within 1 ulp, and those in LIMIT within their limit, compiled for any
instruction set."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-std=c++17 -O3 -fopenmp-simd -fno-math-errno -fno-trapping-math".split()  # the flags of setup.py
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = X86 and Path("/proc/cpuinfo").exists() and " avx2 " in Path("/proc/cpuinfo").read_text()
ISAS = {"default": (), **({"avx2": ("-mavx2", "-mfma")} if AVX2 else {})}
OPERANDS = 400_000
LIMIT = {"exp_term": 3, "expm1": 1.4, "log1p": 1.4}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("isa", ISAS)
def test_ulp(isa, tmp_path):
    program = tmp_path / "ulp"
    source = ROOT / "tests" / "cpu_math" / "ulp.cpp"
    subprocess.run(["g++", *FLAGS, *ISAS[isa], f"-I{ROOT / 'csrc'}", source, "-o", program], check=True)
    lines = subprocess.check_output([program, str(OPERANDS)], text=True).split("\n")[:-1]
    assert len(lines) == 18
    for line in lines:
        name, _, error, *_ = line.split()
        assert float(error) <= LIMIT.get(name, 1), line
