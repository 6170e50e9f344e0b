"""The base class of rules. docs/lint.md is generated from their texts. Examples are in tests/lint/examples.py."""


class Rule:
    """A rule, with one code. The walk calls `operation(op, walk)` for each tensor operation that `ops` names, and
    `visit(event, node, walk)` for each event in `events`: the class of a node, "store", "test", "function" or
    "module"."""

    code = name = ""
    what = why = fix = ""  # what happens, why, and what to write instead
    rewrites = ""  # what --fix does; "" where it does nothing
    widens = False  # True: the rewritten expression may be fp32 where the old one was half
    ops = ()
    events = ()

    def __init_subclass__(cls):
        for name in ("what", "why", "fix", "rewrites"):
            setattr(cls, name, " ".join(getattr(cls, name).split()))
