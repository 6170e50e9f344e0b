"""Why a step was not finite whose eager replay is: it runs again in other ways, and the difference is the answer."""

import contextlib
import dataclasses

import torch

from safeops.core import private_torch

BACKENDS = ("eager", "aot_eager", "inductor")
WHAT = {
    "eager": "Dynamo's trace of the code",
    "aot_eager": "the ops that AOTAutograd makes of it",
    "inductor": "the code that Inductor generates",
}
UNREPEATED = (
    "batch, weights and random numbers do not repeat the fault (a batch that the block draws itself, a variable that "
    "it changes, memory that something else wrote, a race, another rank, hardware)"
)
MOST_RUNS = 24  # of the step, while the submodule is looked for


@dataclasses.dataclass
class Suspects:
    why: str
    notes: list[str]


def eagerly():
    """A context in which compiled functions run as they are written, and what was compiled stays."""
    return torch.compiler.set_stance("force_eager") if private_torch.dynamo_is_loaded() else contextlib.nullcontext()


def compiled(backend=None):
    """A context in which they run compiled; backend: instead of their own."""
    return torch.compiler.set_stance("default", force_backend=backend)


def suspects(is_finite, model):
    """is_finite(): runs the step once more. Returns the ways that gave NaN or inf, in words."""
    notes = ["the eager replay of the step is finite"]
    if not private_torch.dynamo_is_loaded():  # nothing was compiled: there is one way to run
        if is_finite():
            notes.append(f"so is another replay; {_deterministic(is_finite)}")
        return Suspects(f"the replay of the step is finite: {UNREPEATED}", notes)
    with compiled():
        if is_finite():
            notes.append(f"so is the step as it ran, once more; {_deterministic(is_finite)}")
            return Suspects(f"the replay of the step is finite, eager and as it ran: {UNREPEATED}", notes)
    guilty = None
    for backend in BACKENDS:
        with compiled(backend):
            finite = is_finite()
        notes.append(f'with torch.compile(backend="{backend}") it is {"finite" if finite else "not finite"}')
        if not finite:
            guilty = backend
            break
    if guilty is None:
        why = "the eager replay is finite, the compiled step is not: its backend or options make the difference"
        return Suspects(why, notes)
    name = _submodule(is_finite, model, guilty)
    if name:
        notes.append(f"with {name} compiled alone it is not finite")
    why = f'the eager replay is finite; compiled with backend="{guilty}" it is not: {WHAT[guilty]} makes the difference'
    return Suspects(why + (f", in {name}" if name else ""), notes)


def _deterministic(is_finite):
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(not before[0], warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # with NaN, which would look like a fault
    try:
        finite = is_finite()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    word = "off" if before[0] else "on"
    return f"with deterministic algorithms {word} it is {'finite' if finite else 'not finite'}"


def _submodule(is_finite, model, backend):
    """The name of the innermost submodule that, compiled alone, makes the step not finite; or None."""
    runs = 0

    def guilty(names):
        nonlocal runs
        runs += 1
        with eagerly(), _compiled_alone([modules[name] for name in names], backend):
            return runs <= MOST_RUNS and not is_finite()

    while isinstance(getattr(model, "module", getattr(model, "_orig_mod", None)), torch.nn.Module):
        model = getattr(model, "module", None) or model._orig_mod  # DistributedDataParallel's, torch.compile's
    modules = dict(model.named_modules())
    found, inside = None, ""
    while inner := [*_children(model if not inside else modules[inside], inside)]:
        while len(inner) > 1:
            half = len(inner) // 2
            inner = next((part for part in (inner[:half], inner[half:]) if guilty(part)), [])
        if not inner or not guilty(inner):
            break
        found = inside = inner[0]
    return found and f"{found} ({type(modules[found]).__name__})"


def _children(module, path):
    """Yield the paths of a module's submodules. A container without a forward of its own stands for its content."""
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            yield from _children(child, inner)
        else:
            yield inner


@contextlib.contextmanager
def _compiled_alone(modules, backend):
    """Let the modules' forward run compiled while all else runs eagerly."""

    def patched(module):
        function = torch.compile(module.forward, backend=backend)

        def forward(*args, **kwargs):
            with compiled():
                return function(*args, **kwargs)

        return forward

    before = [(module, vars(module).get("forward")) for module in modules]
    try:
        for module in modules:
            module.forward = patched(module)
        yield
    finally:
        for module, forward in before:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
