"""The loss of causal language models as transformers calls it: for a model's `loss_function`, and for the Trainer;
and a callback that records the Trainer's steps, with which transformers itself is imported."""

from collections.abc import Mapping

import torch

from safeops import distributed
from safeops.core import check
from safeops.core.group import here, ranks_of
from safeops.ops.classification._classification import INDICES, refuse_missing_class, validate_index, validate_numbers
from safeops.ops.classification.cross_entropy import cross_entropy

NAME = "ForCausalLMLoss"


def __getattr__(name):
    if name != "SafeopsRecorder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from safeops.integrations._transformers_recorder import SafeopsRecorder

    globals()[name] = SafeopsRecorder
    return SafeopsRecorder


def ForCausalLMLoss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, *, label_smoothing=0.0,
    z_loss=0.0, sequence_group=None, **kwargs,
):  # fmt: skip
    """Cross entropy of the logits at each token and the label that follows it, as transformers' function of that name.

    transformers' function copies the logits to fp32, and its backward makes another fp32 copy. This one reads them as
    they are, in any strides, and allocates nothing as large as them except their gradient, in their dtype: it is
    `safeops.cross_entropy`, with its contract. The mean over no label at all, and a loss with 0 `num_items_in_batch`,
    is 0 with gradient 0, where transformers' is NaN.

    Set it before the model is wrapped (by PEFT, DDP or FSDP): `model.loss_function = ForCausalLMLoss`. The model still
    adds its own terms to the loss (a router's, say), and under autocast it calls the loss on logits that are still
    half. Options are bound with functools.partial.

    Where sequences are cut over ranks (context parallel), a rank's last label is the first of the rank after it:
    `sequence_group` says which ranks these are. With labels in another order, as torch's `context_parallel` with load
    balancing leaves them, `shift_labels` must have been made before the cut, which transformers' Trainer does.

    Args:
        logits: (..., T, C) floating tensor.
        labels: class indices in [0, C) or `ignore_index`, int64, int32 or uint8, of shape (..., T); copied if they are
            on another device. Not read if `shift_labels` is given; may then be None.
        vocab_size: C, or None.
        num_items_in_batch: the divisor of the sum of the losses, a number or tensor, at least 0: how many labels count
            in all batches of a step. A tensor on another device is copied. One of shape (1,) or (replicas, 1), as
            nn.DataParallel passes it, is one number repeated. None: the mean over the labels of this batch; with
            `sequence_group` over those of all its ranks: that mean is the average of the ranks' losses, as of their
            gradients under DDP and FSDP.
        ignore_index: labels that do not count.
        shift_labels: labels that are shifted already, (..., T): for each token the one that follows it; any shape with
            that many elements.
        label_smoothing: from 0 to 1, the share of the loss that is spread over all classes.
        z_loss: factor of the squared logsumexp, at least 0.
        sequence_group: the process group, or the DeviceMesh of one dim (`mesh["cp"]`), whose ranks hold consecutive
            parts of the same sequences, as `safeops.distributed.shift_labels` has it. All of them call, also one
            without tokens. None: sequences are whole, or `shift_labels` was made before they were cut.
        kwargs: other arguments that the model passes; not read.

    Returns:
        0-dim tensor, fp32 for fp16, bf16 and fp32 logits, fp64 for fp64.

    Raises:
        IndexError: on the CPU, a label that is no class and not `ignore_index`; elsewhere it is left out.
        TypeError: an argument is of another type or dtype.
        ValueError: shapes do not fit, or are not those of `vocab_size`; a number is out of range; `sequence_group` has
            several dims, or not this rank.
        RuntimeError: a collective of `sequence_group` fails.

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
    ranks, denominator = _ranks(sequence_group), _denominator(num_items_in_batch, logits.device)
    if shift_labels is not None:
        target = _labels("shift_labels", shift_labels, logits)
    else:
        # Shift the labels: a shift of the logits would cost as much as the loss, as backward copies a slice's gradient.
        labels = _labels("labels", labels, logits)
        target = distributed.shift_labels(labels, **ranks, ignore_index=ignore_index)
    target = target.reshape(logits.shape[:-1])
    if ranks and denominator is None:
        denominator = distributed.global_count(target != ignore_index, **ranks)
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
    that of the whole batch. But it does not pass on its `label_smoothing_factor`; the model sees no labels, and adds no
    terms of its own to the loss; and under autocast (`bf16=True`) accelerate copies the logits to fp32.
    `model.loss_function = ForCausalLMLoss` has none of the three limits. Nor does this function get the `shift_labels`
    that the Trainer makes before it cuts sequences over ranks (context parallel): there, too, `loss_function` is right.

    Args:
        outputs: the output of a causal language model: a dict with "logits", a tuple that begins with the logits, or
            the logits.
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
    """Check the labels; return them as int64, which holds every ignore_index, on the logits' device."""
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


def _ranks(sequence_group):
    """The ranks that share the sequences, as functions of safeops.distributed take them; empty: there are none."""
    if sequence_group is None:
        return {}
    is_mesh = isinstance(sequence_group, torch.distributed.DeviceMesh)
    if is_mesh and sequence_group.ndim != 1:
        raise ValueError(f'{NAME}: sequence_group must have one dim, as mesh["cp"] has, got {sequence_group}')
    ranks = {"group": None, "mesh": None, "mesh" if is_mesh else "group": sequence_group}
    ranks_of(f"{here(NAME)}: sequence_group", **ranks, dims=None)
    return ranks


def _denominator(items, device):
    """Check num_items_in_batch; return it as cross_entropy takes `denominator`."""
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
