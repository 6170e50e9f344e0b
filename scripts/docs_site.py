"""The hooks of mkdocs. They add a page for each public function, pages for files outside of docs/, links to functions,
and pictures.

Links in docs/ are paths in the checkout, so that they work there too. A Markdown file that they link to (the README,
results of benchmarks) becomes a page of the site; a link to code becomes plain text.
"""

import html
import inspect
import posixpath
import re
import sys
import textwrap
from pathlib import Path

import griffe
import tomllib
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import docs_pictures  # noqa: E402
import docs_speed  # noqa: E402

import safeops  # noqa: E402
from safeops.core.op import registry  # noqa: E402
from safeops.integrations import transformers  # noqa: E402

# {folder of safeops: title of its group of functions}, in the site's order
GROUPS = {
    "elementwise": "Numbers", "reductions": "Sums and means", "losses": "Losses of elements",
    "classification": "Classes", "divergences": "Divergences", "linear": "A layer with its loss",
    "head": "A head with its loss", "vectors": "Vectors", "images": "Images", "selection": "Selection",
    "policies": "Policies and advantages", "rankings": "Orders and preferences", "routers": "Routers of experts",
    "amp": "Mixed precision", "debug": "Finding it", "distributed": "Across ranks",
    "integrations": "In other libraries",
}  # fmt: skip
HIDDEN = {
    **{"index.md": ["navigation", "toc"], "symptoms.md": ["navigation"], "speed.md": ["toc"]},
    "recipes.md": ["navigation"],  # its code needs the width
}
RENAMED = {"README.md": "overview.md", "CONTRIBUTING.md": "contributing.md"}
FORMULAS = tomllib.loads((ROOT / "scripts" / "docs_formulas.toml").read_text())
LINK = re.compile(r"(`+)[^`]+\1|(!?)\[([^\]]*)\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"<(pre|a|h1|h2|h3)\b.*?</\1>|<code>(?:safeops\.)?([\w.]+)(\(.*?)?</code>", re.DOTALL)
RETURNS = re.compile(r"^Returns:\n((?:    .*\n|\n)+)", re.MULTILINE)


def functions():
    """Returns {name: (function, group)} of all public functions."""
    named = {name: getattr(safeops, name) for name in safeops.__all__}
    named |= {f"debug.{name}": getattr(safeops.debug, name) for name in ("trace", "audit", "locate_errors", "no_sync")}
    named |= {f"distributed.{name}": getattr(safeops.distributed, name) for name in safeops.distributed.__all__}
    for name in ("ForCausalLMLoss", "compute_loss_func"):
        named[f"integrations.transformers.{name}"] = getattr(transformers, name)
    groups = {name: next((g for g in GROUPS if f".{g}." in f"{f.__module__}."), "amp") for name, f in named.items()
              if not inspect.ismodule(f)}  # fmt: skip
    return {name: (named[name], groups[name]) for group in GROUPS for name in groups if groups[name] == group}


PUBLIC = functions()
PATHS = {f"{f.__module__}.{f.__qualname__}": name for name, (f, _) in PUBLIC.items()}

# Path of pages -> their rank in a search. Tables of results contain every op's name, and would come before the op's
# page.
SEARCHED = {
    **dict.fromkeys(("benchmarks/", "gpu-model.md"), {"exclude": True}),
    **dict.fromkeys(("CHANGELOG.md", "contributing.md", "architecture.md", "csrc/", "kernels/"), {"boost": 0.5}),
    # The shorter the name, the higher its rank: a search for a word finds the shortest name with it first.
    **{f"functions/{name}.md": {"boost": 2 + 4 / len(name)} for name in PUBLIC},
    "install.md": {"boost": 2},
}


def repository_path(page):
    """Returns the path of a page's source, relative to the checkout."""
    path = {new: old for old, new in RENAMED.items()}.get(page, page)
    return path if (ROOT / path).is_file() else f"docs/{path}"


def site_path(path):
    return RENAMED.get(path) or path.removeprefix("docs/")


# ---- pages


def on_config(config):
    pages = {title: [] for title in GROUPS.values()}
    for name, (_, group) in PUBLIC.items():
        pages[GROUPS[group]].append({name.split("transformers.")[-1]: f"functions/{name}.md"})
    next(entry for entry in config.nav if "Functions" in entry)["Functions"] += [{k: v} for k, v in pages.items()]
    return config


def on_files(files, config):
    for name in PUBLIC:
        files.append(File.generated(config, f"functions/{name}.md", content=function_page(name)))
    found = ["README.md", "CONTRIBUTING.md"]
    waiting = found + [f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by]
    while waiting:
        path = waiting.pop()
        for match in LINK.finditer((ROOT / path).read_text()):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[4] or ""))
            if target.endswith(".md") and not target.startswith("docs/") and target not in found:
                found.append(target)
                waiting.append(target)
    for path in found:
        files.append(File.generated(config, site_path(path), abs_src_path=ROOT / path))
    return files


