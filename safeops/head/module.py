"""HeadLoss: head_loss as a module that holds the head."""

from collections.abc import Sequence

import torch

from safeops.core import check as checks
from safeops.head._depths import DepthLosses
from safeops.head._loss import unknown_option
from safeops.head._losses import LOSSES
from safeops.head.head_loss import Head, Option, head_loss
from safeops.ops.classification.token_log_probs import TokenLogProbs


class HeadLoss(torch.nn.Module):
    """Module of `safeops.head_loss`, which describes the arguments, shapes, dtypes and errors. It holds the head.

    As a submodule of the model whose head it is, it registers that head a second time: the model's `state_dict` has its
    weights twice. Keep it outside of the model, or call `head_loss` in the model's forward.

    Args:
        head, loss, check: as `head_loss` has them.
        options: other arguments of `head_loss`, by name, also `depth_weight`. A Parameter is trained with the module;
            any other tensor becomes a buffer of it.

    Called with (hidden, target, **options): options that differ from call to call, such as mask and denominator.

    Example:
        >>> head = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
        >>> loss, hidden, target = safeops.nn.HeadLoss(head, reduction="sum"), torch.ones(2, 4), torch.tensor([0, 2])
        >>> torch.equal(loss(hidden, target), safeops.head_loss(head, hidden, target, reduction="sum"))
        True
    """

    def __init__(
        self, head: Head, *, loss: str = "cross_entropy", check: bool = False, **options: Option | Sequence[Option]
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not callable(head):
            raise TypeError(f"{name}: head must be a module or a function hidden -> logits, got {type(head).__name__}")
        checks.choice(name, "loss", loss, LOSSES)
        checks.boolean_flag(name, "check", check)
        self.head, self.loss, self.check, self.options = head, loss, check, tuple(options)
        for key, value in options.items():
            if key not in LOSSES[loss].defaults and key != "depth_weight":
                raise TypeError(unknown_option(name, loss, key, value, LOSSES[loss].defaults))
            if key not in (*LOSSES[loss].in_chunks, "depth_weight") and not isinstance(head, torch.nn.Linear):
                raise ValueError(f"{name}: {key} is for a plain nn.Linear as head: one that runs in chunks lacks it")
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                self.register_buffer(key, value)
            else:  # torch registers a Parameter by itself
                setattr(self, key, value)

    def forward(
        self,
        hidden: torch.Tensor | Sequence[torch.Tensor],
        target: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        **options: Option | Sequence[Option],
    ) -> torch.Tensor | TokenLogProbs | DepthLosses:
        name = type(self).__name__
        for key in options:
            if key in (*self.options, "loss", "check"):
                raise TypeError(f"{name}: {key} is given to the constructor")
        own = {key: getattr(self, key) for key in self.options}
        return head_loss(self.head, hidden, target, loss=self.loss, check=self.check, **own, **options)

    def extra_repr(self) -> str:
        options = {key: getattr(self, key) for key in self.options}
        shown = [f"{key}={x!r}" for key, x in options.items() if not isinstance(x, (torch.Tensor, torch.nn.Module))]
        return ", ".join([f"loss={self.loss!r}", *shown])
