"""Errors for calls in the style of other libraries: they end with the expression that works here.

A public function catches arguments that its signature does not name, as `*extra` and `**unknown`, since Python's own
error knows no other library. This file's functions run only when a call is refused anyway.
"""

import inspect
import re

import torch

LEAVE = "leave it out"
# The default of a required argument: without a default, Python's own error would come before those of this file.
REQUIRED = inspect.Parameter.empty


def _unless(default, expression):
    """The expression for a flag. If its value is `default`, which is what safeops does, the flag may be left out."""
    return lambda flag: LEAVE if flag is default else expression


def _background(channels, weight):
    """For include_background=False, which drops the first of several channels. (A weight of [0.] would drop all.)"""
    return _unless(True, f"1 channel has no background, {LEAVE}; of {channels} say {weight}")


def _for_classes(scaled):
    """For alpha of a focal loss: a number scales the loss, several numbers are class weights."""
    return lambda alpha: scaled if isinstance(alpha, (int, float)) else "weight=torch.as_tensor(alpha)"


def _attention(name):
    """For a mask of attention: bools and integers mark kept elements; floats may be meant to be added to the scores."""

    def expression(mask):
        if is_bool(mask):
            return f"mask={name}, where True is kept"
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            return f"mask={name} > 0.5 (an additive mask: mask={name} == 0)"
        return f"mask={name} != 0"

    return expression


# {another library's argument: {a name: an expression}}. The error shows the expression of the first name that is an
# argument of the called function, or the function's own name. An expression is text, or a function from the argument's
# value to text. In the text, the argument's name is replaced by its value if that is a number, a string or a list.
_CLASSES = _background("more", "weight=torch.tensor([0.0] + [1.0] * (input.shape[1] - 1), device=input.device)")
_PROBABILITIES = _unless(False, "torch.softmax(input, 1) as input, of 1 channel torch.sigmoid(input)")
_PIXELS = {"smooth_nr": f"{LEAVE}: target may be class indices (N, d1, ...)"}
NAMES = {
    "softmax": {"smooth_nr": _PROBABILITIES},
    "sigmoid": {"smooth_nr": _unless(False, "torch.sigmoid(input) as input")},
    "from_logits": {"smooth_nr": _PROBABILITIES},
    "include_background": {"smooth_nr": _CLASSES, "ignore_index": _CLASSES},
    "smooth": {"smooth_nr": "smooth_nr=smooth, smooth_dr=smooth", "label_smoothing": "label_smoothing=smooth"},
    **dict.fromkeys(("to_onehot_y", "num_classes"), _PIXELS),
    "alpha": {
        "gamma": _for_classes("alpha * safeops.softmax_focal_loss(input, target)"),
        "smooth_nr": "safeops.tversky_loss(input, target, alpha=alpha, beta=1 - alpha)",
    },
    "cu_seqlens": {
        "reduction": 'safeops.segment_mean(losses, cu_seqlens=cu_seqlens) of losses with reduction="none"',
        "keepdim": "safeops.segment_sum(input, cu_seqlens=cu_seqlens), or segment_mean, segment_max",
    },
    "size_average": {"win_size": 'reduction="mean" or "none"', "reduction": 'reduction="mean" or "sum"'},
    "reduce": {"reduction": 'reduction="none", "mean" or "sum"'},
    "key_padding_mask": {"mask": lambda x: f"mask={'~key_padding_mask' if is_bool(x) else 'key_padding_mask == 0'}"},
    "padding_mask": {"mask": "mask=~padding_mask, where True is padding"},
    "attn_mask": {"mask": _attention("attn_mask")},
    "attention_mask": {"mask": _attention("attention_mask")},
    "unbiased": {"correction": lambda unbiased: f"correction={int(unbiased is not False)}"},
    "logit_scale": {"temperature": "temperature=1 / logit_scale"},
    "delta": {"smooth_l1_loss": "beta=delta"},
    "beta": {"huber_loss": "delta=beta"},
    "mask": {"masked_fill": "fill_mask=mask"},
    "error_if_nonfinite": {"nonfinite": _unless(False, 'nonfinite="raise"')},
    "foreach": {"nonfinite": LEAVE},
}
# NAMES for constructors of modules: a constructor has no operands that an expression could name.
_CALL = _unless(False, "in the call say loss(torch.softmax(input, 1), target), of 1 channel torch.sigmoid(input)")
OPTIONS = {
    "softmax": {"smooth_nr": _CALL},
    "sigmoid": {"smooth_nr": _unless(False, "in the call say loss(torch.sigmoid(input), target)")},
    "from_logits": {"smooth_nr": _CALL},
    "include_background": dict.fromkeys(
        ("smooth_nr", "ignore_index"), _background("C channels", "weight=torch.tensor([0.0] + [1.0] * (C - 1))")
    ),
    "alpha": {
        "gamma": _for_classes("alpha * safeops.nn.SoftmaxFocalLoss()(input, target)"),
        "smooth_nr": "safeops.nn.TverskyLoss(alpha=alpha, beta=1 - alpha)",
    },
}
# {our name of an argument: other libraries' names}, for arguments that differ in the name alone.
RENAMED = {
    "win_size": ("window_size", "kernel_size", "filter_size"),
    "win_sigma": ("sigma", "filter_sigma"),
    "data_range": ("max_val", "max_value"),
    "label_smoothing": ("smoothing", "label_smooth"),
    "z_loss": ("lse_square_scale", "z_loss_weight"),
    "softcap": ("logit_softcapping", "logits_soft_cap", "soft_cap"),
    "denominator": ("num_items_in_batch", "avg_factor", "normalizer"),
    "mask": ("masks", "where", "valid_mask", "loss_mask"),
    "row_weight": ("sample_weight", "row_weights"),
    "weight": ("weights", "class_weight", "class_weights", "sample_weight", "ce_weight"),
    "dim": ("axis",),
    "keepdim": ("keepdims",),
    "eps": ("epsilon",),
    "correction": ("ddof",),
    "temperature": ("tau",),
    "input": ("logits", "pred", "preds", "prediction", "y_pred"),
    "target": ("targets", "label", "labels", "y_true", "gt"),
    "ignore_index": ("ignore_label", "ignored_index"),
}
for _ours, _names in RENAMED.items():
    for _name in _names:
        NAMES[_name] = {**NAMES.get(_name, {}), _ours: f"{_ours}={_name}"}


