"""plackett_luce_loss: the negative log-likelihood of a ranked list, given a score for each item (ListMLE)."""

import torch

from safeops.core import check, loss_reduction, sums
from safeops.core.composed_loss import ARGUMENTS, finish, validate, vectors
from safeops.core.definitions import kept
from safeops.core.dtypes import compute_dtype, wide_on_cpu
from safeops.core.foreign import refuse
from safeops.core.op import Composed
from safeops.ops.classification._classification import INDICES, has_missing_class
from safeops.ops.rankings._scan import log_cumsum_exp

NAME = "plackett_luce_loss"

# ---- definition


def define(scores, ranking, keep):
    """Returns (losses of the rows, bool: True where a row has a kept item). keep: bool of the items, or None: all.

    loss = sum_i log_total_i - s_i, s the scores in the order of the ranking, log_total_i = log sum_{k >= i} exp(s_k)
    """
    items, compute = scores.shape[-1], compute_dtype(scores.dtype)
    if not items:
        return scores.to(compute).sum(-1), torch.zeros(scores.shape[:-1], dtype=torch.bool, device=scores.device)
    ranking = ranking.long()
    ranked = check.in_range(ranking, items, ranking != -1)
    index = torch.where(ranked, ranking, 0)
    if keep is not None:
        ranked, scores = ranked & keep.gather(-1, index), torch.where(keep, scores, 0)
    s = wide_on_cpu(scores.to(compute)).gather(-1, index)
    # the loss does not change if all scores do; near 0 the sums keep their digits
    largest = torch.where(ranked, s, float("-inf")).detach().amax(-1, keepdim=True)
    s = s - torch.where(largest == float("-inf"), 0, largest)
    log_total = log_cumsum_exp(torch.where(ranked, s, float("-inf")).flip(-1)).flip(-1)
    return sums.total(torch.where(ranked, log_total - torch.where(ranked, s, 0), 0), dim=-1).to(compute), ranked.any(-1)


# ---- record

_plackett_luce_loss = Composed(
    NAME,
    *sums.ALL,
    module="PlackettLuceLoss",
    example="torch.tensor([[1.0, 0.5, -1.0]]), torch.tensor([[0, 2, 1]])",
    validate_options=loss_reduction.validate_options,
)


def _validate_ranking(ranking, scores):
    check.tensor(NAME, "ranking", ranking)
    if ranking.dtype not in INDICES:
        raise TypeError(f"{NAME}: ranking must be int64, int32 or uint8 (indices of items), got {ranking.dtype}")
    if ranking.shape != scores.shape:
        raise ValueError(f"{NAME}: ranking {check.shown(ranking)} must have the shape of scores {check.shown(scores)}")


def _refuse_missing_item(ranking, scores, keep):
    lists = None if keep is None else keep.any(-1, keepdim=True).expand(keep.shape)
    if has_missing_class(ranking, lists, -1, scores.shape[-1]):
        raise IndexError(
            f"{NAME}: ranking must hold indices of the {scores.shape[-1]} items of scores {check.shown(scores)}, or -1 "
            "for none; one is out of range"
        )


# ---- public function


@_plackett_luce_loss.public(
    "(Tensor scores, Tensor ranking, *, Tensor? mask=None, Tensor? weight=None, "
    'str reduction="mean", Tensor? denominator=None, str empty="zero") -> Tensor',
    arguments=ARGUMENTS[ARGUMENTS.index("        reduction:") :],
)
def plackett_luce_loss(
    scores, ranking, *extra, mask=None, weight=None, reduction="mean", denominator=None, empty="zero", **unknown,
):  # fmt: skip
    """sum_i log sum_{k >= i} exp(s_k) - s_i, with the scores s in the order of the ranking; the mean over the lists.

    The negative log-likelihood of Plackett and Luce's model, in which the best item is drawn first with probability
    softmax(scores), then the next one from the rest, and so on. As a loss it is ListMLE: Xia et al., "Listwise Approach
    to Learning to Rank", 2008. Of two items it is `reward_ranking_loss`.

    The running logsumexp is computed from the last item on, in fp64 on the CPU and in fp32 elsewhere (fp64 for fp64),
    and no score under- or overflows, however far apart they are.

    Args:
        scores: floating tensor (..., K), the scores of K items in each row.
        ranking: int64, int32 or uint8 tensor of `scores`' shape: the items' indices in [0, K), best first, as
            `relevance.argsort(-1, descending=True)` gives them. Each occurs once; -1 stands for no item. An item that a
            row's ranking does not name does not exist.
        mask: bool tensor, broadcastable to `scores`; True = keep. Masked-out items do not exist: NaN, inf or garbage
            there changes neither the loss nor a gradient, and their own gradient is exactly 0. A row without a kept
            item does not exist either. A mask of rows alone is (..., 1).
        weight: floating tensor, broadcastable to the rows; 0 means the same as a masked-out row. Differentiable.
        {arguments}

    Raises:
        IndexError: on the CPU, a row that `mask` keeps has an index out of range; elsewhere, and under torch.func's
            transforms, it is none.
        TypeError: `scores` is not floating, `ranking` does not hold integers, `mask` is not bool, an option is of
            another type.
        ValueError: shapes do not fit, devices differ, unknown `reduction` or `empty`.

    Example:
        >>> scores, ranking = torch.tensor([[2.0, torch.nan, 1.0]]), torch.tensor([[0, 2, 1]])
        >>> safeops.plackett_luce_loss(scores, ranking, mask=torch.tensor([True, False, True]))
        tensor(0.3133)
    """
    if extra or unknown:
        refuse(plackett_luce_loss, extra, unknown)
    rows = vectors(NAME, scores=scores)
    _validate_ranking(ranking, scores)
    check.mask(NAME, mask, "scores", scores, scores.shape)
    validate(NAME, rows, None, weight, reduction, denominator, empty, scores=scores, ranking=ranking)
    check.same_device(NAME, "scores", scores, mask=mask)
    check.no_dtensor(NAME, "scores", scores)
    keep = kept(mask, None if weight is None else weight.unsqueeze(-1))
    keep = None if keep is None else keep.expand(scores.shape)
    _refuse_missing_item(ranking, scores, keep)
    loss, counted = define(scores, ranking, keep)
    return finish(NAME, loss, counted, weight, reduction, denominator, empty)
