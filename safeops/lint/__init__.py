"""`safeops lint`: finds the patterns that break losses under mixed precision, and rewrites those it can.

    from safeops.lint.check import fix_source, lint_source

The rules are in `rules/`, one class a code; `docs/lint.md` lists them. Needs libcst (`pip install libcst`),
which `import safeops` does not load. From parse to report: `syntax` reads the tree, `survey` tells losses from other
functions, `walk` runs through statements (`binding`: names) and `expressions` (`calls`) with what `values` and `scope`
infer, and shows the rules a `context`; `check` applies noqa and rewrites, `run` goes over files, `output` prints.
"""