signed = {}  # {name: function} of all functions that `sign` received


def sign(function):
    """Set a public function's signature, without *extra and **unknown, for docs, modules, types and schemas."""
    caught = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind not in caught]
    function.__signature__ = signature.replace(parameters=own)
    signed[function.__name__] = function
    return function


def refuse(function, extra, unknown):
    """Raise the TypeError for arguments that a function does not have."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    if extra:
        count = sum(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters.values())
        raise TypeError(
            f"{name}() takes {count} positional arguments but {count + len(extra)} were given"
            f"{by_name(extra[0], parameters.values())}"
        )
    key, value = next(iter(unknown.items()))
    raise TypeError(f"{name}() {unexpected(key, value, parameters, name)}")


def require(function, **arguments):
    """Raise Python's TypeError if one of the arguments is missing."""
    for name, value in arguments.items():
        if value is REQUIRED:
            raise TypeError(f"{function}() missing 1 required argument: {name!r}")


def by_name(value, parameters):
    """The end of the error for a value that may not be positional: its keyword, or all keywords if that is unclear."""
    names = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY}
    if not names:
        return ""
    if isinstance(value, bool) and "nonfinite" in names:  # meant for torch's next positional argument
        return f": {_advice(expression('error_if_nonfinite', value, names))}"
    if name := _name_of(value, names):
        return f": say {name}=" if is_bool(value) else f": say {name}={value!r}"
    return f": give the others by name ({', '.join(f'{name}=' for name in names)})"


def _name_of(value, names):
    """The keyword that a value is meant for, if exactly one fits; else "". names: {keyword: default}."""
    if isinstance(value, bool):
        fits = [] if "reduction" in names else [x for x, default in names.items() if isinstance(default, bool)]
    elif isinstance(value, (int, float)):
        numbers = [x for x, default in names.items() if type(default) in (int, float)]
        floats = [x for x in numbers if type(names[x]) is float]
        required = [x for x, default in names.items() if default is REQUIRED]
        first = [x for x in [*names][:1] if x == "eps"]
        fits = required or first or isinstance(value, float) and floats or numbers
    else:
        kinds = {"mask": is_bool(value), "reduction": isinstance(value, str), "dtype": isinstance(value, torch.dtype)}
        fits = [x for x, is_one in kinds.items() if is_one and x in names]
    return fits[0] if len(fits) == 1 else ""


def unexpected(key, value, parameters, function):
    """The end of the error for an unknown keyword, with what to write here. function: the name of the function."""
    return _ending(key, expression(key, value, (*parameters, function)), parameters)


def unexpected_option(key, value, module):
    """The end of the error for an unknown keyword of a module's constructor. Tensors are given in the call."""
    options, function = tuple(module.defaults), module.function.__name__
    says = expression(key, value, options, OPTIONS) or expression(key, value, (*options, function))
    if not says:
        tensor = f"{key}={key}" if key in module.tensors else expression(key, value, module.tensors)
        if tensor:
            says = LEAVE if value is None else f"in the call say loss({', '.join(module.operands)}, {tensor})"
    return _ending(key, says, options)


def _ending(key, says, parameters):
    text = f"got an unexpected keyword argument {key!r}"
    if not says:
        return f"{text}, which does not exist here; the arguments are {', '.join(parameters)}"
    return f"{text}: {_advice(says)}"


def _advice(says):
    return says if LEAVE in says or "say " in says else f"say {says}"


def expression(key, value, names, table=NAMES):
    """The expression that replaces the argument `key` of another library, if one of `names` has one; else ""."""
    for ours, text in table.get(key, {}).items():
        if ours in names:
            if value is None and text != f"{ours}={key}":
                return LEAVE
            return _written(text(value) if callable(text) else text, key, value)
    return ""


def _written(text, key, value):
    """`text` with the value in place of the name `key`, if the value is None, a number, a string or a list of these."""
    for x in value if isinstance(value, (list, tuple)) else (value,):
        if x is not None and not isinstance(x, (int, float, str)):
            return text
    return re.sub(rf"(?<![\w.]){key}\b(?!=)", lambda _: repr(value), text)


def meant(function, key, x):
    """The end of the error for argument `key`, if x is meant for another argument and was passed by position."""
    parameters = inspect.signature(signed[function]).parameters if function in signed else {}
    if is_bool(x) and "mask" in parameters:
        return ": say mask="
    if key == "negative_keys" and isinstance(x, (int, float)):
        return f": say temperature={x!r}"
    by_position = key in parameters and parameters[key].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    dims = x if isinstance(x, (list, tuple)) and x else (x,)
    if key == "mask" and by_position and "dim" in parameters and all(type(d) is int for d in dims):
        return f": say dim={x!r}"
    return ""


def is_bool(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool
