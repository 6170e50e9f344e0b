"""Reads libcst's tree: a node's children without white space, full names through imports, and each tensor operation as
an Op, however it was written."""

import dataclasses
import functools
import re

import libcst as cst

# Fields of nodes that hold no code. The walk skips them, which makes it several times as fast as a CSTVisitor.
_LAYOUT = ("whitespace", "lpar", "rpar", "lbracket", "rbracket", "comma", "semicolon", "leading_lines", "lines_after")
_LAYOUT += ("header", "footer", "trailing", "colon", "indent", "first_line", "star", "equal", "newline", "asynchronous")
_fields = {}


def children(node):
    """Yield the child nodes that hold code, in source order."""
    kind = type(node)
    names = _fields.get(kind)
    if names is None:
        names = [f.name for f in dataclasses.fields(kind) if not f.name.startswith(_LAYOUT)]
        _fields[kind] = names
    for name in names:
        child = getattr(node, name)
        kind = type(child)
        if kind is tuple or kind is list:
            for item in child:
                if _is_node(type(item)):
                    yield item
        elif _is_node(kind):
            yield child


@functools.cache
def _is_node(kind):  # isinstance of an abstract class is slow
    return issubclass(kind, cst.CSTNode)


def descendants(node, stop=()):
    """Yield a node and all nodes below it. Nodes of the classes `stop` are yielded, but not those below them."""
    todo = [node]
    while todo:
        item = todo.pop()
        yield item
        if not (stop and isinstance(item, stop) and item is not node):
            todo.extend(children(item))


def comments(node):
    """Returns the number of comments in a node. (A rewrite must keep them.)"""
    count = 0
    todo = [node]
    while todo:
        item = todo.pop()
        count += isinstance(item, cst.Comment)
        todo.extend(item.children)
    return count


