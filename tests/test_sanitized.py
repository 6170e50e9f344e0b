"""`make sanitize` can fail: its sanitizers report a kernel that reads beyond its operand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import safeops

pytestmark = pytest.mark.skipif("asan" not in os.environ.get("LD_PRELOAD", ""), reason="for make sanitize")
CODE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, safeops
x = torch.ones(1000)
x.untyped_storage().resize_(x.nbytes - int(sys.argv[2]))
safeops.masked_sum(x)
"""


@pytest.mark.parametrize("missing", [0, 4])
def test_an_access_beyond_a_tensor_is_reported(missing):
    command = [sys.executable, "-c", CODE, str(Path(safeops.__file__).parents[1]), str(missing)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert ("heap-buffer-overflow" in result.stderr) == (result.returncode != 0) == bool(missing), result.stderr
