"""`poisoned_memory` reaches what C++ kernels allocate, through torch's dispatcher and below it."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from safeops.testing import Sample, Subject, poisoned_memory, run_check

SOURCE = r"""
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
using torch::stable::Tensor;

static Tensor all_but_the_last(Tensor out) {
  float* p = reinterpret_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i + 1 < out.numel(); ++i) p[i] = 1;
  return out;
}
Tensor below(const Tensor& x) {  // aoti_torch_empty_strided is at::detail::empty_strided_cpu
  AtenTensorHandle handle;
  int64_t n = x.numel(), one = 1;
  aoti_torch_empty_strided(1, &n, &one, aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle);
  return all_but_the_last(Tensor(handle));
}
Tensor through(const Tensor& x) { return all_but_the_last(torch::stable::new_empty(x, {x.numel()})); }

STABLE_TORCH_LIBRARY(safeops_unwritten, m) {
  m.def("below(Tensor x) -> Tensor");
  m.def("through(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(safeops_unwritten, CPU, m) {
  m.impl("below", TORCH_BOX(&below));
  m.impl("through", TORCH_BOX(&through));
}
"""


@pytest.fixture(scope="module")
def unwritten(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("unwritten")
    source, library = folder / "unwritten.cpp", folder / "unwritten.so"
    source.write_text(SOURCE)
    torch_folder = Path(torch.__file__).parent
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    paths = [f"-I{torch_folder}/include", f"-I{sysconfig.get_paths()['include']}", f"-L{torch_folder}/lib"]
    subprocess.run(
        [compiler, *flags, *paths, str(source), "-o", str(library), "-ltorch_cpu", "-ltorch", "-lc10"], check=True
    )
    torch.ops.load_library(str(library))
    return torch.ops.safeops_unwritten


@pytest.mark.parametrize("way", ["below", "through"])
def test_a_cpp_kernel_that_leaves_an_element_unwritten_is_found(unwritten, way):
    op = getattr(unwritten, way)
    sample = Sample((torch.ones(4000, dtype=torch.float64),), differentiable=())
    subject = Subject(lambda x: op(x.float()), torch.ones_like, [sample], name=way)
    with pytest.raises(AssertionError, match="depends on uninitialised memory"):
        run_check(subject, "uninitialized")


def test_what_each_kind_of_poison_reaches(unwritten):
    x = torch.zeros(4000)
    with poisoned_memory("nan"):
        assert unwritten.through(x)[-1].isnan()
        assert torch.empty(5).isnan().all()
    for kind in ("0xFE", "0x7F"):
        with poisoned_memory(kind):
            for op in (unwritten.through, unwritten.below):
                assert op(x)[-1].abs() > 1e38
    assert torch.zeros(5).sum() == 0
