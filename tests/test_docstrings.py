"""Every public name has an example in its docstring, and the example runs."""

import doctest
import inspect

import pytest
import torch

import safeops
from safeops.integrations import transformers

PUBLIC = [getattr(safeops, name) for name in safeops.__all__ if not inspect.ismodule(getattr(safeops, name))]
PUBLIC += [x for x in vars(safeops.nn).values() if inspect.isclass(x) and not x.__name__.startswith("_")]
PUBLIC += [transformers.ForCausalLMLoss, transformers.compute_loss_func]
PUBLIC += [getattr(safeops.debug, name) for name in ("trace", "locate_errors", "audit", "no_sync", "compare", "sketch")]


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda x: x.__qualname__)
def test_example_runs(thing):
    examples = doctest.DocTestFinder(recurse=False).find(thing, globs={"torch": torch, "safeops": safeops})
    assert examples and examples[0].examples, f"{thing.__qualname__} has no example"
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for example in examples:
        runner.run(example)
    assert runner.failures == 0


@pytest.mark.parametrize("thing", [x for x in PUBLIC if inspect.isfunction(x)], ids=lambda x: x.__qualname__)
def test_docstring_names_every_argument(thing):
    doc = inspect.getdoc(thing)
    for section in ("Args:", "Returns:", "Raises:", "Example:"):
        assert section in doc
    names = list(inspect.signature(thing).parameters)
    for name in names:
        assert f"\n    {name}: " in doc, f"{thing.__name__}: {name} is not documented"
    assert names == sorted(names, key=lambda name: doc.index(f"\n    {name}: ")), "not in the order of the signature"
