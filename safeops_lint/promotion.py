"""Says which rewrites may return fp32 where the old expression was half: those that cannot lead to a dtype error.

torch promotes half beside fp32 in arithmetic, reductions and most losses. But `dot`, `lerp`, `index_add_`, a layer and
a write through a mask raise if dtypes differ. So the value of the rewritten expression is followed through names,
results and calls of the file. Every use must be known to promote it, to cast it, or not to depend on its dtype.
"""

import collections

import libcst as cst

from safeops_lint.syntax import children, descendants, dotted, number
from safeops_lint.tables import COMPARISONS, NO_TENSOR_ATTRIBUTES, SHAPING, words

PROMOTES = SHAPING | words("""add sub mul div pow neg abs exp log log1p log2 log10 sqrt rsqrt square sum mean amax amin
    max min prod std var norm clamp clamp_min clamp_max maximum minimum where relu sigmoid tanh softplus logsigmoid
    logsumexp softmax log_softmax masked_fill nan_to_num cumsum cat stack float double mse_loss l1_loss smooth_l1_loss
    huber_loss kl_div binary_cross_entropy_with_logits cosine_similarity cross_entropy nll_loss sin cos log_loss outer
    median sort topk reciprocal fill zero""") - {"to"}
ENDS = COMPARISONS - {"isclose", "isin"} | words("""half bfloat16 type_as long int item tolist numpy argmax argmin
    argsort any all size dim numel backward manual_backward scale log_dict print len isinstance format""")
ONE_DTYPE = {"weight", "pos_weight", "out"}  # keyword arguments that must have the dtype of the input
BUILTINS = {"sum", "max", "min", "abs"}
DIVISORS = {"reciprocal", "rsqrt", "log", "log2", "log10"}
MAY_BE_ZERO = tuple(f"safeops.safe_{name}(" for name in ("div", "reciprocal", "sqrt", "norm", "pow"))
HOLDERS = (cst.Tuple, cst.List, cst.Dict)


