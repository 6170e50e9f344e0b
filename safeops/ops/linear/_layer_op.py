"""The record that ops of a linear layer share."""

from safeops.core.op import Op


class LayerOp(Op):
    """The record of an op whose operands begin with a linear layer's. Its raw ops are Python code for every device: the
    definition would compute all logits at once."""

    owner = None
    differentiable = ("input", "linear_weight", "linear_bias")
    compiled = ("cpu", "cuda")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.raw, self.cpu = (), True

    def prepare(self, *operands):
        return True, operands

    def validate(self, *operands):
        """Nothing to do: the public function has validated the operands, in the caller's shapes."""
