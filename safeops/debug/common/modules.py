"""Name the module whose forward is running, from a stack kept by torch's global forward hooks."""

import threading
import weakref

from torch.nn.modules import module as hooks


class ModuleStack:
    """`with ModuleStack(model) as modules:` then modules.path() names the innermost module whose forward is running:
    "decoder.layers.3 (Linear)". Without `model`, the outermost running module's class comes first:
    "Net.decoder.layers.3 (Linear)"."""

    def __init__(self, model=None):
        self.names = {}  # id(module) -> (weak reference to it, its name)
        self.leaves, self.ran = {}, set()  # names of modules without submodules, in order; names of modules that ran
        self.optimizers = set()  # names of optimizers that ran
        self.local = threading.local()
        if model is not None:
            self._learn(model, "")

    def __enter__(self):
        self.handles = [
            hooks.register_module_forward_pre_hook(self.enter),
            # also after a forward that raised: else the next module would seem to run inside the failed one
            hooks.register_module_forward_hook(self.leave, always_call=True),
        ]
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def path(self):
        stack = getattr(self.local, "stack", None)
        return stack[-1][1] if stack else ""

    def enter(self, module, *args):
        """Push a module or an optimizer: the ops that run until it is left are named by it."""
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        name = self._name(module)
        self.local.stack.append((module, name))
        self.ran.add(name)

    def leave(self, module, *args):
        stack = getattr(self.local, "stack", [])
        for depth in reversed(range(len(stack))):
            if stack[depth][0] is module:
                del stack[depth:]
                return

    def never_ran(self):
        """Names of the modules without submodules whose forward was not called."""
        return [name for name in self.leaves if name not in self.ran]

    def _name(self, module):
        if not isinstance(module, hooks.Module):
            self.optimizers.add(type(module).__name__)
            return type(module).__name__
        if (name := self._known(module)) is None:
            outer = next((m for m, _ in self.local.stack if isinstance(m, hooks.Module)), None)
            if outer is not None:  # this module was created while a forward runs
                return f"{self.local.stack[-1][1]}.{type(module).__name__}"
            self._learn(module, f"{type(module).__name__}.")
            name = self._known(module)
        return name

    def _known(self, module):
        # Keyed by id, as a module need not be hashable. The weak reference shows if the id is another module's now.
        weak, name = self.names.get(id(module), (None, None))
        return name if weak is not None and weak() is module else None

    def _learn(self, root, prefix):
        for path, module in root.named_modules():
            if self._known(module) is None:  # else it ran by itself before, and keeps that name
                kind = type(module).__name__
                name = f"{prefix}{path} ({kind})" if path else kind
                self.names[id(module)] = (weakref.ref(module), name)
                if next(module.children(), None) is None:
                    self.leaves[name] = None
