"""All rules. The families: SO1xx masks and indices; SO2xx arithmetic and gradients; SO3xx waits for the GPU; SO4xx
mixed precision and training."""

import importlib

# Rules run in this order: a later rule may drop or replace the report of an earlier one.
NAMES = """masks products squares eps fills divisions domains norms gradients overlap exponentials variances
    synchronisation amp steps""".split()
FILES = [importlib.import_module(f"safeops_lint.rules.{name}") for name in NAMES]
RULES = {rule.code: rule for family in FILES for rule in (cls() for cls in family.RULES)}
RULES = dict(sorted(RULES.items()))
FAMILIES = {
    "SO1": "Masks and indexing",
    "SO2": "Arithmetic and gradients",
    "SO3": "Synchronisation in a loss",
    "SO4": "Mixed precision and training",
}


def chosen(select=(), ignore=()):
    """Returns the rules that `select` has and `ignore` has not. Both hold prefixes of codes, or `ALL`. An empty
    `select` means `ALL`."""
    return [r for r in RULES.values() if matches(r.code, select or ("ALL",)) and not matches(r.code, ignore)]


def matches(code, prefixes):
    return any(p == "ALL" or code.startswith(p) for p in prefixes)


def unknown(prefixes):
    """Returns the prefixes that match no rule's code."""
    return [p for p in prefixes if p != "ALL" and not any(p[:2] == "SO" and code.startswith(p) for code in RULES)]
