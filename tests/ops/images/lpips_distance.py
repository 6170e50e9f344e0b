"""lpips_distance, whose operands are lists of features."""

import functools

import torch

from safeops.testing import Bad, Sample
from tests.ops.images.image import HERE, OF_WHOLE, by_image, keep_of, record
from tests.ops.operands import data, mask


def _of_layers(op):
    """Returns `op` for operands in a row: the features (N, C, H, W) of two layers per image, then each layer's
    weights."""

    @functools.wraps(op)
    def call(*operands, mask=None, **options):
        features, weights = operands[:4], [w.reshape(-1) for w in operands[4:]]
        return op(list(features[:2]), list(features[2:]), weights or None, mask=mask, **options)

    return call


def _lpips(features0, features1, weights=None, *, mask=None, reduction="mean", empty="zero"):
    total, exists = 0, True
    for i, (f0, f1) in enumerate(zip(features0, features1)):
        keep = keep_of(f0[:, :1], mask)
        unit_features = []
        for f in (f0, f1):
            f = torch.where(keep, f, 0)
            zero = (f == 0).all(1, keepdim=True)
            norm = torch.where(zero, 1, f).square().sum(1, keepdim=True).sqrt()
            unit_features.append(torch.where(zero, 0, f / norm))
        apart = (unit_features[0] - unit_features[1]).square()
        if weights is not None:
            w = weights[i].reshape(-1, 1, 1)
            apart = torch.where(w != 0, apart, 0) * w
        apart, keep = apart.sum(1).flatten(1), keep.flatten(1)
        count = keep.sum(1)
        total, exists = total + apart.sum(1) / count.clamp(min=1), exists & (count > 0)
    return by_image(total, exists, reduction, empty)


def _lpips_samples():
    def features(*shape, seed):
        return tuple(data(*shape, seed=seed + i) for i in range(4))

    weights = tuple(data(3, 1, 1, seed=30 + i, low=0.25, high=2.0) for i in range(2))
    keys = (0, 1, 2, 3)
    yield Sample(features(2, 3, 4, 5, seed=1), {"mask": mask(2, 1, 4, 5)}, name="masked", masked=keys, slow=True)
    options = {"mask": mask(1, 1, 4, 5, seed=1), "reduction": "none"}
    yield Sample((*features(2, 3, 4, 5, seed=5), *weights), options, name="none, weights", masked=keys)
    yield Sample(features(2, 3, 4, 5, seed=9), {"reduction": "sum"}, name="sum", masked=keys)


def _lpips_terms(sample, outcome):
    """Sizes of the terms that cancel: unit vectors differ by at most 2, with slopes of at most 4 / |f|; a position's
    share in the mean is at most 1."""
    f = sample.args[:4]
    weights = sample.args[4:] or (torch.ones(1, dtype=torch.float64),) * 2
    largest = max(float(w.abs().max()) for w in weights)
    upstream = outcome.upstream[0].abs().nan_to_num(0, 0, 0).max() if outcome.upstream else torch.ones(())
    images = f[0].shape[0] if sample.kwargs.get("reduction") == "sum" else 1
    sizes = {}
    for i, x in enumerate(f):
        norm = x.nan_to_num(0, 0, 0).norm(dim=1, keepdim=True)
        sizes[i] = upstream * largest * 8 / torch.where(norm == 0, 1, norm)
    sizes |= dict.fromkeys((4, 5), upstream * 4 * f[0].shape[0])
    return 8 * largest * images, sizes


def _bad_features():
    name, x = "lpips_distance", torch.zeros(2, 3, 4, 4)
    one, two, keep = torch.ones(3), torch.zeros(2, 5, 2, 2), torch.ones(2, 1, 4, 4, dtype=torch.bool)
    yield Bad((x, [x]), {}, TypeError, (name, "features0", "list", "Tensor"))
    yield Bad(([x], None), {}, TypeError, (name, "features1", "list", "NoneType"))
    yield Bad(([], []), {}, ValueError, (name, "features0", "got none"))
    yield Bad(([x, two], [x]), {}, ValueError, (name, "features1", "2 layers", "got 1"))
    yield Bad(([x, 1.0], [x, two]), {}, TypeError, (name, "features0[1]", "tensor", "float"))
    yield Bad(([x], [x.long()]), {}, TypeError, (name, "features1[0]", "floating", "torch.int64"))
    yield Bad(([x[0]], [x[0]]), {}, ValueError, (name, "features0[0]", "(N, C, H, W)", "(3, 4, 4)"))
    yield Bad(([x, two], [x, two[:, :4]]), {}, ValueError, (name, "features1[1]", "(2, 4, 2, 2)", "(2, 5, 2, 2)"))
    yield Bad(([x, two[:1]], [x, two[:1]]), {}, ValueError, (name, "features0[1]", "as many images", "(1, 5, 2, 2)"))
    yield Bad(([x], [x.to("meta")]), {}, ValueError, (name, "features1[0]", "meta"))
    yield Bad(([x], [x], one), {}, TypeError, (name, "weights", "list", "Tensor"))
    yield Bad(([x], [x], [one, one]), {}, ValueError, (name, "weights", "1 layers", "got 2"))
    yield Bad(([x], [x], [one[:2]]), {}, ValueError, (name, "weights[0]", "(3,)", "(2,)"))
    yield Bad(([x], [x], [one.long()]), {}, TypeError, (name, "weights[0]", "floating", "torch.int64"))
    yield Bad(([x], [x], [one.to("meta")]), {}, ValueError, (name, "weights[0]", "meta"))
    small = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    yield Bad(
        ([x], [x]), {"mask": small}, ValueError, (name, "mask", "(2, 1, 3, 9)", "images' size", str(tuple(x.shape)))
    )
    yield Bad(([x], [x]), {"mask": torch.ones(2, 1, 4, 4)}, TypeError, (name, "mask", "bool", "torch.float32"))
    yield Bad(([x], [x]), {"mask": keep[0]}, ValueError, (name, "mask", "(N, 1, H, W)", "(1, 4, 4)"))
    yield Bad(([x], [x]), {"mask": keep.expand(2, 3, 4, 4)}, ValueError, (name, "mask", "(2, 3, 4, 4)"))
    yield Bad(([x], [x]), {"mask": keep[..., :0]}, ValueError, (name, "mask", "(N, 1, H, W)", "(2, 1, 4, 0)"))
    yield Bad(([x], [x]), {"mask": keep.to("meta")}, ValueError, (name, "mask", "meta"))
    yield Bad(([x], [x]), {"reduction": "average"}, ValueError, (name, "reduction", "average"))
    yield Bad(([x], [x]), {"empty": "skip"}, ValueError, (name, "empty", "skip"))
    yield Bad(([x], [x]), {"mask": ~keep, "empty": "raise"}, ValueError, (name, "empty", "raise"))


record(
    "lpips_distance",
    _lpips,
    _lpips_samples(),
    _bad_features(),
    f"of lists: {HERE}",
    adapt=_of_layers,
    data=(0, 1, 2, 3),
    terms=_lpips_terms,
    skip={
        **OF_WHOLE,
        "errors": "the samples are made lists of: tests/contract/test_bad_calls.py has them",
        "direct": f"the samples are made lists of: {HERE} calls it directly",
        "accumulation": "what is nearly equal cancels; the sums are those of masked_mean, which has it",
    },
)
