"""One call of every public function of tensors, all arguments by name: what the tests of strange callers vary."""

import torch

import safeops

# what is no function of tensors, or of lists of them
OTHERS = {"clip_grad_norm_", "debug", "fp32_region", "grad_norm", "nn", "to_device"}


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(5, 6, generator=g) * 1.5 + 0.25


def mask():
    return torch.arange(30).reshape(5, 6) % 5 != 2


def _unary(**options):
    return {"input": data(), "dtype": None, **options}


def _binary(other, **options):
    return {"input": data(), other: data(1), **options}


def _reduction(**options):
    options = {"dim": 1, "keepdim": False, "weight": data(2), "dtype": None, **options}
    return {"input": data(), "mask": mask(), **options}


def _loss(**options):
    tensors = {"mask": mask(), "weight": data(2), "denominator": torch.tensor(5.0)}
    return {"input": data(), "target": data(1), **tensors, **options}


def _rows(**options):
    return {"input": data(), "dim": 1, **options}


CALLS = {
    "apply_where": {"condition": mask(), "args": data(), "f1": torch.log, "fill_value": torch.tensor(2.0)},
    "cosine_similarity": {"x1": data(), "x2": data(1), "dim": 1, "eps": 1e-3},
    "huber_loss": _loss(delta=0.5),
    "l1_loss": _loss(),
    "masked_amax": _reduction(),
    "masked_amin": _reduction(),
    "masked_compact": {"input": data(), "mask": mask(), "capacity": 20, "fill_value": 2.0},
    "masked_count": _reduction(),
    "masked_fill": {"input": data(), "fill_mask": mask(), "value": torch.tensor(2.0)},
    "masked_log_softmax": _rows(mask=mask()),
    "masked_logsumexp": _reduction(),
    "masked_mean": _reduction(),
    "masked_norm": _reduction(ord=3.0),
    "masked_rms": _reduction(),
    "masked_scatter": {"input": data(), "mask": mask(), "source": data(1)},
    "masked_select": {"input": data(), "mask": mask()},
    "masked_softmax": _rows(mask=mask()),
    "masked_std": _reduction(correction=0.5),
    "masked_sum": _reduction(),
    "masked_sum_of_squares": _reduction(),
    "masked_var": _reduction(correction=0.5),
    "mse_loss": _loss(),
    "normalize": _rows(eps=1e-3),
    "safe_acos": {"input": data()},
    "safe_asin": {"input": data()},
    "safe_atan2": _binary("other"),
    "safe_div": _binary("other", eps=0.5, fill_value=2.0, dtype=None),
    "safe_exp": _unary(),
    "safe_gather": {
        "input": data(),
        "dim": 1,
        "index": torch.tensor([[0, 9], [5, -1], [2, 2], [1, 0], [4, 5]]),
        "fill_value": 2.0,
    },
    "safe_index_select": {"input": data(), "dim": 1, "index": torch.tensor([0, 9, 5, -1]), "fill_value": 2.0},
    "safe_log": _unary(eps=0.5),
    "safe_norm": {"input": data(), "mask": mask(), "dim": 1, "ord": 3.0, "dtype": None},
    "safe_pow": _binary("exponent", dtype=None),
    "safe_reciprocal": _unary(eps=0.5, fill_value=2.0),
    "safe_rsqrt": _unary(eps=0.5),
    "safe_sqrt": _unary(eps=0.5),
    "smooth_l1_loss": _loss(beta=0.5),
    "xlogy": _binary("other"),
}


def tensors(name):
    return {key: x for key, x in CALLS[name].items() if isinstance(x, torch.Tensor)}


def call(name, **changes):
    return getattr(safeops, name)(**{**CALLS[name], **changes})


TENSORS = [(name, key) for name in CALLS for key in tensors(name)]
