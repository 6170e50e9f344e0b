"""What every caller in the file gives to a function is known in it: a default run leaves out what they keep away."""

import pytest

from safeops.lint.check import lint_source
from tests.lint.programs import DEFAULT, HEADER

HELPER = """
def {name}(x, eps=1e-8):
    return torch.log(x.amax(1, keepdim=True) + eps)


class SomeLoss(nn.Module):
    def forward(self, x, y):
        {caller}
"""
WIDE = [
    "x = x.float()\n        return {name}(x).mean()",
    "return {name}(x.double().view(-1)).mean()",
    "return {name}(eps=1e-8, x=x.float()).mean()",
    "with torch.autocast('cuda', enabled=False):\n            return {name}(x).mean()",
]
UNKNOWN = [
    "return {name}(x).mean()",
    "y = {name}(y)\n        return {name}(x.float()).mean() + y",
    "return {name}(x.float()).mean() + sum(map({name}, y))",  # called by another
    "return {name}(*[x.float()]).mean()",
    "return {name}(x.float()).mean() + super().{name}(y)",
]


def told(source, **options):
    return [f.code for f in lint_source(HEADER + source, **options)]


@pytest.mark.parametrize("name", ["_share", "share"])
@pytest.mark.parametrize("caller", WIDE)
def test_a_function_is_as_wide_as_what_all_its_callers_give_it(caller, name):
    source = HELPER.format(name=name, caller=caller.format(name=name))
    assert told(source) == []
    asked = lint_source(HEADER + source, rules=DEFAULT)
    assert [(f.code, f.likely) for f in asked] == [("SO206", False)]


@pytest.mark.parametrize("cast, likely", [("double", False), ("float", True)])
def test_autocast_computes_no_products_of_fp64_in_half(cast, likely):
    product = HELPER.replace("x.amax(1, keepdim=True)", "(x @ x - 1)").format(
        name="share", caller=f"return share(x.{cast}()).mean()"
    )
    assert [(f.code, f.likely) for f in lint_source(HEADER + product, rules=DEFAULT)] == [("SO206", likely)]


@pytest.mark.parametrize("caller", UNKNOWN)
def test_a_caller_of_which_nothing_is_known_leaves_it_open(caller):
    assert told(HELPER.format(name="share", caller=caller.format(name="share"))) == ["SO206"]


SHARES = """
{decorator}
def share(a, p, c=1):
    return torch.log(p + 1e-8) if c else share(a, p, c)


def some_loss(x, y):
    return share({call}).mean()
"""


@pytest.mark.parametrize(
    "decorator, call, found",
    [
        ("", "y, x.float()", []),  # though it calls itself
        ("@weighted", "y, x.float()", ["SO206"]),
        ("", "*y, x.float()", ["SO206"]),  # which may be c
    ],
)
def test_what_may_change_or_move_the_arguments(decorator, call, found):
    assert told(SHARES.format(decorator=decorator, call=call)) == found


def test_a_static_method_has_no_self():
    source = """
class ShareLoss(nn.Module):
    @staticmethod
    def share(x, y):
        return torch.log(x + 1e-8) * y

    def forward(self, x, y):
        return self.share(x{}, y).mean()
"""
    assert told(source.format(".float()")) == [] and told(source.format("")) == ["SO206"]


def test_a_count_by_every_caller():
    source = """
def share(x: torch.Tensor):
    return 1 / (x + 1e-6)


def some_loss(x, y):
    return (share(y{}) * x).mean()
"""
    assert told(source.format(".argmax(1)")) == [] and told(source.format("")) == ["SO206"]


def test_a_demonstration_is_no_caller():
    half = HELPER.format(name="share", caller="return share(x).mean()")
    for demo in ("def test_share():\n    share(torch.rand(3).float())", "if __name__ == '__main__':\n    share(0)"):
        assert told(half + "\n\n" + demo + "\n") == ["SO206"]
    wide = HELPER.format(name="share", caller="return share(x.float()).mean()")
    assert told(wide + "\n\nif __name__ == '__main__':\n    print(share(torch.rand(3).half()))\n") == []
    assert told(wide + "\n\ndef test_share(x):\n    assert share(x).sum() > 0\n") == []
    assert told(wide + "\n\ndef main(x):\n    return share(x).mean()\n") == ["SO206"]  # where a training may begin
    assert told(wide + "\n\nCALLED = {'share': share}\n") == ["SO206"]


CHAIN = """
def third(x):
    return torch.log(x + 1e-8)


def second(x):
    return third(x)


def first(x):
    return second(x)


def some_loss(x, y):
    return first(x{0}).mean()
"""


def test_what_the_callers_of_callers_give_it():
    assert told(CHAIN.format("")) == ["SO206"]
    assert told(CHAIN.format(".float()")) == []


MODULES = """
class RatioLoss(nn.Module):
    def __init__(self):
        super(RatioLoss, self).__init__()

    def forward(self, x, y):
        return torch.norm(x - y) / torch.norm(y)


def magnitude(x):
    return torch.sqrt(torch.clamp(x**2, min=1e-7))


class SpectralLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.ratio = {make}

    def forward(self, x, y):
        return {call}
"""


@pytest.mark.parametrize(
    "make, call, found",
    [
        ("RatioLoss()", "self.ratio(magnitude(x), magnitude(y))", []),
        ("None", "RatioLoss()(magnitude(x), magnitude(y))", []),
        ("RatioLoss()", "self.ratio(magnitude(x), y)", ["SO202"]),
        ("RatioLoss()\n        self.other = RatioLoss()", "self.ratio(magnitude(x), magnitude(y))", ["SO202"]),
        ("nn.ModuleList([RatioLoss()])", "self.ratio[0](magnitude(x), magnitude(y))", ["SO202"]),
    ],
)
def test_a_module_is_given_what_the_calls_of_its_objects_are(make, call, found):
    assert told(MODULES.format(make=make, call=call)) == found


def test_a_mask_made_on_the_cpu_and_a_target_without_a_gradient():
    source = """
def selected(x, mask, y):
    return x[mask] / torch.sqrt((y - y.mean()).abs())


def some_loss(x, y):
    mask = torch.eye(len(x), dtype=torch.bool){0}
    return selected(x, mask, y{1}).mean()
"""
    assert told(source.format("", ".detach()")) == []
    assert told(source.format(".cuda()", "")) == ["SO101", "SO204"]


def test_code_that_torch_autograd_function_alone_calls_has_no_graph():
    source = """
def root(x, y):
    return torch.sqrt((x - y).abs())


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        loss = root(x, y)
        return loss


def root_loss(x, y):
    return {0}(x, y).mean()
"""
    assert told(source.format("Root.apply")) == [] and told(source.format("root")) == ["SO204"]


def test_autocast_makes_half_of_what_goes_into_a_product_of_matrices():
    source = """
def some_loss(x, w, y):
    p = {0}
    return torch.log(p.amax(1) + 1e-8).mean()
"""
    assert told(source.format("x.float() @ w.float()")) == ["SO206"]
    assert told(source.format("F.conv2d(x.float(), w.float())")) == ["SO206"]
    assert told(source.format("(x.float() @ w.float()).float()")) == told(source.format("x.float() * w")) == []
    off = "    with torch.autocast('cuda', enabled=False):\n        s = x.float() @ w.float()\n"
    assert told("\ndef some_loss(x, w, y):\n" + off + "    return torch.log(s + 1e-8).mean()\n") == []
