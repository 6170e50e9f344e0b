"""The loss of causal language models as transformers calls it: for a model's `loss_function`, and for the Trainer."""

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from safeops.core import check
from safeops.ops.classification._classification import INDICES, refuse_missing_class, validate_index, validate_numbers
from safeops.ops.classification.cross_entropy import cross_entropy

NAME = "ForCausalLMLoss"


def ForCausalLMLoss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, *, label_smoothing=0.0,
    z_loss=0.0, **kwargs,
):  # fmt: skip
    """Cross entropy of the logits at each token and the label that follows it, as transformers' function of that name.

    Where that one makes a copy of the logits in fp32, and its gradient another, this one reads them as they are, in any
    strides, and allocates nothing as large as them but their gradient, in their dtype: `safeops.cross_entropy`, whose
    contract it has. The mean over no label at all, and a loss with 0 `num_items_in_batch`, is 0 with gradient 0, where
    transformers' is NaN.

    A model takes it before it is wrapped (by PEFT, DDP or FSDP), keeps what it adds to its loss (of a router, say), and
    calls it on logits that are still half under autocast: `model.loss_function = ForCausalLMLoss`. Options are bound
    with functools.partial.

    Args:
        logits: (..., T, C) floating tensor.
        labels: class indices in [0, C) or `ignore_index`, int64, int32 or uint8, of shape (..., T); on another device,
            they are copied. Where `shift_labels` is there, it is not read, and may be None.
        vocab_size: C, or None.
        num_items_in_batch: what the sum of the losses is divided by, a number or tensor, at least 0: how many labels
            count in all batches of a step. A tensor on another device is copied; one of shape (1,) or (replicas, 1) is
            what nn.DataParallel makes of it, one number repeated. None: the mean over the labels of this batch.
        ignore_index: labels that do not count.
        shift_labels: the labels of (..., T) that follow each token, shifted already; any shape of as many elements.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0.
        kwargs: what else the model passes on; not read.

    Returns:
        0-dim tensor, fp32 for fp16, bf16 and fp32 logits, fp64 for fp64.

    Raises:
        IndexError: on the CPU, a label that is no class and not `ignore_index`; elsewhere it is left out.
        TypeError: an argument is of another type or dtype.
        ValueError: shapes do not fit, or are not those of `vocab_size`; a number is out of range.

    Example:
        >>> from safeops.integrations.transformers import ForCausalLMLoss
        >>> logits = torch.tensor([[[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]]], dtype=torch.bfloat16)
        >>> ForCausalLMLoss(logits, torch.tensor([[0, 1, -100]]), vocab_size=2)
        tensor(0.1269)
    """
    check.floating(NAME, "logits", logits)
    if logits.dim() < 2 or vocab_size is not None and vocab_size != logits.shape[-1]:
        raise ValueError(f"{NAME}: logits {check.shown(logits)} must be (..., T, vocab_size), which is {vocab_size}")
    validate_index(NAME, ignore_index)
    validate_numbers(NAME, label_smoothing, z_loss)
    if shift_labels is not None:
        target = _labels("shift_labels", shift_labels, logits)
    else:
        # A shift of the logits would cost as much as the loss: the gradient of a slice is copied into one of the whole.
        target = pad(_labels("labels", labels, logits), (0, 1), value=ignore_index)[..., 1:]
    target, denominator = target.reshape(logits.shape[:-1]), _denominator(num_items_in_batch, logits.device)
    options = {"label_smoothing": label_smoothing, "z_loss": z_loss, "denominator": denominator}
    try:
        return cross_entropy(logits.movedim(-1, 1), target, ignore_index=ignore_index, **options)
    except IndexError:
        key = "labels" if shift_labels is None else "shift_labels"
        refuse_missing_class(NAME, target, None, ignore_index, logits.shape[-1], "logits", logits.shape, key)
        raise


def compute_loss_func(outputs, labels, num_items_in_batch=None, *, label_smoothing=0.0, z_loss=0.0):
    """`ForCausalLMLoss` as transformers' Trainer takes a loss: `Trainer(..., compute_loss_func=compute_loss_func)`.

    The Trainer counts the labels of all batches over which gradients are accumulated, on all ranks, so that the step is
    that of the whole batch. It does not pass on its `label_smoothing_factor`, and the model, which sees no labels, adds
    nothing to the loss; `model.loss_function = ForCausalLMLoss` leaves both to them. So it does with the logits, of
    which accelerate makes a copy in fp32 where it runs the model under autocast (`bf16=True`).

    Args:
        outputs: what a causal language model gives: a dict with "logits", a tuple that begins with them, or these.
        labels: as `ForCausalLMLoss` has it.
        num_items_in_batch: as `ForCausalLMLoss` has it.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0.

    Returns:
        0-dim tensor, fp32 for fp16, bf16 and fp32 logits, fp64 for fp64.

    Raises:
        IndexError: on the CPU, a label that is no class and not -100; elsewhere it is left out.
        TypeError: there are no logits or labels, or they are of another type or dtype.
        ValueError: shapes do not fit, or a number is out of range.

    Example:
        >>> from safeops.integrations.transformers import compute_loss_func
        >>> outputs = {"logits": torch.tensor([[[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]]])}
        >>> compute_loss_func(outputs, torch.tensor([[0, 1, -100]]), num_items_in_batch=torch.tensor(4))
        tensor(0.0317)
    """
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif isinstance(outputs, (tuple, list)):
        outputs = next(iter(outputs), None)
    return ForCausalLMLoss(outputs, labels, None, num_items_in_batch, label_smoothing=label_smoothing, z_loss=z_loss)


def _labels(name, labels, logits):
    """Labels, checked, of a dtype that holds every ignore_index, where the logits are."""
    check.tensor(NAME, name, labels)
    if labels.dtype not in INDICES:
        raise TypeError(f"{NAME}: {name} must be int64, int32 or uint8 (class indices), got {labels.dtype}")
    tokens = logits.shape[:-1]
    fits = labels.shape == tokens if name == "labels" else labels.dim() > 0 and labels.numel() == tokens.numel()
    if not fits:
        raise ValueError(
            f"{NAME}: {name} {check.shown(labels)} must have the shape {tuple(tokens)} of the tokens of "
            f"logits {check.shown(logits)}"
        )
    return labels.to(logits.device, torch.int64)


def _denominator(items, device):
    """The number of labels as `denominator=` has it."""
    if not isinstance(items, torch.Tensor):
        if items is not None:
            check.number(NAME, "num_items_in_batch", items, minimum=0)
        return items
    check.real(NAME, "num_items_in_batch", items)
    if items.dtype == torch.bool:
        raise TypeError(f"{NAME}: num_items_in_batch must be a real number, got {items.dtype}")
    if items.dim():
        if items.numel() == 0 or items.shape[-1] != 1:
            raise ValueError(f"{NAME}: num_items_in_batch must be one number, got shape {check.shown(items)}")
        items = items.flatten()[0]  # the Trainer repeats it for each replica of nn.DataParallel: (replicas, 1)
    return items.to(device)
