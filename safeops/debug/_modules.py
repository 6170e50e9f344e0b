"""Which module is running: a stack kept by torch's global forward hooks."""

import threading

from torch.nn.modules import module as hooks


class ModuleStack:
    """`with ModuleStack(model) as modules:` then modules.path() names the innermost module whose forward runs."""

    def __init__(self, model=None):
        self.names = {}  # id(module) -> "decoder.layers.3 (Linear)"
        if model is not None:
            root = type(model).__name__
            for name, module in model.named_modules():
                self.names[id(module)] = f"{name} ({type(module).__name__})" if name else root
        self.local = threading.local()

    def __enter__(self):
        self.handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            # also where forward raised: the next module would seem to lie inside the one that failed
            hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def path(self):
        stack = getattr(self.local, "stack", None)
        return self._name(stack) if stack else ""

    def _name(self, stack):
        known = self.names.get(id(stack[-1]))
        if known:
            return known
        return ".".join(type(module).__name__ for module in stack)

    def _enter(self, module, args):
        if not hasattr(self.local, "stack"):
            self.local.stack = []
        self.local.stack.append(module)

    def _leave(self, module, args, output):
        stack = getattr(self.local, "stack", [])
        if module in stack:
            while stack.pop() is not module:
                pass
