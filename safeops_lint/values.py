"""Infers facts about an expression without types: is it a tensor, a mask, certainly fp32, kept away from 0?

In doubt no rule reports: an expression that is not known to be a tensor counts as none.
"""

import dataclasses

import libcst as cst

from safeops_lint import tables
from safeops_lint.syntax import dotted, moves

CASTS = {"float", "half", "bfloat16", "to", "type", "type_as", "astype"}
TENSORISH = tables.words("""x y x1 x2 input inputs output outputs out pred preds prediction predictions target targets
    label labels logit logits prob probs probabilities score scores y_true y_pred y_hat gt truth image images img recon
    reconstruction feature features embedding embeddings hidden student teacher anchor positive negative weight weights
    mask masks real fake imag estimate estimates source err diff dist distance distances cost rate valid mu logvar
    log_var q k v query key value disparity depth error residual reward rewards advantage advantages similarity cosine
    sim returns logprob logprobs logp logps action actions values sigma std flow a b p q r s t u v w z""")
MASKS = ("mask", "valid", "keep", "visible", "padding_mask", "attention_mask", "invalid", "ignore", "unknown")


@dataclasses.dataclass(slots=True)
class Value:
    """Facts that the walk knows about an expression, or about the value last assigned to a name."""

    tensor: bool = False
    foreign: bool = False  # certainly no tensor of torch: numpy, a str, a shape
    mask: str | None = None  # "bool": certain; "likely": by its name; "number": a mask that was cast to a number
    wide: bool = False  # fp32 or fp64 for any dtype of the model
    half: bool = False  # cast to half in the code: .half(), dtype=torch.float16
    positive: bool = False  # kept away from 0: clamped, + eps, exp, ...
    constant: bool = False  # made in this code from numbers alone
    integer: bool = False  # certainly no floating tensor: no NaN, no gradient
    host: bool = False  # certainly on the CPU
    detached: bool = False  # no gradient goes through it: detached, made of comparisons or integers alone
    op: object = None  # the Op that made the value
    node: object = None  # the expression that made the value; for a name, the one assigned to it


NOTHING = Value()
FOREIGN = Value(foreign=True)

PLAIN_PARTS = set("num n size shape drop dropout type name names dim id index idx width height class path key".split())
PLAIN_PARTS |= {"fn", "func", "mode", "cls"}


def named_tensor(name):
    """True if a loss function's argument of this name is a tensor: `x`, `student_logits`, but not `num_labels`."""
    name = name.lower()
    parts = set(name.split("_"))
    if name in TENSORISH or name in ("loss", "losses") or named_mask(name):  # not z_loss: a factor
        return True
    return not parts & PLAIN_PARTS and any(len(p) > 1 and p in TENSORISH for p in parts)


def named_mask(name):
    name = name.lower()
    ends = name in MASKS or name.endswith(tuple("_" + m for m in MASKS))
    return (ends or name.startswith(("mask_", "valid_mask"))) and "drop" not in name


def named_eps(name):
    name = name.lower().rsplit(".", 1)[-1]
    whole = name in ("tol", "floor", "c1", "c2")
    return whole or any(part in name for part in ("eps", "tiny", "smooth", "delta", "stabil"))


def dtype_of(node, imports):
    """Returns "wide", "half", "bool" or "other" for an expression that names a dtype, else None."""
    full = imports.resolve(node) if node is not None else None
    if full in tables.WIDE_DTYPES:
        return "wide"
    if full in tables.HALF_DTYPES:
        return "half"
    if full == "torch.bool" or (full is None and node is not None and dotted(node) == "bool"):
        return "bool"
    return "other" if full is not None and full.startswith("torch.") else None


