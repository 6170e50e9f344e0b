"""The body of a `with recorder.step(batch):` block, or of a loop over batches, as a function that is made from its
source, so that it can run again.

The variables that the block reads are the function's parameters. What it assigns are variables of the function: those
of the user stay as they are.
"""

import ast
import builtins
import copy
import functools
import inspect
import linecache
import sys
import threading

from safeops.amp._nested import map_tensors
from safeops.debug.recorder.state import is_generator

_parsing = threading.Lock()  # two threads at once: SystemError in Python 3.11 (python/cpython#106905)
_SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda
_ANNOTATIONS = 0x1000000  # the compiler's flag of `from __future__ import annotations`


class Unreadable(Exception):
    """The block cannot run again; the text says why."""


class Body:
    """The `with` block that begins at the frame's line, with the values that its variables have now."""

    def __init__(self, frame):
        self._read(_block(frame.f_code, frame.f_lineno), frame)

    def _read(self, block, frame):
        variables, self.globals, self.block = frame.f_locals, frame.f_globals, block
        # A name that the function declares global, and that the block assigns, is a variable of the replay's own, too.
        of_globals = {name: frame.f_globals[name] for name in self.block.globals if name in frame.f_globals}
        self.values = {name: variables[name] for name in self.block.reads if name in variables} | of_globals
        # A variable that the block assigns in part of its cases only may have no value yet.
        unset = self.block.reads - self.values.keys()
        self.unset = {name: getattr(builtins, name, None) for name in unset if self.block.assigns(name)}
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            # The frame keeps this dict: it must not hold what the block lets go when it assigns.
            for name in self.block.stores & variables.keys():
                del variables[name]

    def holds(self, tensors):
        """True if a variable of the block is, or contains, one of the tensors."""
        wanted, found = {id(x) for x in tensors}, []
        try:
            map_tensors(lambda x: found.append(id(x) in wanted) or x, list(self.values.values()))
        except RecursionError:  # a variable that contains itself
            return True
        return any(found)

    def objects(self):
        """The values of the block's variables, and the attributes of its `self`."""
        return [*self.values.values(), *getattr(self.values.get("self"), "__dict__", {}).values()]

    def generators(self):
        """{name: a generator of random numbers} of the variables, and of the attributes of `self`."""
        named = {f"self.{name}": x for name, x in getattr(self.values.get("self"), "__dict__", {}).items()}
        return {name: x for name, x in (self.values | named).items() if is_generator(x)}

    def __call__(self, replaced):
        """Run the block. replaced: {id(tensor): the tensor to take in its place}."""
        values = self.unset | {name: replace(x, replaced) for name, x in self.values.items()}
        owner = values.pop("__class__", None)
        space = {}
        exec(self.block.compiled(tuple(values)), self.globals, space)
        function = space["make"](owner)
        function.__code__ = function.__code__.replace(co_name=self.block.code.co_name)  # as a report names it
        return function(**values)


class Call:
    """A function and its arguments, for callers that have no block."""

    def __init__(self, function, args, kwargs):
        self.function, self.args, self.kwargs = function, args, kwargs

    def holds(self, tensors):
        return True

    def objects(self):
        return [getattr(self.function, "__self__", None), *self.args, *self.kwargs.values()]

    def generators(self):
        named = self.kwargs | {str(i): x for i, x in enumerate(self.args)}
        return {name: x for name, x in named.items() if is_generator(x)}

    def __call__(self, replaced):
        return self.function(*replace(self.args, replaced), **replace(self.kwargs, replaced))


def replace(value, replaced):
    if id(value) in replaced:
        return replaced[id(value)]
    try:
        return map_tensors(lambda x: replaced.get(id(x), x), value)
    except RecursionError:  # it contains itself
        return value


@functools.lru_cache(maxsize=64)
class _block:
    """The source of the block that begins at a line of `code`. reads: the names whose values it needs.

    offset: of the instruction of a `for` loop, whose body the block is; None: a `with` block."""

    def __init__(self, code, line, offset=None):
        source = "".join(linecache.getlines(code.co_filename))
        if not source:
            raise Unreadable(f"the source of {code.co_filename} is not there")
        try:
            with _parsing:
                tree = ast.parse(source)
            around, node = _find(tree, line) if offset is None else _find_loop(tree, code, line, offset)
        except SyntaxError as error:
            raise Unreadable(f"{code.co_filename} does not parse (any more): {error}") from None
        if node is None:
            kind = "with` block" if offset is None else "for` loop"
            raise Unreadable(f"no `{kind} begins at line {line} of {code.co_filename}")
        if around and isinstance(around[-1], ast.ClassDef):
            raise Unreadable("the block is in the body of a class")
        own = [*_own(node.body)]
        if any(isinstance(x, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)) for x in own):
            raise Unreadable("the block yields or awaits")
        if any(isinstance(x, (ast.Global, ast.Nonlocal)) for x in own):
            raise Unreadable("the block declares global or nonlocal names: declare them at the top of the function")
        self.code, self.node, self.body = code, node, node.body
        names = [x for x in own if isinstance(x, ast.Name)]
        self.stores = {x.id for x in names if not isinstance(x.ctx, ast.Load)}
        top = _own(around[-1].body) if around else ()
        self.globals = {name for x in top if isinstance(x, ast.Global) for name in x.names} & self.stores
        owner = next((scope.name for scope in reversed(around) if isinstance(scope, ast.ClassDef)), None)
        self.mangle = _Mangle(owner)
        self.reads = {self.mangle.name(name) for name in _reads(node.body) - self.globals}
        if any(x.id in ("super", "__class__") for x in names):
            self.reads |= {"__class__", *code.co_varnames[:1]}

    def assigns(self, name):
        return name in self.stores or name in self.code.co_varnames or name in self.code.co_cellvars

    def compiled(self, names):
        """Code that defines make(__class__), which returns the block as a function of the variables `names`."""
        first = [name for name in self.code.co_varnames[:1] if name in names]  # super() needs it to be the first
        parameters = ", ".join([*first, *(name for name in names if name not in first)])
        # The block may `break` or `continue` the loop that it is in.
        text = f"def make(__class__):\n def block({parameters}):\n  for _safeops_once in (None,): pass\n return block"
        module = ast.parse(text)
        block = module.body[0].body[0]
        block.body[0].body = [self.mangle.visit(copy.deepcopy(x)) for x in self.body]
        flags = self.code.co_flags & _ANNOTATIONS
        return compile(ast.fix_missing_locations(module), self.code.co_filename, "exec", flags, dont_inherit=True)


