"""Finds the small changes that scripts/mutants.py makes: in a Python file by its syntax tree, in C++ by its text.

A change is a dict: path, line, what (its kind), start and stop (the replaced range of the file's text), old (the text
in that range), text (its replacement).
"""

import ast
import re

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "&": "|", "|": "&", "&&": "||", "||": "&&", "+=": "-=", "-=": "+=",
             "and": "or", "or": "and", "is": "is not", "is not": "is", "in": "not in", "not in": "in", "//": "%",
             "%": "//"}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin",
           "any": "all", "all": "any", "fmin": "fmax", "fmax": "fmin"}  # fmt: skip
# Matches lines that affect only speed or the text of a message: no test could notice a change in them.
UNSEEN = re.compile(
    r"\b(kAhead|kSlice|kMaxTasks|kMinRows|parallel\(|alignas|max_contiguous|Config\(|POLICY|prime|prefetch|lru_cache"
    r"|cache_modifier|stacklevel|static_assert|template|printf|__slots__|pragma|include|include_bytes|__launch_bounds__)"
)


def number(text):
    return {"0": "1", "1": "0", "True": "False", "False": "True", "0.0": "1.0", "1.0": "0.0"}.get(text) or (
        str(int(text) + 1) if text.isdigit() else None
    )


def mutations(path, name):
    source = path.read_text()
    results = _python(source) if path.suffix == ".py" else _cpp(source)
    lines = source.splitlines()
    result = []
    for start, stop, text, what in results:
        line = source.count("\n", 0, start) + 1
        if not UNSEEN.search(lines[line - 1]) and source[start:stop] != text:
            result.append(
                dict(path=name, line=line, what=what, start=start, stop=stop, old=source[start:stop], text=text)
            )
    return result


# ---- Python


