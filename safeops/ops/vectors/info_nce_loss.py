"""info_nce_loss: a query should be nearer to its own key than to other keys."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate, vectors
from safeops.core.definitions import kept
from safeops.core.foreign import refuse
from safeops.core.matmul import matmul
from safeops.core.op import Composed
from safeops.ops.classification.cross_entropy import _cross_entropy, cross_entropy
from safeops.ops.vectors._info_nce import InfoNCE, backward, define, factors, forward
from safeops.ops.vectors.normalize import _normalize

NAME = "info_nce_loss"


def _validate_temperature(name, temperature):
    if not isinstance(temperature, torch.Tensor):
        return check.number(name, "temperature", temperature, above=0)
    check.floating(name, "temperature", temperature)
    check.real_scalar(name, "temperature", temperature)


def validate_options(name, reduction, empty, temperature):
    loss_reduction.validate_options(name, reduction, empty)
    _validate_temperature(name, temperature)


def temperature_for(name, temperature, x):
    """Validate a temperature. A CPU tensor is moved to x's device."""
    _validate_temperature(name, temperature)
    # (as torch, which accepts a 0-dim CPU tensor beside CUDA tensors)
    return temperature.to(x.device) if isinstance(temperature, torch.Tensor) and temperature.is_cpu else temperature


in_batch = InfoNCE(NAME, forward, backward, define)
_info_nce_loss = Composed(
    NAME,
    _normalize,
    _cross_entropy,
    *sums.ALL,
    module="InfoNCELoss",
    example="torch.eye(2), torch.tensor([[1.0, 0.5], [0.0, 2.0]])",
    validate_options=validate_options,
)


def _validate_negatives(query, negative_keys):
    if negative_keys is None:
        return
    check.floating(NAME, "negative_keys", negative_keys)
    rows, width = query.shape
    fits = negative_keys.dim() in (2, 3) and negative_keys.shape[-1] == width
    if not fits or negative_keys.dim() == 3 and negative_keys.shape[0] != rows:
        raise ValueError(
            f"{NAME}: negative_keys {check.shown(negative_keys)} must be (M, {width}), or ({rows}, M, {width}) where "
            f"each row has its own, for query {check.shown(query)}"
        )


_SCHEMA = (
    "(Tensor query, Tensor positive_key, Tensor? negative_keys=None, *, {temperature}, Tensor? mask=None, "
    'Tensor? weight=None, str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor'
)


@_info_nce_loss.public(
    ".Tensor" + _SCHEMA.format(temperature="Tensor temperature"),  # (first: the float overload also accepts a tensor)
    _SCHEMA.format(temperature="float temperature=0.1"),
    arguments=ARGUMENTS,
)
def info_nce_loss(
    query, positive_key, negative_keys=None, *extra, temperature=0.1, mask=None, weight=None, reduction="mean",
    denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """-log softmax(cos(query, keys) / temperature) at each query's own key; the mean over the kept rows.

    The keys of a row are its `positive_key` and its negatives: by default the positive keys of all other kept rows.
    Queries are no negatives, and two rows with equal keys are negatives of each other. (`supervised_contrastive_loss`,
    and its case NT-Xent, compare each vector with all others.) van den Oord et al., "Representation Learning with
    Contrastive Predictive Coding", 2018.

    The cosines are products in fp32 (fp64 for fp64), also under autocast. Half vectors have cosines as exact, but on
    CUDA their gradient is rounded to half before it is multiplied; fp32 vectors avoid that. A zero vector has cosine 0
    with everything, and gradient 0.

    Args:
        query: floating tensor (N, D), a vector for each row.
        positive_key: floating tensor of `query`'s shape: the key that belongs to the query.
        negative_keys: floating tensor, in place of the other rows' keys: (M, D) for all rows, or (N, M, D), M each.
        temperature: number greater than 0, or 0-dim floating tensor (differentiable, such as CLIP's), of the query's
            device or the CPU's.
        {arguments}
            The key of a masked-out row is no negative of other rows either.

    Raises:
        TypeError: an operand is not floating, `mask` is not bool, an option is of another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`, `temperature` out of range.

    Example:
        >>> query, key = torch.eye(3), torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
        >>> safeops.info_nce_loss(query, key, temperature=1.0, mask=torch.tensor([True, True, False]))
        tensor(0.3133)
    """
    if extra or unknown:
        refuse(info_nce_loss, extra, unknown)
    rows = vectors(NAME, query=query, positive_key=positive_key)
    if query.dim() != 2:
        raise ValueError(f"{NAME}: query must be (N, D), got {check.shown(query)}")
    _validate_negatives(query, negative_keys)
    temperature = temperature_for(NAME, temperature, query)
    operands = {
        "query": query,
        "positive_key": positive_key,
        "negative_keys": negative_keys,
        "temperature": temperature,
    }
    validate(NAME, rows, mask, weight, reduction, denominator, empty, **operands)
    keep = kept(mask, weight)
    keep = None if keep is None else keep.expand(rows)
    if negative_keys is None:
        number, temperature = (1.0, temperature) if isinstance(temperature, torch.Tensor) else (temperature, None)
        loss = in_batch.call(query, positive_key, keep, temperature, number)
    else:
        if keep is not None:
            query, positive_key = (torch.where(keep.unsqueeze(-1), x, 0) for x in (query, positive_key))
            if negative_keys.dim() == 3:
                negative_keys = torch.where(keep[:, None, None], negative_keys, 0)
        query, key, negatives, half = factors(temperature, query, positive_key, negative_keys)
        near = sums.total(query * key, dim=-1, keepdim=True)
        each = negatives.dim() == 3
        far = matmul(query[:, None], negatives)[:, 0] if each else matmul(query, negatives, half)
        logits = torch.cat([near, far], 1)  # (N, 1 + M): the row's own key first
        target = logits.new_zeros(rows, dtype=torch.int64)
        loss = cross_entropy(logits, target, mask=keep, reduction="none")
    return finish(NAME, loss, keep, weight, reduction, denominator, empty)
