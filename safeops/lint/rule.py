"""What a rule is. Its texts and examples are data: docs/lint.md is checked against them, and the tests run them."""


class Rule:
    """One code. `ops` are the tensor operations `operation` is called for, `events` the nodes and moments for `visit`.

    `bad` and `good` are scripts: the tests run both and check that the first goes wrong as `outcome` says and that the
    second does not, that the linter finds the code in the first and not in the second.
    """

    code = name = ""
    what = why = fix = ""  # what happens, why, and what to write instead
    outcome = ""  # of the bad example, beside that of the good one
    bad = good = ""
    default = True  # part of a run without --select
    rewrites = ""  # what --fix does; "" where it does nothing
    widens = False  # what it writes returns fp32 for half
    ops = ()
    events = ()

    def __init_subclass__(cls):
        for name in ("what", "why", "fix", "outcome", "rewrites"):
            setattr(cls, name, " ".join(getattr(cls, name).split()))

    def operation(self, op, walk):
        raise NotImplementedError

    def visit(self, event, node, walk):
        raise NotImplementedError
