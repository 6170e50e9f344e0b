"""Calls in the form of other libraries: each error ends with an expression that works with the call's arguments."""

import inspect
import re

import pytest
import torch

import safeops
from safeops.core.foreign import NAMES, signed


def parameters(function):
    return inspect.signature(function).parameters.values() if inspect.isfunction(function) else ()


IMAGES = {"input": torch.rand(2, 3, 4, 4), "target": torch.rand(2, 3, 4, 4)}
PLANES = {"input": torch.rand(2, 4, 4), "target": torch.rand(2, 4, 4)}
ONE = {"input": torch.rand(2, 1, 4, 4), "target": (torch.rand(2, 4, 4) > 0.5).float()}
INDICES = torch.randint(3, (2, 4, 4))
TOKENS = {"input": torch.rand(2, 7, 5), "target": torch.randint(5, (2, 7))}
KEEP = torch.rand(2, 4, 4) > 0.5
CU_SEQLENS = torch.tensor([0, 1])

# (function, a refused call, the argument that the error says to change)
RESHAPED = [
    ("mse_loss", {**IMAGES, "mask": KEEP}, "mask"),
    ("mse_loss", {**IMAGES, "weight": torch.rand(2, 4, 4)}, "weight"),
    ("mse_loss", {**IMAGES, "target": torch.rand(2, 4, 4)}, "target"),
    ("mse_loss", {**IMAGES, "input": torch.rand(2, 4, 4)}, "input"),
    ("l1_loss", {**PLANES, "mask": KEEP.unsqueeze(1)}, "mask"),
    ("mse_loss", {**IMAGES, "mask": torch.ones(2, 3, 4, 4, dtype=torch.uint8)}, "mask"),
    ("masked_mean", {"input": torch.rand(3), "mask": torch.ones(3, dtype=torch.int64)}, "mask"),
    ("cross_entropy", TOKENS, "input"),
    ("cross_entropy", {**TOKENS, "target": TOKENS["target"].flatten()}, "input"),
    ("cross_entropy", {"input": torch.rand(2, 4, 5, 3), "target": torch.randint(3, (2, 4, 5))}, "input"),
    ("nll_loss", TOKENS, "input"),
    ("softmax_focal_loss", TOKENS, "input"),
    ("cross_entropy", {**IMAGES, "target": INDICES.unsqueeze(1)}, "target"),
    ("cross_entropy", {**IMAGES, "target": INDICES.float()}, "target"),
    ("nll_loss", {**IMAGES, "target": INDICES.float()}, "target"),
    ("softmax_focal_loss", {**IMAGES, "target": INDICES.short()}, "target"),
    ("cross_entropy", {**IMAGES, "target": INDICES, "mask": KEEP.unsqueeze(1)}, "mask"),
    ("dice_loss", {**IMAGES, "target": INDICES.unsqueeze(1)}, "target"),
    ("dice_loss", {**IMAGES, "target": INDICES.unsqueeze(1), "ignore_index": 2}, "target"),
    ("tversky_loss", {**IMAGES, "target": INDICES.float()}, "target"),
    ("generalized_dice_loss", ONE, "target"),
    ("dice_loss", {"input": torch.rand(2, 6, 5, 3), "target": torch.randint(3, (2, 6, 5))}, "input"),
]


@pytest.mark.parametrize("name, arguments, key", RESHAPED)
def test_the_argument_that_an_error_says_is_taken(name, arguments, key):
    function = getattr(safeops, name)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*: say {key}\b") as error:
        function(**arguments)
    expression = str(error.value).rpartition(": say ")[2]
    assert function(**{**arguments, key: eval(expression, dict(arguments))}).isfinite().all()


