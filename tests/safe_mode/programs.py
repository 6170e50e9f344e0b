"""Makes random torch programs, as source, of 10 to 30 statements such as training scripts have around their losses.

A program is a list of lines. It names tensors of (4, 3) a, b, v2, v3, ..., masks m, m1, ..., and numbers s0, s1, ...
"""

import random

# In each statement {a}, {b} are tensors (4, 3), {m} is a mask, {n} a mask as numbers. New names: {v} for a tensor, {k}
# for a mask, {s} for a number.
VALUES = (
    "{v} = {a}.tanh() + {b}",
    "{v} = {a} * {b}.sigmoid()",
    "{v} = {a} / ({b}.square() + 1.5)",
    "{v} = torch.where({m}, {a}, {b})",
    "{v} = torch.where({m}, {a} / ({b}.square() + 0.5), {b})",
    "{v} = torch.where({m}, 2 / ({b}.abs() + 0.5), {a})",
    "{v} = ({a} / ({b}.abs().mean(1, keepdim=True) + 0.5)).where({m}, 0.0)",
    "{v} = {a}.masked_fill({m}, -2.5)",
    "{v} = {a}.softmax(-1) + torch.softmax({b}, 0)",
    "{v} = F.log_softmax({a}, dim=1).clamp(min=-4) * 0.5",
    "{v} = F.normalize({a} + 3, dim=1)",
    "{v} = F.layer_norm({a}, (3,)) * 0.3",
    "{v} = {a}.detach().clone()",
    "{v} = ({a}.T @ {b}).sum() * 0.01 + {a}.T.contiguous().T",
    "{v} = {a}.view(12).view(4, 3)",
    "{v} = {a}.clone()",
)
PRODUCTS = (
    "{v} = {a} * {m}",
    "{v} = {m} * {a}",
    "{v} = {a} * {n}",
    "{v} = torch.mul({n}, {a})",
    "{v} = {a} * {m}[:, :1]",
)
MASKS = ("{k} = {a}.detach() > 0", "{k} = ~{m}", "{k} = {m}[:, [2, 1, 0]]")
NUMBERS = (
    "{s} = {a}.sum()",
    "{s} = torch.sum({a} * {m})",
    "{s} = ({a} * {n}).mean()",
    "{s} = ({a} * {m}).sum(1).square().mean()",
    "{s} = ({a} * {n}).mean(0, keepdim=True).sum()",
    "{s} = ({a} * {n}).sum() / ({n}.sum() + 1)",
    "{s} = {a}[{m}].sum() + {a}.masked_select({m}).sum()",
    "{s} = {a}.norm() + torch.linalg.vector_norm({b})",
    # Losses get copies (* 1): a twin may save an operand that torch's loss does not, and a write to it would raise.
    "{s} = F.mse_loss({a} * 1, {b} * 1)",
    "{s} = F.smooth_l1_loss({a} * 1, {b}.detach() * 1, reduction='sum') * 0.1",
    "{s} = F.cross_entropy({a} * 1, torch.tensor([0, 2, 1, 0]))",
    "{s} = F.binary_cross_entropy_with_logits({a} * 1, {b}.sigmoid())",
    "{s} = F.kl_div(F.log_softmax({a}, -1), {b}.softmax(-1), reduction='batchmean')",
    "{s} = F.cosine_similarity({a} + 2, {b} - 2).mean()",
    "{s} = {a}.mean() * {b}.std()",
)
WRITES = (
    "{a} += 0.5",
    "{a}.mul_(0.5)",
    "{a}.clamp_(min=-0.5)",
    "{a}[0] = 0.25",
    "{a}[{m}] = 0.75",
    "{a}.masked_fill_({m}, 0.1)",
    "{a}.data.mul_(0.5)",
    "{a}.detach().contiguous().view(torch.uint8).numpy()[1] = 0",
)
HOOKS = (
    "{a}.register_hook(seen) if {a}.requires_grad else None",
    "{a}.retain_grad() if {a}.requires_grad else None",
    "{a}.grad_fn.register_prehook(lambda g: seen(g[0])) if {a}.grad_fn else None",
    "{a}.requires_grad_()",
)
GUARDS = ("torch.no_grad()", "torch.inference_mode()", "torch.enable_grad()", "torch.autocast('cpu', torch.bfloat16)")
PURE = (VALUES,) * 3 + (PRODUCTS,) * 3 + (MASKS,) + (NUMBERS,) * 3
COMPILED = tuple(tuple(x for x in kind if ".norm()" not in x) for kind in PURE)
ALL = PURE * 2 + (WRITES,) * 3 + (HOOKS,) * 2
# Statements with losses or gradients that are NaN or inf in torch and finite in safe mode: h has NaN where m is False,
# z has zeros.
PRELUDE = ("h = torch.where(m, a, torch.nan)", "z = (b.abs() + 0.5) * (a.detach() > 0)", "m0 = torch.zeros_like(m)")
CURES = (
    "{s} = (h * m).sum() + {a}.mean()",
    "{s} = (m.to(a.dtype) * h).mean()",
    "{s} = (h * m.float()).sum(1).square().mean() + (h * m).mean(0).sum()",
    "{s} = torch.where(z != 0, {a} / z, 0.0).sum()",
    "{s} = (2 / z).where(z != 0, {a}).mean()",
    "{s} = torch.where(z[:, :1] == 0, {a}, {b} / z[:, :1]).sum()",
    "{s} = torch.where(z != 0, {a}[:, :1] / z, {b}).mean()",
    "{s} = ({a} + torch.full((4, 3), -torch.inf)).softmax(-1).square().sum()",
    "{s} = {a}[m0].mean() + {b}.masked_select(m0).mean()",
    "{s} = ({a}.half() * 0 + 6e4).sum() * 1e-6",
    "{s} = F.cross_entropy({a} * 1, torch.full((4,), -100))",
)


class Program:
    """Holds a program's lines, and the names that they bind."""

    def __init__(self, seed, kinds=ALL, guards=True, prelude=()):
        self.random = random.Random(seed)
        self.tensors, self.masks, self.numbers, self.lines = ["a", "b"], ["m"], [], list(prelude)
        for _ in range(self.random.randint(10, 30)):
            self._add(self.random.choice(self.random.choice(kinds)))
            if guards and self.random.random() < 0.15:
                self.lines[-1] = f"with {self.random.choice(GUARDS)}: {self.lines[-1]}"
        self._add("{s} = ({a} * {m}).sum()")

    def _add(self, statement):
        recent = self.tensors[-4:] + self.tensors[:2]  # so that most new tensors are used soon
        m = self.random.choice(self.masks)
        cast = self.random.choice(("{}.float()", "{}.to(a.dtype)", "{}.double()", "{}.float()[None][0]"))
        new = {"v": self.tensors, "k": self.masks, "s": self.numbers}
        names = {"v": f"v{len(self.tensors)}", "k": f"m{len(self.masks)}", "s": f"s{len(self.numbers)}"}
        a, b = self.random.choice(recent), self.random.choice(recent)
        self.lines.append(statement.format(a=a, b=b, m=m, n=cast.format(m), **names))
        for key, bound in new.items():
            if statement.startswith(f"{{{key}}} ="):
                bound.append(names[key])

    def __str__(self):
        return "\n".join(self.lines)

    def source(self):
        """Returns the source of `program(a, b, m, seen)`, which returns (the loss, [all tensors that it made])."""
        body = [*self.lines, f"return {' + '.join(f'{s}.float()' for s in self.numbers)}, [{', '.join(self.tensors)}]"]
        return "\n    ".join(["def program(a, b, m, seen):", *body])
