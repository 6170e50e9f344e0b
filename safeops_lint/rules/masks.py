"""SO1xx: boolean masks and indices."""

import libcst as cst

from safeops_lint.rule import Rule
from safeops_lint.rules.domains import unsafe
from safeops_lint.syntax import descendants, dotted, number
from safeops_lint.tables import FLOATING, KEEPS_INTEGER, SAVES_RESULT


def index_masks(node, walk):
    """Returns the indices of a Subscript that are boolean masks."""
    results = []
    for element in node.slice:
        if isinstance(element.slice, cst.Index):
            value = walk.value(element.slice.value)
            name = dotted(element.slice.value) or ""
            likely = value.mask == "likely" and not (value.constant or name.endswith(("idx", "index", "indices")))
            if value.mask == "bool" or likely and walk.value(node.value).tensor:
                results.append(element.slice.value)
    return results


def of_itself(mask, base, walk):
    """True if a mask is an elementwise condition on `base` and numbers alone, so that it has the shape of `base`."""
    if not isinstance(base, cst.Name) or walk.value(mask).mask != "bool":
        return False
    names = walk.names_in(mask) - set(walk.imports.names)
    called = {"isnan", "isinf", "isfinite", "eq", "ne", "lt", "gt", "le", "ge", "abs", "float"}
    elementwise = not any(isinstance(n, cst.Subscript) for n in descendants(mask))
    asked = base.value in names and names <= {base.value} | called
    return asked and elementwise and isinstance(mask, (cst.Comparison, cst.Call))


def floating(node, walk, depth=0):
    """True if a number or a tensor is certainly floating: by its dtype, by the operation that made it, or since that
    operation has a floating operand."""
    value, op = walk.value(node), walk.op(node)
    if value.wide or value.half or isinstance(walk.number(node), float):
        return True
    if op is None or depth > 8:
        return False
    operands = (op.input, *op.args) if op.name in KEEPS_INTEGER else ()
    return op.name in FLOATING or any(floating(n, walk, depth + 1) for n in operands if n is not None)


def on_host(subscript, walk):
    """True if the index makes no training step wait for the GPU: the tensor or a mask is certainly on the CPU, or this
    code is not part of a step."""
    masks = index_masks(subscript, walk)
    return not walk.stepping or any(walk.value(n).host for n in (subscript.value, *masks))


class BooleanRead(Rule):
    code, name = "SO101", "boolean-mask-read"
    what = "`x[mask]` has as many elements as the mask has True, so the CPU waits until the GPU has counted them."
    why = """The launch queue runs dry at every call, a CUDA graph cannot capture it, and torch.compile breaks its
    graph. With nothing kept, the mean of the result is NaN."""
    fix = """Give the mask to the reduction or the loss: `safeops.masked_mean(x, mask)`, `safeops.mse_loss(x, y,
    mask=mask)`; or `safeops.masked_compact(x, mask, capacity=n)` where the elements themselves are wanted. `x[mask]`
    aligns the mask with x's first dims, `mask=` with the last: `mask.unsqueeze(-1)` where x has one more."""
    rewrites = "`x[condition on x].mean()` to `safeops.masked_mean`, in x's dtype (of nothing: 0 instead of NaN)"
    ops = ("masked_select", "mean")
    events = ("Subscript",)

    def visit(self, event, node, walk):
        if index_masks(node, walk) and not walk.value(node.value).constant and not on_host(node, walk):
            use = "a masked_* reduction or a loss, as mask.unsqueeze(-1) where it has x's first dims alone"
            walk.report(self, node, f"boolean index waits for the GPU; give the mask to {use}")

    def operation(self, op, walk):
        if op.name == "masked_select" and walk.stepping:
            message = "masked_select waits for the GPU; give the mask to a masked_* reduction or a loss"
            walk.report(self, op.node, message)
        elif walk.reported(self.code, op.input) and isinstance(op.input, cst.Subscript) and not (op.args or op.kwargs):
            base, masks = op.input.value, index_masks(op.input, walk)
            if len(op.input.slice) == 1 and of_itself(masks[0], base, walk):
                x, mask = walk.text(base), walk.text(masks[0])
                text = f"safeops.masked_mean({x}, {mask}, dtype={x}.dtype)"
                message = "boolean index waits for the GPU, and the mean of nothing is NaN; use safeops.masked_mean"
                walk.report(self, op.node, message, [(op.node, text)], covers=[("SO101", op.input)])


