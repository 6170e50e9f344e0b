"""Calls as other libraries have them: what an error says that ends with the expression that works here.

A public function catches what its signature does not name, as `*extra` and `**unknown`, since Python's own refusal
knows of no other library. All of this is read only where a call is refused already.
"""

import inspect

import torch

# Other libraries' names of arguments: {its name: {an argument that the function must have: the expression}}. The first
# that the function has is taken.
_CLASSES = "weight=torch.tensor([0.0] + [1.0] * (input.shape[1] - 1), device=input.device)"
_PIXELS = {"smooth_nr": "target may be class indices (N, d1, ...) as they are"}
NAMES = {
    "softmax": {"smooth_nr": "torch.softmax(input, 1) as input"},
    "sigmoid": {"smooth_nr": "torch.sigmoid(input) as input"},
    "from_logits": {"smooth_nr": "torch.softmax(input, 1) as input"},
    "include_background": {"smooth_nr": _CLASSES, "ignore_index": _CLASSES},
    "smooth": {"smooth_nr": "smooth_nr=smooth, smooth_dr=smooth", "label_smoothing": "label_smoothing=smooth"},
    **dict.fromkeys(("to_onehot_y", "num_classes"), _PIXELS),
    "alpha": {
        "gamma": "alpha * safeops.softmax_focal_loss(input, target), or of a number for each class weight=alpha",
        "smooth_nr": "safeops.tversky_loss(input, target, alpha=alpha, beta=1 - alpha)",
    },
    "cu_seqlens": {
        "reduction": 'safeops.segment_mean(losses, cu_seqlens=cu_seqlens) of losses with reduction="none"',
        "keepdim": "safeops.segment_sum(input, cu_seqlens=cu_seqlens), or segment_mean, segment_max",
    },
    "size_average": {"win_size": 'reduction="mean" or "none"', "reduction": 'reduction="mean" or "sum"'},
    "reduce": {"reduction": 'reduction="none", "mean" or "sum"'},
    "key_padding_mask": {"mask": "mask=~key_padding_mask"},
    "padding_mask": {"mask": "mask=~padding_mask, where True is padding"},
}
# Where nothing but the name differs: {ours: theirs}.
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
    "input": ("logits", "pred", "preds", "prediction", "y_pred"),
    "target": ("targets", "label", "labels", "y_true", "gt"),
    "ignore_index": ("ignore_label", "ignored_index"),
}
for _ours, _names in RENAMED.items():
    for _name in _names:
        NAMES[_name] = {**NAMES.get(_name, {}), _ours: f"{_ours}={_name}"}


signed = {}  # every function that `sign` has seen, by its name


def sign(function):
    """A public function whose signature is without what it catches: docs, modules, types and schemas ask for that."""
    caught = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    signature = inspect.signature(function)
    own = [x for x in signature.parameters.values() if x.kind not in caught]
    function.__signature__ = signature.replace(parameters=own)
    signed[function.__name__] = function
    return function


def refuse(function, extra, unknown):
    """The TypeError of arguments that a function does not have."""
    name, parameters = function.__name__, inspect.signature(function).parameters
    if extra:
        by_position = [x for x in parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        raise TypeError(
            f"{name}() takes {len(by_position)} positional arguments but {len(by_position) + len(extra)} were given: "
            f"{by_name(extra[0], [x.name for x in parameters.values() if x.kind is x.KEYWORD_ONLY])}"
        )
    raise TypeError(f"{name}() {unexpected(next(iter(unknown)), parameters)}")


def by_name(value, names):
    """How to give a value that may not come by position: by one of these names, or by which of them one cannot know."""
    for name, fits in ("mask", is_bool(value)), ("reduction", isinstance(value, str)):
        if fits and name in names:
            return f"say {name}={value!r}" if name == "reduction" else f"say {name}="
    return f"give the others by name ({', '.join(f'{name}=' for name in names)})"


def unexpected(key, parameters):
    """How the error of a keyword goes on, and ends with what it is here."""
    text = f"got an unexpected keyword argument {key!r}"
    for ours, expression in NAMES.get(key, {}).items():
        if ours in parameters:
            return f"{text}: say {expression}"
    return f"{text}, which does not exist here; the arguments are {', '.join(parameters)}"


def meant(function, x):
    """How the error of an argument ends, if it is a mask, given by position where another argument comes first."""
    takes = is_bool(x) and function in signed and "mask" in inspect.signature(signed[function]).parameters
    return ": say mask=" if takes else ""


def is_bool(x):
    return isinstance(x, torch.Tensor) and x.dtype == torch.bool