class _Mangle(ast.NodeTransformer):
    """Private names of a class, as Python itself renames them inside it: self.__x is self._Class__x."""

    def __init__(self, owner):
        self.prefix = f"_{owner.lstrip('_')}" if owner else ""

    def name(self, name):
        return self.prefix + name if name.startswith("__") and not name.endswith("__") else name

    def visit_Attribute(self, node):
        node.attr = self.name(node.attr)
        return self.generic_visit(node)

    def visit_Name(self, node):
        node.id = self.name(node.id)
        return node

    def visit_arg(self, node):
        node.arg = self.name(node.arg)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        node.name = self.name(node.name)
        return self.generic_visit(node)


def _find(tree, line):
    """Returns (the functions and classes around it, outermost first; the innermost `with` that begins at the line)."""

    def begins(node):
        return node.lineno <= line <= max(x.context_expr.end_lineno for x in node.items)

    return _innermost(tree, ast.With, begins)


def _find_loop(tree, code, line, offset):
    """Returns what `_find` does, of the `for` loop that the instruction at `offset` belongs to."""
    place = [*code.co_positions()][offset // 2] if hasattr(code, "co_positions") else None

    def begins(node):
        if place is None or place[2] is None:  # Python 3.10, or compiled without columns
            return node.lineno <= line <= node.iter.end_lineno
        # (the instruction has the place of the statement, from Python 3.12 on of the iterable)
        return place in [(x.lineno, x.end_lineno, x.col_offset, x.end_col_offset) for x in (node, node.iter)]

    return _innermost(tree, ast.For, begins)


def _innermost(tree, kind, begins):
    found = (), None

    def visit(node, around):
        nonlocal found
        if isinstance(node, kind) and begins(node):
            found = around, node
        for child in ast.iter_child_nodes(node):
            visit(child, (*around, node) if isinstance(node, _SCOPES) else around)

    visit(tree, ())
    return found


def _own(nodes):
    """Yield the nodes and their children, without those of the functions and classes among them."""
    for node in nodes:
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own(ast.iter_child_nodes(node))


def _reads(statements, assigned=None):
    """The names that the statements may read before they assign them. assigned: filled with the names that have a value
    after them; what an `if`, a loop or a `try` assigns may have none."""
    reads, assigned = set(), set() if assigned is None else assigned
    for statement in statements:
        blocks, header = _parts(statement)
        nodes = [node for x in header for node in ast.walk(x)]
        names = {x.id for x in nodes if isinstance(x, ast.Name) and not isinstance(x.ctx, ast.Store)}
        names |= {x.target.id for x in nodes if isinstance(x, ast.AugAssign) and isinstance(x.target, ast.Name)}
        names |= {name for x in nodes if isinstance(x, ast.Nonlocal) for name in x.names}
        reads |= names - assigned
        inner = {id(x) for node in nodes if isinstance(node, ast.comprehension) for x in ast.walk(node.target)}
        stores = [x for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)]
        stored = {x.id for x in stores if id(x) not in inner}
        if isinstance(statement, (ast.With, ast.Assign)) or isinstance(statement, ast.AnnAssign) and statement.value:
            assigned |= stored
        target = stored if isinstance(statement, ast.For) else set()
        after = []
        for block in blocks:
            after.append(assigned | target)
            reads |= _reads(block, after[-1])
        if isinstance(statement, ast.With):
            assigned |= after[0]
        elif isinstance(statement, ast.If):  # (the block of an `else` that is not there is empty)
            assigned |= after[0] & after[1]
    return reads


def _parts(statement):
    """The blocks of a statement that has any, and what it evaluates before them; else none, and itself."""
    if isinstance(statement, ast.With):
        return [statement.body], statement.items
    if isinstance(statement, ast.For):
        return [statement.body, statement.orelse], [statement.target, statement.iter]
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.body, statement.orelse], [statement.test]
    return [], [statement]
