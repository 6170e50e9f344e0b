"""The kind of a function (a loss, a helper of losses, a metric), by its name, its class and its code."""

import re

import libcst as cst

from safeops_lint.syntax import dotted

LOSS = re.compile(
    r"(^|_)(loss|losses|criterion|divergence|penalty|regulari[sz]er|nll|bce|xent|mse|mae|rmse|elbo|kl|ssim|dice|mmd|crps|(info_?)?nce|entropy)(_|$|\d)"
    r"|loss$|_loss|^loss|(^|_)objective(_fn)?$",
    re.IGNORECASE,
)
LOSS_CLASS = re.compile(
    r"(Loss|Losses|Criterion|Objective|Divergence|Penalty|Regulari[sz]er|Distance|Similarity|Entropy|NCE|MMD)(\d|[A-Z]|$)"
)
# Names of loss functions that no word for a loss marks: `focal`, `log_prob`. Rules about waits for the GPU skip these.
FORMULA = re.compile(
    r"(^|_)(focal|tversky|jaccard|contrast(ive)?|triplets?|hinge|charbonnier|huber|wasserstein|sinkhorn|chamfer|kld"
    r"|hausdorff|likelihood|log_?probs?|cosine|hellinger|pearson|correlation|perceptual|distill\w*|distances?|similarity)(_|$|\d)"
)
NO_FORMULA = re.compile(r"(format|score|accuracy|transform|reduce)$|^_*(compute|calc|evaluate|eval)", re.I)
METRIC = re.compile(r"(^|_|2)(psnr|s?mape|[gdc]?iou|ccc|snr|sdr|perplexity|explained_variance)(_|$)", re.IGNORECASE)
METRIC_CLASS = re.compile(r"(Metric|Dice|Score|IoU|SSIM|PSNR|Accuracy|Error)(\d|[A-Z]|$)")
PREDICTED = re.compile(r"pred|logits?$|^(inputs?|outputs?|probs?|scores?|y_?hat|recon\w*|estimates?)$", re.IGNORECASE)
GIVEN = re.compile(r"(^|_)(targets?|labels?|y_true|gt|ground_truth|truth)$", re.IGNORECASE)
PLUMBING = re.compile(
    r"^_*(check|validate|assert|verify|ensure|init|reset|convert|warn|plot|print|save|load|test|register|update|parse)"
    r"|^__(?!call__)|config|lossless|^extra_repr$",
    re.I,
)
# Verbs of PLUMBING that may also begin the name of a loss: load_balancing_loss, initial_condition_loss.
VERB = re.compile(r"^_*(load|init|test|update|parse|convert|reset|register)", re.I)
NOT_A_LOSS = re.compile(r"^((set|make|build|create)_|(log|get)_(?!(\w+_)?loss$))", re.I)


def kind(function, class_name, clue):
    """Returns (loss, helper, metric), the fields of Clues, from the function alone, without its callers. helper:
    "formula" if only a word in its name, or its result, shows that it is a loss; rules about waits for the GPU skip
    such a function."""
    name = function.name.value
    if class_name is None or clue.backward or plumbing(name, clue):
        return False, False, False
    said = LOSS.search(name) and not NOT_A_LOSS.search(name) or LOSS_CLASS.search(class_name) and clue.returns
    if said or clue.returns_loss:
        return True, False, False
    if METRIC_CLASS.search(class_name) and name != "forward" or METRIC.search(name):
        return True, False, True
    if NOT_A_LOSS.search(name):
        return False, False, False
    if _compares(function):
        return True, True, name != "forward"
    own = name in ("forward", "__call__") if class_name else not NO_FORMULA.search(name)
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name or name).lower()
    formula = own and not clue.computes and bool(FORMULA.search(words) or clue.reduces)
    return formula, formula and "formula", False


def plumbing(name, clue):
    """True if, by its name, a function sets up, checks or shows something, instead of computing a loss."""
    computes = VERB.search(name) and LOSS.search(name) and (clue.reduces or clue.computes)
    return bool(PLUMBING.search(name)) and not computes


def _compares(function):
    """True if the first two parameters are a prediction and a target, by their names."""
    names = [p.name.value for p in function.params.params if p.name.value not in ("self", "cls")]
    return len(names) > 1 and bool(PREDICTED.search(names[0]) and GIVEN.search(names[1]))


def total(node, names):
    """True if an expression is a mean or a sum over all elements, or is computed from one: `1 - x.mean()`. names: the
    variables that hold such a value."""
    if isinstance(node, cst.BinaryOperation):
        sides = [total(n, names) for n in (node.left, node.right)]
        return sides[0] if isinstance(node.operator, cst.Divide) else any(sides)
    if isinstance(node, cst.UnaryOperation):
        return total(node.expression, names)
    if isinstance(node, cst.Name):
        return node.value in names
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return False
    positional = sum(a.keyword is None for a in node.args)
    some = any(a.keyword and a.keyword.value in ("dim", "axis") for a in node.args)
    of_torch = (dotted(node.func.value) or "").startswith("torch")
    return node.func.attr.value in ("mean", "sum", "norm", "std", "trace") and positional == of_torch and not some