SCORES = torch.rand(2, 7, 5).log_softmax(-1)  # log probabilities (..., C)
LAYER = torch.eye(5)
ONE_HOT = [  # (function, its operands without the target, the dim of the classes); the target should be indices
    ("cross_entropy", {"input": SCORES.movedim(-1, 1)}, 1),
    ("cross_entropy", {"input": SCORES.flatten(0, 1)}, 1),
    ("nll_loss", {"input": SCORES.movedim(-1, 1)}, 1),
    ("softmax_focal_loss", {"input": SCORES.movedim(-1, 1)}, 1),
    ("multi_margin_loss", {"input": SCORES}, -1),
    ("token_log_probs", {"logits": SCORES}, -1),
    ("linear_cross_entropy", {"input": SCORES, "linear_weight": LAYER}, -1),
    ("linear_token_log_probs", {"input": SCORES, "linear_weight": LAYER}, -1),
]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("name, operands, dim", ONE_HOT)
def test_integers_of_the_shape_of_probabilities(name, operands, dim, dtype):
    function, indices = getattr(safeops, name), torch.randint(5, (2, 7))
    indices = indices.flatten() if next(iter(operands.values())).dim() == 2 else indices
    target = torch.nn.functional.one_hot(indices, 5).movedim(-1, dim).to(dtype)
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: target .*: say target\.") as error:
        function(**operands, target=target)
    *probabilities, classes = str(error.value).rpartition(": say ")[2].split(" (probabilities), or ")
    assert probabilities == (["target.float()"] if name == "cross_entropy" else [])
    results = [function(**operands, target=eval(x, {"target": target})) for x in (*probabilities, classes)]
    torch.testing.assert_close(results, [function(**operands, target=indices)] * len(results))


def test_one_hot_of_one_row():
    x = torch.rand(5)
    with pytest.raises(ValueError, match=r"say target\.float\(\) \(probabilities\), or target\.argmax\(0\)$"):
        safeops.cross_entropy(x, (x == x.max()).long())


@pytest.mark.parametrize("name", ["masked_softmax", "masked_log_softmax", "masked_mean", "segment_sum", "mse_loss"])
def test_a_float_mask_of_either_kind(name):
    """The error must tell two float masks apart: 0 and 1, and the kind that is added to scores (0 where kept)."""
    x, keep, function = torch.rand(2, 5), torch.tensor([True, False, True, True, False]), getattr(safeops, name)
    operands = (x, x) if name == "mse_loss" else (x,)
    options = {"cu_seqlens": torch.tensor([0, 2])} if name == "segment_sum" else {}
    kinds = [keep.float(), (1.0 - keep.float()) * -1e9, torch.where(keep, 0.0, -torch.inf)]
    for mask, additive in zip(kinds, (False, True, True)):
        with pytest.raises(TypeError, match=r"say mask > 0\.5 \(an additive mask: mask == 0\)$") as error:
            function(*operands, mask=mask, **options)
        one, other = re.search(r"say (.*) \(an additive mask: (.*)\)$", str(error.value)).groups()
        assert torch.equal(eval(other if additive else one), keep)
    with pytest.raises(TypeError, match=r"say condition > 0\.5$"):
        safeops.apply_where(x, x, torch.exp, fill_value=0)


@pytest.mark.parametrize("name", ["binary_cross_entropy", "huber_loss", "hinge_embedding_loss", "poisson_nll_loss"])
def test_a_mask_in_the_place_of_another_argument(name):
    """For a mask at the place where torch's function has a weight, reduction, margin or flag, the error must say
    `mask=`."""
    x = torch.rand(3)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*: say mask=$"):
        getattr(safeops, name)(x, x, x > 0.5)


@pytest.mark.parametrize("name", ["masked_mean", "masked_amax", "masked_logsumexp", "masked_count", "masked_var"])
@pytest.mark.parametrize("dim", [-1, (0, 1), [0]])
def test_a_dim_in_the_place_of_a_mask(name, dim):
    x, function = torch.rand(2, 3), getattr(safeops, name)
    with pytest.raises(TypeError, match=rf"^{name}: mask must be a tensor, got .*: say dim=.*$") as error:
        function(x, dim)
    assert torch.equal(function(x, dim=eval(str(error.value).rpartition("say dim=")[2])), function(x, None, dim))


