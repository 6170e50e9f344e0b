"""The CPU kernels' own exp, log, arcs and powers are within 1 ulp, whatever instruction set they are compiled for."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-std=c++17 -O3 -fopenmp-simd -fno-math-errno -fno-trapping-math".split()  # as setup.py has them
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = X86 and Path("/proc/cpuinfo").exists() and " avx2 " in Path("/proc/cpuinfo").read_text()
ISAS = {"default": (), **({"avx2": ("-mavx2", "-mfma")} if AVX2 else {})}
OPERANDS = 400_000


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("isa", ISAS)
def test_within_one_ulp(isa, tmp_path):
    program = tmp_path / "ulp"
    source = ROOT / "tests" / "cpu_math" / "ulp.cpp"
    subprocess.run(["g++", *FLAGS, *ISAS[isa], f"-I{ROOT / 'csrc'}", source, "-o", program], check=True)
    lines = subprocess.check_output([program, str(OPERANDS)], text=True).split("\n")[:-1]
    assert len(lines) == 12
    for line in lines:
        assert float(line.split()[2]) <= 1, line
