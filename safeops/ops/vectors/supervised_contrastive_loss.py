"""supervised_contrastive_loss: a row should be nearer to the rows of its label than to all others."""

import torch

from safeops.core import check, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype
from safeops.core.foreign import refuse
from safeops.core.matmul import matmul, takes_half
from safeops.core.op import Composed
from safeops.ops.classification._classification import INDICES
from safeops.ops.classification.cross_entropy import _cross_entropy, cross_entropy
from safeops.ops.vectors._info_nce import over_temperature
from safeops.ops.vectors.info_nce_loss import temperature_for, validate_options
from safeops.ops.vectors.normalize import _normalize, normalize

NAME = "supervised_contrastive_loss"

# ---- definition


def define(features, labels, keep, temperature):
    """Returns (losses (N,), bool (N,): True where a kept row has another kept row of its label)."""
    place = labels.new_ones(labels.shape, dtype=torch.int64).cumsum(0)
    other = place[:, None] != place  # (N, N)
    if keep is not None:
        features, other = torch.where(keep.unsqueeze(-1), features, 0), other & keep
    positive = other & (labels[:, None] == labels)
    count = positive.sum(1, keepdim=True)
    counted = count[:, 0] > 0 if keep is None else keep & (count[:, 0] > 0)
    compute, half = compute_dtype(features.dtype), features.dtype if takes_half(features) else None
    # converted once: autograd adds the two gradients of z and rounds only the sum
    z = normalize(features.to(compute), dim=-1, eps=None)
    logits = torch.where(
        other, matmul(*over_temperature(temperature, half, z, z), half), float("-inf")
    )  # -inf: the row itself, and rows that are not kept, are no classes
    probabilities = positive.to(logits.dtype) / count.clamp(min=1)
    return cross_entropy(logits, probabilities, mask=counted, reduction="none"), counted


# ---- record

_supervised_contrastive_loss = Composed(
    NAME,
    _normalize,
    _cross_entropy,
    *sums.ALL,
    module="SupervisedContrastiveLoss",
    example="torch.tensor([[1.0, 0.5], [0.0, 2.0], [1.0, 0.0]]), torch.tensor([0, 1, 0])",
    validate_options=validate_options,
)


def _validate_labels(features, labels):
    check.tensor(NAME, "labels", labels)
    if labels.dtype not in INDICES:
        raise TypeError(f"{NAME}: labels must be int64, int32 or uint8, got {labels.dtype}")
    if labels.shape != features.shape[:1]:
        raise ValueError(
            f"{NAME}: labels {check.shown(labels)} must be ({features.shape[0]},), one for each row of features "
            f"{check.shown(features)}"
        )


# ---- public function

_SCHEMA = (
    "(Tensor features, Tensor labels, *, {temperature}, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor'
)


@_supervised_contrastive_loss.public(
    ".Tensor" + _SCHEMA.format(temperature="Tensor temperature"),  # (first: the float overload also accepts a tensor)
    _SCHEMA.format(temperature="float temperature=0.07"),
    arguments=ARGUMENTS.replace("the count of kept rows", "the count of kept rows that have a positive"),
)
def supervised_contrastive_loss(
    features, labels, *extra, temperature=0.07, mask=None, weight=None, reduction="mean", denominator=None,
    empty="zero", **unknown,
):  # fmt: skip
    """-log softmax(cos(row, others) / temperature) of each row, averaged over the others of its label.

        loss_i = log sum_{a != i} exp(z_i z_a / t) - mean_{p != i, y_p = y_i} z_i z_p / t,   z = normalize(features)

    Then the mean over the kept rows that have another kept row of their label. A row without one has no positive, and
    is only a negative of the others. A row is neither its own positive nor its own negative.

    L_out of Khosla et al., "Supervised Contrastive Learning", 2020, with the temperature of its code. NT-Xent (Chen et
    al., "SimCLR", 2020) is the case of two views of each sample, with equal labels: `torch.arange(N).repeat(2)`.

    Features are normalized here, by `safeops.normalize`: a zero vector has cosine 0 with everything, and gradient 0.
    The cosines are products in fp32 (fp64 for fp64), also under autocast. Half features have cosines as exact, but on
    CUDA their gradient is rounded to half before it is multiplied; fp32 features avoid that.

    Args:
        features: floating tensor (N, D), a vector for each row: the views of a batch, concatenated.
        labels: int64, int32 or uint8 tensor (N,).
        temperature: number greater than 0, or 0-dim floating tensor (differentiable), of the features' device or the
            CPU's.
        {arguments}
            A masked-out row is neither a positive nor a negative of other rows.

    Raises:
        TypeError: `features` is not floating, `labels` are not integers, `mask` is not bool, an option is of another
            type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, `temperature` out of range.

    Example:
        >>> features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> safeops.supervised_contrastive_loss(features, torch.tensor([0, 0, 1]), temperature=1.0)
        tensor(0.3133)
    """
    if extra or unknown:
        refuse(supervised_contrastive_loss, extra, unknown)
    rows = vectors(NAME, features=features)
    if features.dim() != 2:
        raise ValueError(f"{NAME}: features must be (N, D), got {check.shown(features)}")
    _validate_labels(features, labels)
    temperature = temperature_for(NAME, temperature, features)
    operands = {"features": features, "labels": labels, "temperature": temperature}
    validate(NAME, rows, mask, weight, reduction, denominator, empty, **operands)
    keep = kept(mask, weight)
    keep = None if keep is None else keep.expand(rows)
    loss, counted = define(features, labels, keep, temperature)
    return finish(NAME, loss, counted, weight, reduction, denominator, empty)