@pytest.mark.parametrize("name", ["masked_softmax", "masked_log_softmax"])
def test_a_dim_in_the_place_of_the_mask_of_a_softmax(name):
    with pytest.raises(TypeError, match=rf"^{name}: mask must be a tensor, got int: say dim=-1$"):
        getattr(safeops, name)(torch.rand(2, 3), -1)


@pytest.mark.parametrize("name", ["masked_mean", "safe_norm", "masked_compact", "mse_loss"])
def test_what_is_no_dim(name):
    """The error offers no expression with `dim=` if the function has no `dim`, or the value is not a dim."""
    x, function = torch.rand(2, 3), getattr(safeops, name)
    values, options = (True, [True], "-1", 1.0), {"capacity": 3} if name == "masked_compact" else {}
    for value in values if name == "masked_mean" else (*values, -1):
        operands = (x, x) if name == "mse_loss" else (x,)
        with pytest.raises(TypeError, match=rf"^{name}: mask must be a tensor, got [a-z]+$"):
            function(*operands, mask=value, **options)


def test_a_mask_in_the_place_of_a_dim():
    x = torch.rand(2, 3)
    with pytest.raises(TypeError, match=r"^safe_norm: dim must be an int.*, got a tensor: say mask=$"):
        safeops.safe_norm(x, x > 0)


def test_the_third_operand_of_info_nce_loss():
    """A mask or a temperature as third operand, which is negative_keys, must be refused with the right keyword."""
    x = torch.rand(4, 3)
    with pytest.raises(TypeError, match="^info_nce_loss: negative_keys must be .*: say mask=$"):
        safeops.info_nce_loss(x, x, torch.rand(4) > 0.5)
    with pytest.raises(TypeError, match=r"^info_nce_loss: negative_keys must be .*: say temperature=0\.07$"):
        safeops.info_nce_loss(x, x, 0.07)


NUMBERS = torch.rand(2, 3)
POSITIONS = [
    ("safe_div", (NUMBERS, NUMBERS, 1e-8), "say eps=1e-08"),
    ("safe_log", (NUMBERS, 1e-8), "say eps=1e-08"),
    ("safe_log", (NUMBERS, torch.float64), r"say dtype=torch\.float64"),
    ("safe_rsqrt", (NUMBERS, 1e-5), "say eps=1e-05"),
    ("safe_gather", (NUMBERS, 0, INDICES[0, :2, :3], -1), "say fill_value=-1"),
    ("masked_compact", (NUMBERS, NUMBERS > 0.5, 4), "say capacity=4"),
    ("masked_var", (NUMBERS, None, 1, 0), "say correction=0"),
    ("masked_mean", (NUMBERS, None, 1, True), "say keepdim=True"),
    ("masked_norm", (NUMBERS, None, 1, 1.0), r"say ord=1\.0"),
    ("smooth_l1_loss", (NUMBERS, NUMBERS, 2.0), r"say beta=2\.0"),
    ("mse_loss", (NUMBERS, NUMBERS, "sum"), "say reduction='sum'"),
    ("ssim", (IMAGES["input"], IMAGES["target"], 255), r"give the others by name \(.*\)"),
    ("mse_loss", (NUMBERS, NUMBERS, True), r"give the others by name \(.*\)"),
    ("silog_loss", (NUMBERS, NUMBERS, 0.5), r"give the others by name \(.*\)"),
    ("dice_loss", (NUMBERS, NUMBERS, 1.0), r"give the others by name \(.*\)"),
]


@pytest.mark.parametrize("name, operands, words", POSITIONS)
def test_a_value_that_may_not_come_by_position(name, operands, words):
    function = getattr(safeops, name)
    with pytest.raises(TypeError, match=rf"^{name}\(\) takes . positional .* were given: {words}$") as error:
        function(*operands)
    if words.startswith("say"):
        says = str(error.value).rpartition("say ")[2]
        eval(f"function(*operands[:-1], {says})", {**locals(), "torch": torch})


