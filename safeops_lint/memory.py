"""Finds out whether a name is the only reference to its tensor's memory, so that `x[x < c] = v` can be rewritten.

The write changes x for every other name of the same memory; `x = masked_fill(x, ...)` does not. The rewrite is safe if
(1) the write follows an assignment of a tensor that torch has just made, and (2) every mention of the name in between
is of a kind that is known to keep no reference to the tensor. Any other mention counts as one that keeps a reference.
"""

import itertools

import libcst as cst

from safeops_lint.syntax import descendants, dotted, operation
from safeops_lint.tables import COMPARISONS, NO_TENSOR_ATTRIBUTES, RAISED, REDUCTIONS, words

# Operations that always return new memory. (einsum, dropout and atleast_2d are not among them: they may return a view
# or their input.)
NEW = (
    REDUCTIONS
    | RAISED
    | (COMPARISONS - {"bool"})
    | words("""abs add addcdiv addcmul argmax argmin argsort atan atan2 bitwise_and
    bitwise_not bitwise_or bitwise_xor bmm cat ceil clamp clamp_max clamp_min clone copy div empty_like erf exp2 fill
    floor fmod full_like gather index_add index_fill index_select lerp linear logaddexp logsigmoid masked_fill
    masked_scatter masked_select matmul maximum minimum mm mul mv nan_to_num neg new_empty new_full new_ones new_tensor
    new_zeros one_hot ones_like rand_like randn_like relu remainder round scatter scatter_add sigmoid sign sin sort
    sqrt square stack sub tanh topk trunc where zero zeros_like""")
)
# Operations whose result may share the memory of their input.
VIEWS = words("""bfloat16 bool broadcast_to chunk contiguous cpu cuda detach diagonal double expand expand_as flatten
    float half imag int long movedim narrow permute real reshape select split squeeze swapaxes t to transpose type
    type_as unbind unflatten unsqueeze view view_as""")
VIEW_ATTRIBUTES = {"T", "mT", "H", "mH", "data", "real", "imag"}
LIKE = {"type_as", "to", "view_as", "expand_as", "reshape_as"}  # their argument only gives a dtype or a shape
READS = words("size dim ndimension numel nelement item tolist stride is_contiguous is_floating_point is_complex")
FUNCTIONS_READ = words("len float int bool print str repr isinstance torch.is_tensor torch.numel")
HOLD_ALL = ("locals", "vars", "globals", "eval", "exec")
FUNCTIONS = (cst.FunctionDef, cst.Lambda)
BLOCKS = (cst.Module, cst.IndentedBlock, cst.SimpleStatementLine, cst.SimpleStatementSuite)
ENDS = (cst.BinaryOperation, cst.Comparison, cst.ComparisonTarget, cst.FormattedStringExpression, cst.Expr, cst.If)
ENDS += (cst.While, cst.Assert)


