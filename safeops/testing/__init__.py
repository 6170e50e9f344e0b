"""The contract as a harness: an op and sample calls go in, every clause of the contract is checked.

    from safeops.testing import Sample, check_contract

    check_contract(
        my_loss,                                     # the function users call
        my_loss_definition,                          # plain differentiable torch, called in float64
        [Sample((x, y), {"mask": mask, "reduction": "mean"}), Sample((x, y), {"weight": w})],
        torch_equivalent=torch.nn.functional.mse_loss,
        direct=torch.ops.mine.my_loss,
    )

`CHECKS` is the table of clauses; `run_check(subject, name)` runs one, for parametrised tests. It needs torch alone.
"""

# The order of these imports is the order of the checks: cheap and telling ones first, compilation last.
from . import values  # noqa: I001
from . import masks
from . import layouts
from . import memory
from . import derivatives
from . import execution
from . import compiling
from .execution import no_synchronisation
from .memory import poisoned_memory
from .registry import CHECKS, Check, check, check_contract, run_check
from .sample import NotApplicable, Sample
from .subject import DTYPES, Bad, Outcome, Subject, run

__all__ = [
    "CHECKS",
    "DTYPES",
    "Bad",
    "Check",
    "NotApplicable",
    "Outcome",
    "Sample",
    "Subject",
    "check",
    "check_contract",
    "no_synchronisation",
    "poisoned_memory",
    "run",
    "run_check",
]

for _module in (values, masks, layouts, memory, derivatives, execution, compiling):
    for _name, _value in vars(_module).items():
        if _name.startswith("check_") and callable(_value):
            globals()[_name] = _value
            __all__.append(_name)