def test_arguments_that_are_missing():
    keep = NUMBERS > 0.5
    for input in (NUMBERS, NUMBERS.long()):
        for function, operands, name in (
            (safeops.masked_compact, (keep,), "capacity"),
            (safeops.masked_fill, (keep,), "value"),
            (safeops.masked_fill, (), "fill_mask"),
        ):
            words = rf"^{function.__name__}\(\) missing 1 required argument: '{name}'$"
            with pytest.raises(TypeError, match=words):
                function(input, *operands)
            with pytest.raises(Exception, match="missing 1 required argument"):
                torch.compile(lambda *x, f=function: f(*x), backend="eager", fullgraph=True)(input, *operands)


def test_the_mask_of_torchs_masked_fill():
    mask = NUMBERS > 0.5
    with pytest.raises(TypeError, match=r"^masked_fill\(\) .* 'mask': say fill_mask=mask$"):
        safeops.masked_fill(NUMBERS, mask=mask, value=0)
    assert torch.equal(safeops.masked_fill(NUMBERS, fill_mask=mask, value=0), NUMBERS.masked_fill(mask, 0))


def test_the_options_of_torchs_clip_grad_norm_():
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([torch.inf, 1.0])
    for key, value, words in (
        ("error_if_nonfinite", True, 'say nonfinite="raise"'),
        ("error_if_nonfinite", False, "leave it out"),
        ("foreach", None, "leave it out"),
        ("foreach", True, "leave it out"),
    ):
        with pytest.raises(TypeError, match=rf"^clip_grad_norm_\(\) got an unexpected .* '{key}': {words}$"):
            safeops.clip_grad_norm_([weight], 1.0, **{key: value})
        if key == "error_if_nonfinite":
            with pytest.raises(TypeError, match=rf"^clip_grad_norm_\(\) takes 3 .* 4 were given: {words}$"):
                safeops.clip_grad_norm_([weight], 1.0, 2.0, value)
    with pytest.raises(ValueError, match="1 inf"):
        safeops.clip_grad_norm_([weight], 1.0, nonfinite="raise")


SCORE_MASKS = [  # masks that keep only the second element
    (torch.tensor([False, True]), r"mask={}, where True is kept$"),
    (torch.tensor([0, 1]), r"mask={} != 0$"),
    (torch.tensor([0.0, 1.0]), r"mask={} > 0\.5 \(an additive mask: mask={} == 0\)$"),
]


@pytest.mark.parametrize("key", ["attn_mask", "attention_mask"])
@pytest.mark.parametrize("mask, words", SCORE_MASKS)
def test_masks_of_attention(key, mask, words):
    with pytest.raises(TypeError, match=rf"argument '{key}': say {words.replace('{}', key)}") as error:
        safeops.masked_softmax(torch.rand(3, 2), **{key: mask})
    expression = re.search(r"say mask=([^,(]*)", str(error.value))[1]
    assert eval(expression, {key: mask}).tolist() == [False, True]


def test_masks_of_padding():
    for mask, says in ((torch.tensor([True, False]), "~key_padding_mask"), (NUMBERS, "key_padding_mask == 0")):
        with pytest.raises(TypeError, match=f": say mask={says}$"):
            safeops.masked_softmax(torch.rand(3, 2), key_padding_mask=mask)


LABELLED = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "hinge_embedding_loss", "kl_div"]
LABELLED += ["poisson_nll_loss", "multilabel_soft_margin_loss", "silog_loss", "quantile_loss"]
REDUCED = ["masked_mean", "safe_norm", "segment_sum", "masked_softmax", "normalize", "total_variation"]


@pytest.mark.parametrize("name", LABELLED)
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool], ids=str)
def test_a_target_of_integers(name, dtype):
    input, target, function = torch.rand(2, 3), torch.ones(2, 3, dtype=dtype), getattr(safeops, name)
    options = {"quantile": [0.1, 0.5, 0.9]} if name == "quantile_loss" else {}
    with pytest.raises(TypeError, match=rf"^{name}: target must be .*, got {dtype}: say target\.float\(\)$"):
        function(input, target, **options)
    assert function(input, target.float(), **options).isfinite()


