"""A rewritten expression as a person would write it: no parentheses that a call makes needless, and on one line where
it fits; else an argument a line."""

import io
import keyword
import re
import tokenize

import libcst as cst

from safeops.lint.finding import Edit

WIDTH = 120
OPENING, CLOSING = ("(", "[", "{"), (")", "]", "}")
NO_TEXT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def edit(data, old, start, end, text):
    """The Edit that puts `text` in place of the expression `old`, which is at [start, end) of a file's bytes."""
    if text.startswith("safeops.") and text.endswith(")"):
        for _ in getattr(old, "lpar", ()):
            before, after = data[:start].rstrip(), re.match(rb"\s*\)", data[end:])
            if not before.endswith(b"(") or after is None or re.search(rb"\w\($", before):  # `return(x)`
                break
            start, end = len(before) - 1, end + after.end()
    if "safeops." in text:
        text = _laid_out(text.replace("\r\n", "\n"), data, start, end)
        text = text.replace("\n", "\r\n") if b"\r\n" in data else text
    return Edit(start, end, text)


def _laid_out(text, data, start, end):
    head = data[data.rfind(b"\n", 0, start) + 1 : start].decode()
    tail = data[end:].partition(b"\n")[0].decode().rstrip()
    before, room = data[start:end].decode(), WIDTH - len(head) - len(tail)
    if "\n" not in before and len(before) > room:  # lines are longer here
        return text
    line = on_one_line(text)
    if line is not None and len(line) <= room:
        return line
    try:
        call = cst.parse_expression(f"({text}\n)") if text.startswith("safeops.") else None
    except cst.ParserSyntaxError:
        return text
    if not isinstance(call, cst.Call) or re.search(r"\"\"\"|'''", text):
        return text
    indent = head[: len(head) - len(head.lstrip())]
    inner = indent + ("\t" if "\t" in indent else "    ")
    rows = [f"{inner}{_argument(a, inner)},\n" for a in call.args]
    return f"{cst.Module([]).code_for_node(call.func)}(\n{''.join(rows)}{indent})"


def _argument(node, inner):
    name = f"{node.keyword.value}=" if node.keyword else ""
    text = name + cst.Module([]).code_for_node(node.value)
    line = on_one_line(text)
    if line is not None and len(inner) + len(line) < WIDTH:
        return line
    first, *rows = text.split("\n")
    widths = [len(row) - len(row.lstrip()) for row in rows if row.strip()]
    if not widths:
        return text
    least = min(widths)
    closed = rows[-1].lstrip()[:1] in CLOSING and widths[-1] == least
    further = inner if closed else inner + ("\t" if "\t" in inner else "    ")
    return "\n".join([first, *(further + row[least:] if row.strip() else "" for row in rows)])


def on_one_line(text):
    """The text of an expression without its line breaks; None where a comment or a string needs one."""
    source = f"({text}\n)"
    rows = source.split("\n")
    line, commas, before = "", [], None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in NO_TEXT:
            continue
        if token.type == tokenize.COMMENT or token.start[0] != token.end[0]:
            return None
        row, column = token.start
        closes, broken = token.string in CLOSING, before is not None and row != before.start[0]
        last = commas.pop() if closes else 0
        if closes and not commas:  # the parenthesis around it all
            return line
        if closes and broken and before.string == "," and last > 1:
            line = line[:-1]
        named = before is not None and before.type == tokenize.NAME and not keyword.iskeyword(before.string)
        named = named or before is not None and before.string in CLOSING
        touching = (
            closes or not line or before.string in OPENING or token.string == "." or named and token.string in OPENING
        )
        if broken:
            line += "" if touching else " "
        elif commas:
            line += rows[row - 1][before.end[1] : column]
        line += rows[row - 1][column : token.end[1]] if commas else ""
        if token.string in OPENING:  # of a tuple or an index of one the only comma must stay
            commas.append(int(named if token.string == "(" else not named))
        elif token.string == ",":
            commas[-1] += 1
        before = token
    return None
