"""`safeops lint`: finds the patterns that break losses under mixed precision, and rewrites those it can.

    from safeops_lint.check import fix_source, lint_source

This package imports neither torch nor safeops, and libcst only when it lints (`pip install libcst`). The rules are in
`rules/`, one class for each code; `docs/lint.md` lists them. From parse to report: `syntax` reads the tree; `survey`
separates losses from other functions; `walk` goes through statements (`binding`: names), `expressions` goes through
expressions (`calls`), and both infer facts (`values`, `scope`) and call the rules, which use `context`; `promotion`
says which rewrites may return fp32; `check` applies noqa and rewrites; `run` goes over files; `output` prints.
"""


def version():
    """The version of safeops: its wheel contains this package."""
    import importlib.metadata

    return importlib.metadata.version("safeops")