@pytest.mark.parametrize("name", REDUCED)
def test_an_input_of_integers(name):
    options = {"cu_seqlens": CU_SEQLENS} if name == "segment_sum" else {}
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(TypeError, match=rf"^{name}: input must be .*, got {dtype}: say input\.float\(\)$"):
            getattr(safeops, name)(torch.ones(1, 3, 4, 4, dtype=dtype), **options)
    with pytest.raises(TypeError, match="got torch.complex64$"):
        getattr(safeops, name)(torch.ones(1, 3, 4, 4, dtype=torch.complex64), **options)


def test_integers_that_are_no_numbers():
    """For class indices as logits and for pixels of 0 to 255 the error must not offer a cast, which would not help."""
    for name in ("cross_entropy", "token_log_probs", "ssim"):
        with pytest.raises(TypeError, match=r"got torch\.int64$"):
            getattr(safeops, name)(torch.ones(1, 3, 8, 8, dtype=torch.int64), torch.rand(1, 3, 8, 8))


def test_a_mask_is_no_remedy_where_there_is_none():
    with pytest.raises(TypeError, match="got Tensor$"):
        safeops.safe_div(torch.ones(3), 2.0, eps=torch.ones(3) > 0)


def test_a_target_that_lacks_the_channels_is_warned_of():
    with pytest.warns(UserWarning, match=r"else say target\.unsqueeze\(1\)$"):
        safeops.binary_cross_entropy(**ONE)


def test_what_combine_losses_returns_is_no_loss():
    result = safeops.combine_losses({"a": torch.ones((), requires_grad=True)})
    with pytest.raises(AttributeError, match=r"^combine_losses: .* has no 'backward': say \.total\.backward\(\)$"):
        result.backward()
    with pytest.raises(AttributeError, match=r"say \.total\.grad$"):
        result.grad  # noqa: B018
    with pytest.raises(AttributeError, match="has no 'loss'$"):
        result.loss  # noqa: B018
    assert not hasattr(result, "backward")


# Functions with arguments beside the operands, any of which a call with too many operands could mean.
CATCHING = [
    name
    for name, x in vars(safeops).items()
    if getattr(x, "__module__", "").startswith("safeops.ops.") and name != "apply_where"
    if any(p.kind is p.KEYWORD_ONLY or p.name in ("dim", "fill_mask") for p in parameters(x))
]


@pytest.mark.parametrize("name", CATCHING)
def test_every_function_refuses_what_it_has_not(name):
    function = getattr(safeops, name)
    assert all(x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) for x in parameters(function))
    positional = [torch.ones(3) for x in parameters(function) if x.kind is x.POSITIONAL_OR_KEYWORD]
    count = len(positional)
    keywords = [x.name for x in parameters(function) if x.kind is x.KEYWORD_ONLY]
    words = r": give the others by name \(.*=\)" if keywords else ""
    words = ": say mask=" if "mask" in keywords else words
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) takes {count} positional arguments but {count + 1} were given{words}$"
    ):
        function(*positional, torch.ones(3) > 0)
    required = [torch.ones(3) for x in parameters(function) if x.default is x.empty and x.name not in keywords]
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'msk', which does not exist here; "
    ):
        function(*required, msk=None)