class BooleanWriteTensor(Rule):
    code, name = "SO102", "boolean-mask-write-tensor"
    what = """`x[mask] = values` with a tensor on the right makes indices of the mask first, and the CPU waits until the
    GPU has counted how many. (A number, or a 0-dim tensor of the CPU, is filled in without that; one of the GPU is
    not.)"""
    why = "The wait is that of `x[mask]`. And x changes in place: what autograd saved of it is invalid."
    fix = """`torch.where(mask, values, x)` for values of x's shape, `safeops.masked_scatter(x, mask, values)` for
    packed ones."""
    events = ("store",)

    def visit(self, event, node, walk):
        target, statement = node
        value = walk.value(statement.value) if statement.value is not None else None
        if not value or not value.tensor or on_host(target, walk):
            return
        if index_masks(target, walk) and not _scalar(statement.value, walk):
            message = "writing a tensor through a boolean mask waits for the GPU; use torch.where"
            walk.report(self, target, message, last=statement)


def _scalar(node, walk):
    """True for `torch.tensor(0.5)`, a 0-dim tensor on the CPU: torch writes it without counting the mask. (For one on
    the GPU, torch counts first.)"""
    op = walk.op(node)
    return op is not None and "device" not in op.kwargs and op.name in ("tensor", "scalar_tensor")


class BooleanWriteScalar(Rule):
    code, name = "SO103", "boolean-mask-write-scalar"
    what = """`x[mask] = 0` changes x in place. Where autograd saved x, backward raises; where it did not, a NaN that
    made x keeps its gradient."""
    why = """ReLU, exp, sqrt, sigmoid and softmax save their result for backward, squares, logarithms and products their
    operands; a log or a division has a NaN gradient where it is hidden. The write also reaches the caller's tensor,
    when x is an argument."""
    fix = "`x = safeops.masked_fill(x, mask, 0)`: a new tensor, and gradients that are exactly 0 where it was filled."
    rewrites = """`x[condition on x] = number` to `safeops.masked_fill`, where x was made in the same function and all
    that is done with it before is known to give it no other name; a negative number where x is certainly floating"""
    events = ("store",)

    def visit(self, event, node, walk):
        target, statement = node
        base = walk.value(target.value)
        masks = index_masks(target, walk)
        value = walk.value(statement.value) if statement.value is not None else None
        if not masks or value is None or (value.tensor and not _scalar(statement.value, walk)) or walk.scope.no_grad:
            return
        if not base.tensor or base.constant or base.integer or base.mask == "bool" or base.detached:
            return
        forward = walk.scope.is_module and walk.scope.name == "forward"
        made = base.op.name if base.op is not None else ""
        if walk.scope.metric or not (walk.training or forward or made in SAVES_RESULT):
            return
        name = target.value.value if isinstance(target.value, cst.Name) else None
        fix = None
        if isinstance(statement, cst.Assign) and len(statement.targets) == 1 and len(target.slice) == 1:
            fix = self._rewrite(target, masks[0], statement, walk)
        message = "in-place write through a boolean mask, on what autograd may have saved; use safeops.masked_fill"
        # The function may write to a tensor that it made itself and that nothing has saved yet.
        caller = name in walk.scope.parameters or isinstance(target.value, cst.Attribute)
        risky = caller or base.op is not None and unsafe(base.op, walk)
        sure = made in SAVES_RESULT or name in walk.scope.saved or walk.entered and risky
        walk.report(self, target, message, fix, last=statement, likely=sure)

    def _rewrite(self, target, mask, statement, walk):
        value = number(statement.value)
        parts = (statement.value, target.value, *(n for n in descendants(mask) if isinstance(n, cst.Float)))
        if value is None or value < 0 and not any(floating(n, walk) for n in parts):
            return None  # in a uint8 x, the write takes a negative number modulo 256, but masked_fill saturates it
        if not of_itself(mask, target.value, walk) or not walk.memory.alone(target.value, statement):
            return None
        name = target.value.value
        text = f"{name} = safeops.masked_fill({name}, {walk.argument(mask)}, {walk.argument(statement.value)})"
        return [(statement, text)]


class Nonzero(Rule):
    code, name = "SO104", "nonzero-index"
    what = """`torch.nonzero`, `argwhere` and `torch.where(mask)` return as many rows as there are hits: the CPU waits
    for the GPU."""
    why = "The same wait as `x[mask]`, and beyond 2^31 elements torch raises."
    fix = """Keep the mask (`safeops.masked_mean`, `torch.where(mask, a, b)`), or `safeops.masked_compact`, whose size
    is fixed and whose count stays on the device."""
    ops = ("nonzero", "argwhere", "where")

    def operation(self, op, walk):
        if op.input is None or op.name == "where" and (op.args or op.kwargs or op.origin == "method"):
            return
        value = walk.value(op.input)
        if not value.tensor and op.origin != "torch" or value.constant or value.host or not walk.stepping:
            return
        name = "torch.where(mask)" if op.name == "where" else op.name
        walk.report(self, op.node, f"{name} waits for the GPU to count; keep the mask, or use safeops.masked_compact")


RULES = (BooleanRead, BooleanWriteTensor, BooleanWriteScalar, Nonzero)