class Promotion:
    """Follows values through a file."""

    def __init__(self, walk):
        self.walk, self.parents = walk, {}
        self.mentions = collections.defaultdict(list)  # name -> its Name nodes, from the last in the file to the first
        for node in descendants(walk.module):
            if isinstance(node, cst.Name):
                self.mentions[node.value].append(node)
            for child in children(node):
                self.parents[id(child)] = node

    def allows(self, node, text):
        """True if `text`, which may return fp32, can replace the expression `node`. If the value of `text` may be 0, it
        must not become a divisor either: the rule on divisions (SO202) would not see what made the divisor."""
        zero = text.startswith(MAY_BE_ZERO)
        todo, seen = [node], set()
        while todo:
            node = todo.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            reached = self._reached(node, self.parents.get(id(node)), zero)
            if reached is None:
                return False
            todo += reached
        return True

    def _reached(self, node, parent, zero):
        """Returns the expressions that use the value of `node` and pass it on; None if a use may not take fp32."""
        if isinstance(parent, (cst.UnaryOperation, *HOLDERS, cst.Element, cst.DictElement)):
            return [parent]
        if isinstance(parent, cst.BinaryOperation):
            below = zero and isinstance(parent.operator, cst.Divide) and node is parent.right
            return None if below or isinstance(parent.operator, cst.MatrixMultiply) else [parent]
        if isinstance(parent, cst.IfExp):
            return [] if node is parent.test else [parent]
        if isinstance(parent, cst.Attribute):
            return self._attribute(node, parent, zero)
        if isinstance(parent, cst.Subscript):
            return [parent]
        if isinstance(parent, cst.Arg):
            return [] if node is parent.keyword else self._argument(parent, self.parents[id(parent)], zero)
        if isinstance(parent, (cst.Assign, cst.AnnAssign, cst.NamedExpr)):
            return self._assigned(node, parent)
        if isinstance(parent, cst.AssignTarget):  # x[mask] = value raises if dtypes differ
            written = isinstance(node, cst.Subscript) and number(self.parents[id(parent)].value) is None
            return None if written else []
        if isinstance(parent, cst.AugAssign):
            matrix = isinstance(parent.operator, cst.MatrixMultiplyAssign)
            below = zero and isinstance(parent.operator, cst.DivideAssign) and node is parent.value
            named = isinstance(parent.target, cst.Name)
            return None if matrix or below or not named else self._uses(parent.target) if node is parent.value else []
        if isinstance(parent, cst.Return):
            return self._results(parent)
        ends = (cst.Comparison, cst.ComparisonTarget, cst.Expr, cst.If, cst.While, cst.Assert, cst.Param, cst.Index)
        return [] if isinstance(parent, (*ends, cst.FormattedStringExpression, cst.Del)) else None

    def _attribute(self, node, parent, zero):
        if node is parent.attr:
            return []
        call = self.parents[id(parent)]
        if isinstance(call, cst.Call) and call.func is parent:
            name = parent.attr.value.rstrip("_")
            casts = name in ("to", "type") and any(w in self.walk.text(call) for w in ("dtype", "float", "half"))
            if casts or name in ENDS:
                return []
            return [call] if name in PROMOTES | {"to"} and not (zero and name in DIVISORS) else None
        if parent.attr.value in NO_TENSOR_ATTRIBUTES:
            return None if parent.attr.value == "dtype" else []  # its dtype may be used: h.to(n.dtype)
        return [parent]

    def _argument(self, argument, call, zero):
        func = call.func
        full, name = self.walk.imports.resolve(func), (dotted(func) or "").rpartition(".")[2].rstrip("_")
        name = func.attr.value.rstrip("_") if isinstance(func, cst.Attribute) else name
        of_tensor = isinstance(func, cst.Attribute) and self.walk.value(func.value).tensor
        if argument.star or argument.keyword and argument.keyword.value in ONE_DTYPE or zero and name in DIVISORS:
            return None
        if zero and name == "div" and (argument is not call.args[0] or of_tensor):
            return None
        if name in ("cross_entropy", "nll_loss") and (argument is not call.args[0] or _has_weight(call)):
            return None
        if full is not None and full.startswith("safeops.") or (full is not None or of_tensor) and name in PROMOTES:
            return [call]
        logs = name == "log" and dotted(func) == "self.log"
        return [] if name in ENDS or logs else [call] if full is None and dotted(func) in BUILTINS else None

    def _assigned(self, node, parent):
        if isinstance(parent, cst.NamedExpr):
            return [parent, *self._uses(parent.target)]
        targets = [t.target for t in parent.targets] if isinstance(parent, cst.Assign) else [parent.target]
        targets = [e.value for t in targets for e in (t.elements if isinstance(t, cst.Tuple) else [cst.Element(t)])]
        if not all(isinstance(t, cst.Name) for t in targets):
            return None
        return [use for t in targets for use in self._uses(t)]

    def _uses(self, name):
        """Returns the other mentions of a variable within its outermost function."""
        function = self._enclosing(name, cst.FunctionDef, outermost=True)
        uses = (n for n in self.mentions[name.value] if n is not name)
        return [n for n in uses if self._enclosing(n, cst.FunctionDef, outermost=True) is function]

    def _enclosing(self, node, kinds, outermost=False):
        result = None
        while node is not None and (outermost or result is None):
            result = node if isinstance(node, kinds) else result
            node = self.parents.get(id(node))
        return result

    def _results(self, node):
        """Returns the calls, in this file, of the function that the return statement `node` belongs to. None if that
        function computes no loss: other files may then use its result in any way."""
        function = self._enclosing(node, (cst.FunctionDef, cst.Lambda))
        clue = self.walk.clues.get(id(function))
        if clue is None or not (clue.loss or clue.backward or clue.computes):
            return None
        owner, name = self._enclosing(function, cst.ClassDef), function.name.value
        if owner is not None and name in ("forward", "__call__"):
            return [] if len(self.mentions[owner.name.value]) == 1 else None  # only other files use it
        calls = [self._called(n) for n in self.mentions[name] if self.parents[id(n)] is not function]
        return None if None in calls else calls

    def _called(self, name):
        """The call whose function is `name`; None if the function is not called there but used as a value."""
        parent = self.parents[id(name)]
        node = parent if isinstance(parent, cst.Attribute) and parent.attr is name else name
        call = self.parents[id(node)]
        return call if isinstance(call, cst.Call) and call.func is node else None


def _has_weight(call):
    positional = sum(a.keyword is None for a in call.args)
    return positional > 2 or any(a.keyword and a.keyword.value in ONE_DTYPE for a in call.args)