def dotted(node):
    """Returns "a.b.c" for a name or nested attributes of a name, else None."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    parts.append(node.value)
    return ".".join(reversed(parts))


NESTED = (cst.FunctionDef, cst.ClassDef, cst.Lambda)


def names_of(expression):
    """Returns the names in an expression, without called functions, attributes and keywords."""
    nodes = list(descendants(expression, stop=NESTED))
    called = {id(n.func) for n in nodes if isinstance(n, cst.Call)}
    called |= {id(n.attr) for n in nodes if isinstance(n, cst.Attribute)}
    called |= {id(n.keyword) for n in nodes if isinstance(n, cst.Arg) and n.keyword}
    return {n.value for n in nodes if isinstance(n, cst.Name) and id(n) not in called}


def number(node):
    """Returns the value of a literal number (`-1e9`, `float("-inf")`, `math.inf`), else None."""
    if isinstance(node, (cst.Integer, cst.Float)):
        return node.evaluated_value
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, (cst.Minus, cst.Plus)):
        value = number(node.expression)
        return None if value is None else -value if isinstance(node.operator, cst.Minus) else value
    if isinstance(node, cst.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        text = node.args[0].value
        infinite = isinstance(text, cst.SimpleString) and text.evaluated_value in ("inf", "-inf")
        return float(text.evaluated_value) if infinite else number(text)
    if dotted(node) in ("math.inf", "torch.inf", "np.inf", "numpy.inf"):
        return float("inf")
    return None


ARRAYS = {"numpy", "pandas", "polars", "jax", "tensorflow", "scipy", "sklearn", "cupy", "sympy"}


TEST_FILE = re.compile(r"(^|[/\\])(test_\w+|\w+_test|conftest)\.py$")


def moves(op):
    """True if `x.to(...)` names a device and no dtype."""
    given = [*op.args, *(n for name, n in op.kwargs.items() if name not in ("device", "non_blocking", "copy"))]
    return op.name == "to" and all("device" in (dotted(n) or "") or isinstance(n, cst.SimpleString) for n in given)


class Imports:
    """The imported names of a file, and the full names that they stand for."""

    def __init__(self, module, path=""):
        self.names = {}
        self.torch = self.arrays = False  # arrays: True if it imports another library of arrays
        for node in descendants(module):
            if isinstance(node, cst.Import):
                for alias in node.names:
                    full = dotted(alias.name)
                    bound = alias.evaluated_alias or full.split(".")[0]
                    self._bind(bound, full if alias.asname else full.split(".")[0], full)
            elif isinstance(node, cst.ImportFrom) and not isinstance(node.names, cst.ImportStar):
                package = dotted(node.module) if node.module and not node.relative else None
                for alias in node.names:
                    name = alias.evaluated_name
                    full = f"{package}.{name}" if package else f".{name}"
                    self._bind(alias.evaluated_alias or name, full, full)
        self.tests = TEST_FILE.search(path) is not None

    def _bind(self, name, full, imported):
        self.names[name] = full
        self.torch = self.torch or imported.split(".")[0] == "torch"
        self.arrays = self.arrays or imported.split(".")[0] in ARRAYS

    def resolve(self, node):
        """Returns the full name, such as "torch.nn.functional.relu", of an expression that begins with an imported
        name; else None."""
        name = dotted(node)
        if name is None:
            return None
        head, _, rest = name.partition(".")
        full = self.names.get(head)
        return full and (f"{full}.{rest}" if rest else full)


@dataclasses.dataclass(slots=True)
class Op:
    """One tensor operation, however it was written: `torch.log(x)`, `x.log()`, `x.log_()`, `a / b`."""

    name: str  # without a trailing underscore, and without synonyms: `multiply_` is "mul"
    node: cst.CSTNode
    input: cst.BaseExpression | None
    args: list  # positional arguments after input
    kwargs: dict
    origin: str  # torch | functional | method | operator
    inplace: bool = False

    def arg(self, position, *names):
        """Returns the argument that has one of these keywords, or is at `position` after input; else None."""
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if position < len(self.args) else None


SYNONYMS = {
    **dict(divide="div", true_divide="div", multiply="mul", subtract="sub", arccos="acos", arcsin="asin"),
    **dict(arccosh="acosh", arctanh="atanh", clip="clamp"),
    **dict(absolute="abs", greater="gt", greater_equal="ge", less="lt", less_equal="le", not_equal="ne"),
    **dict(concat="cat", concatenate="cat", vector_norm="norm", matrix_norm="norm", float_power="pow"),
}
OPERATORS = dict(Add="add", Subtract="sub", Multiply="mul", Divide="div", Power="pow", MatrixMultiply="matmul")
OPERATORS |= dict(Modulo="remainder", FloorDivide="floor_divide", BitAnd="bitwise_and", BitOr="bitwise_or")
OPERATORS = {getattr(cst, kind): name for kind, name in (OPERATORS | dict(BitXor="bitwise_xor")).items()}
PREFIXES = {f"torch{name}": "torch" for name in ("", ".special", ".linalg", ".Tensor")}
PREFIXES["torch.nn.functional"] = "functional"


def operation(node, imports):
    """Returns the Op of a call or a binary operation, else None. The operands need not be tensors."""
    if isinstance(node, cst.BinaryOperation):
        name = OPERATORS.get(type(node.operator))
        return name and Op(name, node, node.left, [node.right], {}, "operator")
    if not isinstance(node, cst.Call) or any(a.star for a in node.args):
        return None
    kwargs = {a.keyword.value: a.value for a in node.args if a.keyword}
    args = [a.value for a in node.args if not a.keyword]
    full = imports.resolve(node.func)
    if full is not None:
        prefix, _, name = full.rpartition(".")
        if prefix not in PREFIXES:
            return None
        input = args.pop(0) if args else kwargs.pop("input", None)
        origin = PREFIXES[prefix]
    elif isinstance(node.func, cst.Attribute):
        name, input, origin = node.func.attr.value, node.func.value, "method"
    else:
        return None
    inplace = name.endswith("_") and not name.endswith("__")
    name = name[:-1] if inplace else name
    return Op(SYNONYMS.get(name, name), node, input, args, kwargs, origin, inplace)