class _Walk(ast.NodeVisitor):
    def __init__(self, source):
        self.source, self.edits, self.offsets = source, [], [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.ascii = source.isascii()

    def at(self, node):
        return self.offsets[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.offsets[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        return self.source[self.at(node) : self.end(node)]

    def add(self, start, stop, text, what):
        self.edits.append((start, stop, text, what))

    def replace(self, node, text, what):
        self.add(self.at(node), self.end(node), text, what)

    def between(self, left, right, table, what):
        """Adds the change that replaces the operator between two operands by table[operator]."""
        start, gap = self.end(left), self.source[self.end(left) : self.at(right)]
        token = re.sub(r"[()\s\\]|#.*", " ", gap).strip()
        if token in table and gap.count(token) == 1:
            start += gap.index(token)
            self.add(start, start + len(token), table[token], what)

    def visit_Compare(self, node):
        for left, right in zip([node.left, *node.comparators], node.comparators):
            self.between(left, right, COMPARISONS | OPERATORS, "comparison")
        self.generic_visit(node)

    def visit_BinOp(self, node):
        if not isinstance(node.left, ast.Constant) or not isinstance(node.left.value, str):
            self.between(node.left, node.right, OPERATORS, "operator")
        self.generic_visit(node)

    def visit_BoolOp(self, node):
        for left, right in zip(node.values, node.values[1:]):
            self.between(left, right, OPERATORS, "and, or")
        self.generic_visit(node)

    def visit_UnaryOp(self, node):
        if not isinstance(node.operand, ast.Constant) or isinstance(node.op, ast.USub):
            self.replace(node, f"({self.text(node.operand)})", "sign or negation dropped")
        self.generic_visit(node)

    def visit_Constant(self, node):
        if isinstance(node.value, (bool, int, float)) and (text := number(self.text(node))):
            self.replace(node, text, "constant")

    def visit_Call(self, node):
        name = self.text(node.func).rpartition(".")[2]
        if name in SWAPPED:
            end = self.end(node.func)
            self.add(end - len(name), end, SWAPPED[name], "swapped")
        if name == "where" and len(node.args) == 3:
            condition, yes, no = node.args
            self.replace(node, f"({self.text(yes)})", "selection dropped")
            self.replace(condition, f"~({self.text(condition)})", "selection negated")
        for before, keyword in zip([*node.args, *node.keywords], [*node.args, *node.keywords][1:]):
            if name in ("load", "store") and isinstance(keyword, ast.keyword) and keyword.arg in ("mask", "other"):
                if keyword.arg == "mask" and any(k.arg == "other" for k in node.keywords):
                    continue  # mask= stays: other= is not allowed without it
                self.add(self.end(before), self.end(keyword), "", f"{keyword.arg}= dropped")
        self.generic_visit(node)

    def visit_If(self, node):
        if not node.orelse and isinstance(node.body[-1], (ast.Raise, ast.Return, ast.Continue, ast.Break)):
            self.replace(node.test, "False", "guard removed")
        self.generic_visit(node)

    def visit_Return(self, node):
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.replace(node.value, "None", "returns None")
        self.generic_visit(node)

    def visit_FunctionDef(self, node):  # no defaults: they are the schema's, or mark an absent operand
        for statement in node.body:
            self.visit(statement)

    visit_Raise = visit_AnnAssign = visit_Assert = visit_JoinedStr = lambda self, node: None


def _python(source):
    walk = _Walk(source)
    if walk.ascii:  # else the tree's columns, which count bytes, would be no indices of characters
        walk.visit(ast.parse(source))
    return walk.edits


# ---- C++


def _blank(match):
    return re.sub(r"[^\n]", " ", match[0])


def _closing(text, at):
    """Returns the index of the parenthesis that closes the parenthesis at index `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return None


def _arguments(text, opening):
    """Returns the (start, stop) of each argument of the call whose parenthesis opens at index `opening`."""
    closing, parts, depth = _closing(text, opening), [opening + 1], 0
    for i in range(opening + 1, closing or opening):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(text[i], 0)
        if text[i] == "," and depth == 0:
            parts.append(i + 1)
    return [(a, b) for a, b in zip(parts, [p - 1 for p in parts[1:]] + [closing])] if closing else []


def _cpp(source):
    code = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^\s*#[^\n]*', _blank, source, flags=re.DOTALL | re.MULTILINE)

    def tokens(pattern, table, what):
        for match in re.finditer(pattern, code):
            new = table(match[1]) if callable(table) else table.get(match[1])
            if new is not None:
                yield match.start(1), match.end(1), new, what

    yield from tokens(r" (<=|>=|==|!=|<|>) (?!\w+>)", COMPARISONS, "comparison")
    yield from tokens(r" (\+|-|\*|/|&&|\|\||&|\||\+=|-=) (?=[\w(!*])", OPERATORS, "operator")
    yield from tokens(r"(?:[=(,?:] |\(|return )([-!])(?=[\w(])", {"-": "", "!": ""}, "sign or negation dropped")
    yield from tokens(r"(?<![\w.'<])(\d+)(?![\w.'>])", number, "constant")
    yield from tokens(r"\b(?:std::)?(min|max|fmin|fmax)\b(?=\(|<)", SWAPPED, "swapped")
    for match in re.finditer(r"\b(select|kept_or_zero)(?=\()", code):
        parts = _arguments(code, match.end())
        if len(parts) == 3:
            condition, yes, _ = (source[a:b].strip() for a, b in parts)
            yield match.start(), _closing(code, match.end()) + 1, f"({yes})", "selection dropped"
        elif len(parts) == 2:
            yield (
                match.start(),
                _closing(code, match.end()) + 1,
                f"({source[slice(*parts[1])].strip()})",
                "mask dropped",
            )
    for match in re.finditer(r"\bif constexpr (?=\((kKeep|kMask|kWeight)\))", code):
        yield match.end(), _closing(code, match.end()) + 1, "(false)", "mask dropped"
    for match in re.finditer(r"\bif (?=\()", code):
        closing = _closing(code, match.end())
        if closing and re.match(r"\s*\{?\s*(return|continue|break)\b", code[closing + 1 :]):
            yield match.end(), closing + 1, "(false)", "guard removed"
    for match in re.finditer(r"\bSTD_TORCH_CHECK(?=\()", code):
        if parts := _arguments(code, match.end()):
            yield *parts[0], "true", "guard removed"
