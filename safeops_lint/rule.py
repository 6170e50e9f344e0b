"""A rule. Its texts are data: docs/lint.md is generated from them. Examples are in tests/lint/examples.py."""


class Rule:
    """One code: `operation` is called for the tensor operations `ops`, `visit` for the nodes and moments `events`."""

    code = name = ""
    what = why = fix = ""  # what happens, why, and what to write instead
    rewrites = ""  # what --fix does; "" where it does nothing
    widens = False  # True: its rewrite returns fp32 for half
    ops = ()
    events = ()

    def __init_subclass__(cls):
        for name in ("what", "why", "fix", "rewrites"):
            setattr(cls, name, " ".join(getattr(cls, name).split()))
