"""The base class of the losses of head_loss: options, operands of each row, and how these are cut into chunks."""

import inspect

import torch

from safeops.core.foreign import unexpected

NAME = "head_loss"
VECTORS = "target", "target_values", "target_indices", "support"  # they may have a dim beside those of the rows
OPERANDS = {"input", "logits", "target", "linear_weight", "linear_bias"}


def defaults_of(function):
    """{option: default} of a function's signature, without its operands."""
    parameters = inspect.signature(function).parameters.values()
    return {x.name: None if x.default is x.empty else x.default for x in parameters if x.name not in OPERANDS}


def unknown_option(name, loss, key, value, defaults):
    """The error for an option that a loss does not have."""
    return f"{name}(loss={loss!r}) {unexpected(key, value, tuple(defaults), loss)}"


class Loss:
    """A call of a loss. hidden: (N, D). Row operands have N elements along their first dim.

    by_row: names of the operands that are cut into chunks. differentiable: operands of `rows` that may have gradients.
    """

    of_logits = of_layer = None  # the public functions
    own_defaults = {}  # options beside theirs
    in_chunks = ()  # the options that `rows` and `finish` read; the function of a linear layer may have others
    by_row, differentiable = (), ()
    keep = None  # (N,) bool: True where a row counts; None: everywhere

    def __init_subclass__(cls):
        if cls.of_logits:
            cls.layer_defaults = defaults_of(cls.of_layer)
            cls.defaults = defaults_of(cls.of_logits) | cls.layer_defaults | cls.own_defaults

    def __init__(self, loss, hidden, target, options):
        for key, value in options.items():
            if key not in self.defaults:
                raise TypeError(unknown_option(NAME, loss, key, value, self.defaults))
        self.given, self.hidden, self.target = options, hidden, target
        self.shape = hidden.shape[:-1]  # of the rows
        self.__dict__.update(self.defaults | options)
        self.validate()

    def fits_layer(self):
        """True if the fused function of a linear layer takes the options."""
        return self.given.keys() <= self.layer_defaults.keys()

    def on_layer(self, weight, bias):
        """The fused function of a linear layer."""
        return type(self).of_layer(self.hidden, weight, target=self.target, linear_bias=bias, **self.given)

    def refuse_unread(self, head=None):
        """Refuse options that only the function of a linear layer has."""
        for key in self.given:
            if key in self.in_chunks:
                continue
            others = [x for x in self.given if x not in self.layer_defaults]
            if type(head) is not torch.nn.Linear:
                why = "one that runs in chunks lacks it"
            elif others:
                raise ValueError(f"{NAME}: {key} does not go with {others[0]}")
            else:
                why = (
                    "this one has hooks (as fully_shard makes them) or a weight of another kind. Give a function that "
                    "makes such logits: lambda x: linear(x.float(), head.weight.float())"
                )
            raise ValueError(f"{NAME}: {key} is for a plain nn.Linear as head: {why}")

    def flatten(self):
        """Give the row operands one dim of rows. The call was valid for (..., D)."""
        for key in ("target", *self.by_row):
            x = getattr(self, key)
            if x is not None:
                dims = x.dim() - len(self.shape) if key in VECTORS else 0
                tail = x.shape[x.dim() - dims :]
                x = x.expand((*self.shape, *tail)) if not dims else x
                setattr(self, key, x.reshape(self.shape.numel(), *tail))
        self.hidden = None

    def validate_classes(self, classes):
        """The checks that need the number of classes."""

    def begin(self, logits):
        """Called with the logits of some rows, before anything else is."""
        self.classes = logits.shape[-1]
        self.validate_classes(self.classes)

    def tensors(self):
        """{name: tensor} of the operands of `rows` whose gradients are wanted."""
        operands = {key: getattr(self, key, None) for key in self.differentiable}
        return {key: x for key, x in operands.items() if isinstance(x, torch.Tensor) and x.requires_grad}

    def operand(self, key, part, replaced):
        """An operand for the rows of `part`: from `replaced`, where it has the same form."""
        if key in replaced:
            return replaced[key]
        x = getattr(self, key)
        return x[part] if x is not None and self.is_cut(key) else x

    def is_cut(self, key):
        """True if an operand has an element per row."""
        return key == "target" or key in self.by_row

    def slope(self, results):
        """The derivative of the reduction at each row's loss, which does not depend on the losses: (N,)."""
        zeros = results.new_zeros(self.shape.numel()).requires_grad_()
        (slope,) = torch.autograd.grad(self.finish(zeros), zeros)
        return slope

    def is_linear(self, *weights):
        """True if the gradient of each row's loss is known before the loss is."""
        tensors = [*self.tensors().values(), *weights]
        return self.reduction != "none" and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)