class Memory:
    """Says which tensors of a file may have other references than one name."""

    def __init__(self, walk):
        self.walk = walk
        self.parents, self.mentions = walk.promotion.parents, walk.promotion.mentions

    def alone(self, target, statement):
        """True if the Name `target` is the only reference to its tensor where `statement` writes to it."""
        start = self._assignment(target.value, statement)
        if start is None or not self._new(start.value):
            return False
        home, mentions = self._function(target), self.mentions[target.value]
        holders = (n for name in HOLD_ALL for n in self.mentions[name] if self._is_called(n))
        if any(isinstance(self._parent(n), cst.NameItem) for n in mentions):  # declared global or nonlocal
            return False
        if any(self._within(n, home) for n in holders):
            return False
        return all(self._harmless(n) for n in self._between(start, target, home))

    def _parent(self, node):
        return self.parents.get(id(node))

    def _is_called(self, node):
        return isinstance(self._parent(node), cst.Call) and self._parent(node).func is node

    def _function(self, node):
        """The innermost function whose body contains a node; None if there is none."""
        while (parent := self._parent(node)) is not None:
            if isinstance(parent, FUNCTIONS) and node is parent.body:
                return parent
            node = parent
        return None

    def _within(self, node, function):
        while node is not function and node is not None:
            node = self._parent(node)
        return node is function

    def _assignment(self, name, statement):
        """The last assignment to `name` that always runs before a statement: earlier in its block, or in a block around
        it; else None."""
        node, parent = statement, self._parent(statement)
        while not isinstance(node, (*FUNCTIONS, cst.ClassDef, cst.Module)):
            if isinstance(parent, (cst.For, cst.While)) and node is parent.body:
                return None  # in a loop, what follows the write also comes before the next write
            for earlier in _before(node, parent):
                if getattr(_target(earlier), "value", None) == name:
                    return earlier
            node, parent = parent, self._parent(parent)
        return None

    def _between(self, start, target, home):
        """Yield the mentions of a name from its assignment `start` to the write, and those in nested functions, which
        may run in between."""
        mentions = self.mentions[target.value]  # from the last in the file to the first
        last, first = (next(i for i, n in enumerate(mentions) if n is x) for x in (target, _target(start)))
        before = {id(n) for n in descendants(start)}
        between = {id(n) for n in mentions[last:first]} - before
        own = {id(f) for n in mentions if (f := self._binds(n)) is not None and f is not home}
        for n in mentions:
            function = self._function(n)
            inner = function is not home and self._within(n, home)
            if (id(n) in between or inner) and n is not target and id(function) not in own:
                yield n

    def _binds(self, node):
        """The function in which a mention makes the name local: a parameter or an assigned variable; else None."""
        parent = self._parent(node)
        if isinstance(parent, cst.Param) and node is parent.name:
            return next(p for p in self._up(parent) if isinstance(p, FUNCTIONS))
        return self._function(node) if isinstance(parent, cst.AssignTarget) else None

    def _up(self, node):
        while (node := self._parent(node)) is not None:
            yield node

    def _new(self, node):
        """True if an expression makes a new tensor, so that nothing else can refer to its memory."""
        if isinstance(node, cst.UnaryOperation):
            return not isinstance(node.operator, cst.Plus)  # +x is x
        if isinstance(node, cst.Subscript):
            return self._by_mask(node)
        if isinstance(node, cst.Call):
            return self._result(node) == "new"
        return isinstance(node, (cst.BinaryOperation, cst.Comparison))

    def _by_mask(self, node):
        index = node.slice[0].slice
        return len(node.slice) == 1 and isinstance(index, cst.Index) and self.walk.value(index.value).mask == "bool"

    def _result(self, call):
        """The memory of a call's result: "new"; "same" if it may share the input's memory; None if not known."""
        full = self.walk.imports.resolve(call.func) or ""
        if full.startswith("safeops."):
            return "new" if full.startswith(("safeops.safe_", "safeops.masked_")) or full.endswith("_loss") else None
        op = operation(call, self.walk.imports)
        if op is None or "out" in op.kwargs or op.origin == "method" and not self.walk.value(op.input).tensor:
            return None
        if op.name not in NEW | VIEWS:
            return None
        in_place = op.inplace or op.name == "relu" and (op.args or op.kwargs)  # F.relu(x, True)
        return "same" if in_place or op.name in VIEWS else "new"

    def _harmless(self, node):
        """True if this mention of a tensor leaves no reference to it, or to a view of it."""
        parent = self._parent(node)
        if isinstance(parent, ENDS):
            return True
        if isinstance(parent, cst.UnaryOperation):
            return not isinstance(parent.operator, cst.Plus) or self._harmless(parent)
        if isinstance(parent, (cst.IfExp, cst.BooleanOperation)):
            return node is getattr(parent, "test", None) or self._harmless(parent)
        if isinstance(parent, cst.Attribute):
            return node is parent.attr or self._attribute(parent)
        if isinstance(parent, cst.Subscript):
            return self._by_mask(parent) or self._harmless(parent)
        if isinstance(parent, cst.Index):
            return self._index(parent)
        if isinstance(parent, cst.Arg):
            return node is parent.keyword or self._argument(parent, self._parent(parent))
        if isinstance(parent, cst.Param):
            return node is parent.name
        if isinstance(parent, cst.AssignTarget):
            return isinstance(node, cst.Subscript) or self._rebound(node, self._parent(parent))
        if isinstance(parent, cst.AnnAssign):
            return self._rebound(node, parent)
        if isinstance(parent, cst.Element):  # cat((z, w))
            argument = self._parent(self._parent(parent))
            return isinstance(argument, cst.Arg) and self._argument(argument, self._parent(argument))
        if isinstance(parent, cst.AugAssign):
            value = self.walk.value(parent.target)  # (`a_list += x` keeps views of x's rows)
            return node is parent.target or value.tensor or self.walk.number(parent.target) is not None
        return False

    def _rebound(self, node, statement):
        return node is _target(statement) and self._new(statement.value)

    def _attribute(self, node):
        call = self._parent(node)
        if not (isinstance(call, cst.Call) and call.func is node):
            named = node.attr.value
            return named in NO_TENSOR_ATTRIBUTES or named in VIEW_ATTRIBUTES and self._harmless(node)
        if node.attr.value in READS:
            return True
        result = self._result(call)
        return result == "new" or result == "same" and self._harmless(call)

    def _index(self, node):
        """True if `w[z]` keeps no reference to z: it would as a key that is stored in a dictionary."""
        subscript = next(p for p in self._up(node) if isinstance(p, cst.Subscript))
        return not isinstance(self._parent(subscript), cst.AssignTarget) or self.walk.value(subscript.value).tensor

    def _argument(self, argument, call):
        if argument.star or argument.keyword is not None and argument.keyword.value == "out":
            return False
        if (self.walk.imports.resolve(call.func) or dotted(call.func)) in FUNCTIONS_READ:
            return True
        result, op = self._result(call), operation(call, self.walk.imports)
        if result is not None and op is not None and op.origin == "method":  # a method of another tensor: w.add_(z)
            dropped = result == "new" and isinstance(self._parent(call), cst.Expr)  # seen.add(z): a set that keeps z
            return not dropped and (result == "new" or op.inplace or op.name in LIKE)
        return result == "new" or result == "same" and self._harmless(call)


def _before(node, block):
    """The statements before `node` in its block, from the last to the first; those of a line one by one."""
    body = block.body if isinstance(block, BLOCKS) else ()
    earlier = list(itertools.takewhile(lambda n: n is not node, body))
    lines = [n.body if isinstance(n, cst.SimpleStatementLine) else [n] for n in earlier]
    return reversed([statement for line in lines for statement in line])


def _target(statement):
    """The Name that a statement assigns a value to; None if it has another target, or several."""
    targets = statement.targets if isinstance(statement, cst.Assign) else ()
    targets = [statement] if isinstance(statement, cst.AnnAssign) and statement.value is not None else targets
    target = targets[0].target if len(targets) == 1 else None
    return target if isinstance(target, cst.Name) else None