SOFTMAX = r"torch\.softmax\(input, 1\) as input, of 1 channel torch\.sigmoid\(input\)"
KEYWORDS = [
    ("mse_loss", {"size_average": True}, r'say reduction="mean" or "sum"'),
    ("mse_loss", {"size_average": None}, "leave it out"),
    ("dice_loss", {"softmax": True}, f"say {SOFTMAX}"),
    ("dice_loss", {"softmax": False}, "leave it out"),
    ("dice_loss", {"sigmoid": True}, r"say torch\.sigmoid\(input\) as input"),
    ("dice_loss", {"from_logits": True}, f"say {SOFTMAX}"),
    ("dice_loss", {"include_background": True}, "leave it out"),
    ("dice_loss", {"to_onehot_y": True}, r"leave it out: target may be class indices \(N, d1, \.\.\.\)"),
    ("dice_loss", {"smooth": 1.0}, r"say smooth_nr=1\.0, smooth_dr=1\.0"),
    ("ssim", {"window_size": 7}, "say win_size=7"),
    (
        "masked_mean",
        {"cu_seqlens": CU_SEQLENS},
        r"say safeops\.segment_sum\(input, cu_seqlens=cu_seqlens\), or segment_mean, .*",
    ),
    ("masked_mean", {"axis": -1}, "say dim=-1"),
    ("masked_mean", {"axis": (0, 1)}, r"say dim=\(0, 1\)"),
    ("masked_mean", {"where": torch.ones(3) > 0}, "say mask=where"),
    ("mse_loss", {"sample_weight": None}, "say weight=None"),
    ("masked_softmax", {"axis": -1}, "say dim=-1"),
    ("masked_log_softmax", {"axis": -1}, "say dim=-1"),
    ("normalize", {"axis": -1}, "say dim=-1"),
    ("cosine_similarity", {"axis": -1}, "say dim=-1"),
    ("safe_norm", {"keepdims": True}, "say keepdim=True"),
    ("safe_log", {"epsilon": 1e-8}, "say eps=1e-08"),
    ("masked_var", {"unbiased": False}, "say correction=0"),
    ("masked_std", {"unbiased": True}, "say correction=1"),
    ("masked_var", {"ddof": 0}, "say correction=0"),
    ("info_nce_loss", {"tau": 0.07}, r"say temperature=0\.07"),
    ("info_nce_loss", {"logit_scale": 100.0}, r"say temperature=1 / 100\.0"),
    ("supervised_contrastive_loss", {"logit_scale": CU_SEQLENS}, "say temperature=1 / logit_scale"),
    ("smooth_l1_loss", {"delta": 2.0}, r"say beta=2\.0"),
    ("huber_loss", {"beta": 2.0}, r"say delta=2\.0"),
    ("tversky_loss", {"delta": 0.7}, "which does not exist here; .*"),
    ("cross_entropy", {"alpha": 0.5}, "which does not exist here; the arguments are input, target, .*"),
]


@pytest.mark.parametrize("name, options, words", KEYWORDS)
def test_keywords_of_other_libraries(name, options, words):
    function, key = getattr(safeops, name), next(iter(options))
    operands = [torch.ones(1, 3, 3) for x in parameters(function) if x.default is x.empty]
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '{key}'[:,] ?{words}$"):
        function(*operands, **options)


def advice(function, *operands, **options):
    with pytest.raises(TypeError) as error:
        function(*operands, **options)
    return str(error.value).rpartition("say ")[2]


def test_a_background_is_dropped_where_there_is_one():
    input, target = IMAGES["input"].softmax(1), INDICES
    words = "1 channel has no background, leave it out; of "
    for name, module in (("dice_loss", "DiceLoss"), ("tversky_loss", "TverskyLoss")):
        function, module = getattr(safeops, name), getattr(safeops.nn, module)
        with pytest.raises(TypeError, match=f": {words}more say "):
            function(ONE["input"], ONE["target"].unsqueeze(1), include_background=False)
        weight = advice(function, input, target, include_background=False)
        loss = eval(f"function(input, target, {weight})", {**globals(), **locals()})
        torch.testing.assert_close(loss, function(input, target, reduction="none")[:, 1:].mean())
        with pytest.raises(TypeError, match=f": {words}C channels say "):
            module(include_background=False)
        weight = advice(module, include_background=False)
        assert torch.equal(eval(f"module({weight})", {**locals(), "torch": torch, "C": 3})(input, target), loss)
        with pytest.raises(TypeError, match=": leave it out$"):
            module(include_background=True)


