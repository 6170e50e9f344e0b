"""Run under compute-sanitizer: every op, forward and backward, aligned, odd, broadcast and strided, small."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import safeops  # noqa: E402
from tests.gpu.cases import OPS  # noqa: E402

for make in OPS.values():
    for n, dtype in ((4096, torch.float16), (4099, torch.bfloat16), (1, torch.float32), (2051, torch.float64)):
        make(n, dtype, 0).forward_backward()
for shape in ((33, 64), (33, 65)):
    x = torch.randn(shape, device="cuda").half().requires_grad_()
    row = torch.randn(shape[0], 1, device="cuda").half()
    index = torch.randint(-2, shape[0] + 2, (1100,), device="cuda")
    for value in (
        safeops.masked_fill(x, row > 0, 1.0),
        safeops.safe_div(x, row),
        safeops.safe_div(x.t(), row.t()),
        safeops.masked_mean(x, row > 0, dim=1),
        safeops.masked_sum(x, row > 0, dim=0),
        safeops.mse_loss(x, row, mask=row > 0),
        safeops.l1_loss(x.t(), row.t(), reduction="none"),
        safeops.safe_index_select(x, 0, index),
        safeops.safe_index_select(x.t(), 1, index),
        safeops.safe_gather(x, 0, index[:, None].expand(-1, shape[1])),
        safeops.safe_gather(x, 1, index[: shape[0], None].int()),
    ):
        value.sum().backward()
torch.cuda.synchronize()
print("done")