def function_page(name):
    op = registry.get(name)
    # a name with a dot needs its whole path: safeops.debug.trace is a module and the function in it
    path = next(path for path, of in PATHS.items() if of == name) if "." in name else f"safeops.{name}"
    text = f"---\ntitle: {name}\n---\n\n::: {path}\n    options: {{heading: safeops.{name}}}\n"
    if op is not None and op.module:
        module = getattr(safeops.nn, op.module)
        calls = [str(inspect.signature(f)).replace("(self, ", "(", 1) for f in (module.__init__, module.forward)]
        text += f"\n## As a module: {op.module}\n\n"
        text += f"```python\nloss = safeops.nn.{op.module}{calls[0]}\nloss{calls[1]}\n```\n"
    return text


class Docstrings(griffe.Extension):
    """Gives each function the docstring that `help` shows, with the formula and the picture after its first
    paragraph."""

    def on_function(self, *, func, **_):
        for name in {"extra", "unknown"} & {x.name for x in func.parameters}:
            del func.parameters[name]  # these catch arguments that are refused (core/foreign.py)
        self._complete(func)

    def on_class(self, *, cls, **_):
        self._complete(cls)

    def _complete(self, thing):
        if thing.path in PATHS:
            name = PATHS[thing.path]
            # "<" is escaped, since "<x, y>" would be a tag
            first, rest = re.sub("<(?=[a-z])", "&lt;", inspect.getdoc(PUBLIC[name][0])).split("\n\n", 1)
            parts = [first]
            if name in FORMULAS:
                parts.append(f'<div class="formula">{convert(FORMULAS[name], display="block")}</div>')
            if name in docs_pictures.PICTURES:
                parts.append(f"<!-- picture: {name} -->")
            text = re.sub("^Example:$", "Examples:", "\n\n".join([*parts, rest]), flags=re.MULTILINE)
            # as text: a section would be shown as a list of one unnamed item
            thing.docstring.value = RETURNS.sub(lambda m: "**Returns:**\n\n" + textwrap.dedent(m[1]), text)


# ---- links and pictures


def on_page_markdown(markdown, page, **_):
    source = page.file.src_uri
    page.meta["search"] = next((options for start, options in SEARCHED.items() if source.startswith(start)), {})
    page.meta["hide"] = HIDDEN.get(source, ["toc"] if source.startswith("functions/") else [])

    def link(match):
        _, image, text, path, anchor = match.groups()
        if not path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(repository_path(source)), path))
        if not image and not target.endswith(".md"):
            return text
        target = posixpath.relpath(site_path(target), posixpath.dirname(source) or ".")
        return f"{image}[{text}]({target}{anchor or ''})"

    if source.startswith("functions/"):
        return markdown
    return "".join(part if part.startswith("```") else LINK.sub(link, part)
                   for part in re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE))  # fmt: skip


def on_page_content(content, page, **_):
    up = "../" * page.file.dest_uri.count("/")

    def code(match):
        name = match[2]
        if name not in PUBLIC or page.file.src_uri == f"functions/{name}.md":
            return match[0]
        text = re.sub(r"([._(])(?=\w)", r"\1<wbr>", match[0])  # so that a narrow column can break the name there
        return f'<a class="function" href="{up}functions/{name}.html">{text}</a>'

    return re.sub(r"<!-- picture: ([\w.]+) -->", picture, CODE.sub(code, content))


def picture(match):
    name = match[1]
    if name in docs_speed.PICTURES:
        return docs_speed.PICTURES[name]()
    ours, theirs, drawings = docs_pictures.picture(name)
    ours, theirs = (f'<span class="{who}"><code>{html.escape(code)}</code></span>' for who, code in
                    (("ours", ours), ("torch", theirs)))  # fmt: skip
    caption = f'fp16 on the CPU: {ours}, {theirs} (shaded: not finite), <span class="exact">exact</span>'
    return f'<figure class="plots">{drawings}<figcaption>{caption}</figcaption></figure>'