def test_the_alpha_of_other_losses():
    input, target, safe = IMAGES["input"], INDICES, safeops.softmax_focal_loss
    scope = {"safeops": safeops, "torch": torch, "input": input, "target": target}
    for alpha in (0.25, [0.25, 0.5, 1.0], torch.tensor([0.25, 0.5, 1.0])):
        scope["alpha"] = alpha
        says = advice(safe, input, target, alpha=alpha)
        of_module = advice(safeops.nn.SoftmaxFocalLoss, alpha=alpha)
        if isinstance(alpha, float):
            want = 0.25 * safe(input, target)
        else:
            says, of_module = f"safeops.softmax_focal_loss(input, target, {says})", f"Focal({of_module})(input, target)"
            want = safe(input, target, torch.as_tensor(alpha))
        scope["Focal"] = safeops.nn.SoftmaxFocalLoss
        assert torch.equal(eval(says, scope), want) and torch.equal(eval(of_module, scope), want)
    input = scope["input"] = input.softmax(1)
    want = safeops.tversky_loss(input, target, alpha=0.3, beta=0.7)
    assert torch.equal(eval(advice(safeops.dice_loss, input, target, alpha=0.3), scope), want)
    of_module = advice(safeops.nn.DiceLoss, alpha=0.3)
    assert of_module == "safeops.nn.TverskyLoss(alpha=0.3, beta=1 - 0.3)"
    assert torch.equal(eval(of_module, scope)(input, target), want)


def test_what_a_compiled_call_lacks():
    x = torch.ones(3)
    compiled = torch.compile(lambda x: safeops.mse_loss(x, x, mask=x > 0), backend="eager", fullgraph=True)
    assert compiled(x) == 0
    with pytest.raises(Exception, match="mse_loss"):
        torch.compile(lambda x: safeops.mse_loss(x, x, x > 0), backend="eager")(x)


MODULES = [
    ("DiceLoss", {"smooth": 1.0}, r"say smooth_nr=1\.0, smooth_dr=1\.0$"),
    ("TverskyLoss", {"softmax": True}, r"in the call say loss\(torch\.softmax\(input, 1\), target\), of 1 channel "),
    ("DiceLoss", {"sigmoid": True}, r"in the call say loss\(torch\.sigmoid\(input\), target\)$"),
    ("DiceLoss", {"sigmoid": False}, "leave it out$"),
    ("SSIMLoss", {"window_size": 7}, "say win_size=7$"),
    ("CrossEntropyLoss", {"weights": TOKENS["input"]}, "say weight=weights$"),
    ("BCELoss", {"weight": TOKENS["input"]}, r"in the call say loss\(input, target, weight=weight\)$"),
    ("BCELoss", {"weight": None}, "leave it out$"),
    ("MSELoss", {"mask": KEEP}, r"in the call say loss\(input, target, mask=mask\)$"),
    ("MSELoss", {"valid_mask": KEEP}, r"in the call say loss\(input, target, mask=valid_mask\)$"),
    ("CrossEntropyLoss", {"alpha": 0.25}, "which does not exist here; the arguments are reduction, empty, "),
    ("MSELoss", {"cu_seqlens": CU_SEQLENS}, r"say safeops\.segment_mean\(losses, cu_seqlens=cu_seqlens\)"),
]


@pytest.mark.parametrize("name, options, words", MODULES)
def test_options_of_other_libraries(name, options, words):
    key = next(iter(options))
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) got an unexpected keyword argument {key!r}.*{words}"):
        getattr(safeops.nn, name)(**options)


def test_a_module_called_as_others_are():
    x, module = torch.rand(3), safeops.nn.MSELoss()
    with pytest.raises(TypeError, match="^MSELoss takes input, target by position, got 3 tensors: say mask=$"):
        module(x, x, x > 0.5)
    with pytest.raises(TypeError, match="^MSELoss got an unexpected keyword argument 'labels': say target=labels$"):
        module(x, labels=x)


def test_every_expression_is_of_arguments_that_exist():
    """Each suggested expression must name arguments that one of our functions has, and no foreign name that it
    replaces."""
    ours = [{name, *inspect.signature(function).parameters} for name, function in signed.items()]
    for key, expressions in NAMES.items():
        for needed, expression in expressions.items():
            assert any(needed in names and key not in names for names in ours), (key, needed)
            values = True, False, 1.0, KEEP
            for text in {expression(x) for x in values} if callable(expression) else {expression}:
                for name in re.findall(r"\b(\w+)=(?![=\"'])", re.sub(r"\(.*\)", "", text)):
                    assert any({needed, name} <= names for names in ours), (key, name)
