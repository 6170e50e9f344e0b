"""grad_norm: the norm of all gradients together, without overflow for half gradients."""

from collections.abc import Iterable

import torch

from safeops.amp._gradients import gradients, narrowed, order, total_norm


@torch.no_grad()
def grad_norm(
    parameters: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor], norm_type: float = 2.0
) -> torch.Tensor:
    """The norm of the gradients of all parameters, as if they were one vector.

    As `torch.nn.utils.get_total_norm` of the gradients, in fp32 at least, and in fp64 where squares would not fit: fp16
    gradients whose norm is beyond 65504, and fp32 gradients of 1e30 or 1e-30, have their true norm. The host reads
    nothing. The result has the same bits from run to run.

    Args:
        parameters: a module, a tensor or an iterable of tensors; those without `.grad` are left out. Their gradients
            may differ in dtype, strides and device; one that several parameters share counts once. Norms on several
            devices are combined on the first gradient's device (between CPU and GPU the host waits). DTensors
            (`fully_shard`, tensor parallel) give the norm of the whole gradients, the same on all ranks; all ranks have
            to call. Each takes its own shard, copies count once, and one collective for each mesh sends 8 bytes a rank
            (for a mesh with names that has only a part of the ranks, torch makes a process group at the first call). A
            partial gradient is first reduced to a shard on each rank.
        norm_type: order of the norm, a number above 0, or inf.

    Returns:
        A 0-dim tensor, fp32, or fp64 if a gradient is; 0 on the CPU if there is no gradient.

    Raises:
        TypeError: `parameters` holds something other than tensors, or a tensor that can have no gradient (a gradient,
            say); a gradient is sparse, complex or of another subclass than DTensor, or some are DTensors and others
            are not.
        ValueError: `norm_type` is not above 0.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
        >>> weight.grad = torch.full((4,), 60000.0, dtype=torch.float16)
        >>> safeops.grad_norm([weight])
        tensor(120000.)
    """
    ord = order("grad_norm", norm_type)
    _, result = gradients("grad_norm", parameters)
    if not result:
        return torch.tensor(0.0)
    return narrowed(total_norm(result, ord), result)