def of_op(op, operands, imports, autocast=True):
    """Returns the Value of a tensor operation's result. operands: the Values of its input and arguments, also of
    numbers. autocast: True if autocast may be on, which computes matrix products in half."""
    tensors = [v for v in operands if v.tensor]
    dtype = op.kwargs.get("dtype")
    if dtype is None and op.name in ("to", "type", "astype") and op.args:
        dtype = op.args[0]
    dtype = dtype_of(dtype, imports)
    value = Value(tensor=True, op=op, node=op.node)
    counts = bool(tensors) and all(v.integer or v.mask == "bool" for v in tensors)
    promoting = [v for v in operands if not v.foreign]
    value.wide = dtype == "wide" or op.name in tables.WIDENING or (dtype is None and any(v.wide for v in promoting))
    value.wide |= op.name in tables.SINGLE and "dtype" not in op.kwargs
    value.wide &= not (autocast and op.name in tables.HALVED)
    value.wide |= op.name == "div" and counts
    value.half = dtype == "half" or op.name in ("half", "bfloat16")
    made = op.name in tables.CONSTRUCTORS and op.origin == "torch" and not op.name.endswith("_like")
    to = [op.kwargs["device"]] if "device" in op.kwargs else op.args[:1] if op.name == "to" else []
    moved = op.name in ("cuda", "to") or op.name.startswith("new_") or bool(to)
    value.host = op.name == "cpu" or not moved and (all(v.host for v in tensors) if tensors else made)
    if value.half or op.name in ("to", "type", "type_as") and _like_another(operands[1:]):
        value.wide = dtype == "wide" or any(v.wide for v in operands[1:])
    value.mask = _mask(op, operands, dtype)
    value.integer = op.name in tables.KEEPS_INTEGER and counts and not (value.mask or value.wide)
    value.integer |= op.name in tables.INTEGER
    of = tensors[:1] if op.name in ("to", "type", "type_as", "expand_as", "view_as", "reshape_as") else tensors
    value.constant = op.name in tables.CONSTRUCTORS or (bool(of) and all(v.constant for v in of))
    value.positive = _positive(op, operands)
    without = all(v.detached or v.constant or v.integer or v.mask == "bool" for v in tensors)
    value.detached = op.name in tables.DETACHES or bool(tensors) and without
    return value


def _like_another(given):
    """True if the arguments of a cast name the dtype of another tensor: `y.to(x)`, `y.to(x.dtype)`, `y.type_as(x)`."""
    return any(v.tensor or v.wide or isinstance(v.node, cst.Attribute) and v.node.attr.value == "dtype" for v in given)


def _mask(op, operands, dtype):
    first = operands[0] if operands else NOTHING
    if op.name in tables.COMPARISONS or dtype == "bool" or op.inplace and first.mask == "bool":
        return "bool"
    if op.name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"):
        kinds = {v.mask for v in operands if v.tensor}
        return "bool" if "bool" in kinds else "likely" if "likely" in kinds else None
    if op.name in ("to", "type", "type_as", "float", "double", "half", "int", "long", "bfloat16") and first.mask:
        return first.mask if moves(op) else "number"
    if op.name == "sub" and len(operands) == 2 and not first.tensor and operands[1].mask:
        return "number"  # 1 - mask
    if op.name in tables.SHAPING or op.name in ("any", "all"):
        return "bool" if op.name in ("any", "all") and first.tensor else first.mask
    return None


def _positive(op, operands):
    first = operands[0] if operands else NOTHING
    rest = operands[1:]
    if op.name in tables.CONSTRUCTORS:
        return op.name not in ("zeros", "zeros_like", "new_zeros")
    if op.name in tables.POSITIVE:
        return True
    if op.name in ("clamp", "clamp_min"):
        bound = op.arg(0, "min")
        at = next((i for i, n in enumerate((*op.args, *op.kwargs.values())) if n is bound), None)
        if bound is None or at is None:
            return False
        return rest[at].positive or not (rest[at].tensor or rest[at].foreign)  # an unknown bound counts as a floor
    if op.name in ("maximum", "max") and rest:
        return first.positive or any(v.positive and (op.name == "maximum" or not v.foreign) for v in rest)
    if op.name == "add":
        return any(v.positive for v in operands)
    if op.name == "fill":
        return bool(rest) and rest[0].positive
    if op.name in ("mul", "matmul"):
        return bool(operands) and all(v.positive for v in operands)
    if op.name == "div":
        return first.positive
    if op.name in tables.REDUCTIONS and first.op is not None and first.op.name in ("index", "masked_select"):
        return False  # the selection may be empty
    return op.name in tables.KEEPS_POSITIVE and first.positive
