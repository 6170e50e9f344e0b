"""Kinds of functions, by name, its class and its form: a loss, a metric, a formula of one."""

import re

import libcst as cst

from safeops_lint.syntax import dotted, number

LOSS = re.compile(
    r"(^|_)(loss|losses|criterion|divergence|penalty|regulari[sz]er|nll|bce|xent|mse|mae|rmse|elbo|kl|ssim|dice|mmd|crps|(info_?)?nce|entropy)(_|$|\d)"
    r"|loss$|_loss|^loss|(^|_)objective(_fn)?$",
    re.IGNORECASE,
)
LOSS_CLASS = re.compile(
    r"(Loss|Losses|Criterion|Objective|Divergence|Penalty|Regulari[sz]er|Distance|Similarity|Entropy|NCE|MMD)(\d|[A-Z]|$)"
)
# Names of loss formulas that do not say that they are one; their waits are not looked at.
FORMULA = re.compile(
    r"(^|_)(focal|tversky|jaccard|contrast(ive)?|triplets?|hinge|charbonnier|huber|wasserstein|sinkhorn|chamfer|kld"
    r"|hausdorff|likelihood|log_?probs?|cosine|poincare|geodesic|bhattacharyya|hellinger|pearson|correlation|perceptual|hsic|cka"
    r"|smoothness|variation|barlow|vicreg|distill\w*|uniformity|discrepancy|gram|distances?|similarity|angle)(_|$|\d)"
)
NO_FORMULA = re.compile(
    r"(update|compute|format|score|accuracy|transform|reduce)$|^_*(compute|calc|evaluate|eval)", re.I
)
METRIC = re.compile(r"(^|_|2)(psnr|s?mape|[gdc]?iou|ccc|snr|sdr|perplexity|explained_variance)(_|$)", re.IGNORECASE)
PREDICTED = re.compile(r"pred|logits?$|^(inputs?|outputs?|probs?|scores?|y_?hat|recon\w*|estimates?)$", re.IGNORECASE)
GIVEN = re.compile(r"(^|_)(targets?|labels?|y_true|gt|ground_truth|truth)$", re.IGNORECASE)
METRIC_CLASS = re.compile(r"(Metric|Dice|Score|IoU|SSIM|PSNR|Accuracy|Error)(\d|[A-Z]|$)")
NOT_A_LOSS = re.compile(
    r"^(plot|log(?!_(\w+_)?loss$)|print|get(?!_(\w+_)?loss$)|set|make|build|create|test|save|load|register|update|parse)_"
    r"|lossless",
    re.I,
)
NO_PART_OF_A_LOSS = re.compile(
    r"^_*(check|validate|assert|verify|ensure|init|reset|convert|warn|plot|print|save|load|test|register|update|parse)|^__",
    re.I,
)


def kind(name, class_name, clue):
    """(is it a loss, by its class's name as a metric alone)"""
    plumbing = name.startswith("__") and name != "__call__" or name == "extra_repr" or "config" in name
    plumbing = plumbing or re.match(r"_*(reset|convert|warn)(_|$)", name) is not None
    if plumbing or clue.backward or class_name is None:
        return False, False
    in_class = bool(class_name and LOSS_CLASS.search(class_name)) and clue.returns and not name.startswith("test_")
    own_name = LOSS.search(name) is not None and not NOT_A_LOSS.search(name)
    metric = bool(class_name and METRIC_CLASS.search(class_name) or METRIC.search(name))
    metric = metric and not NO_PART_OF_A_LOSS.search(name) and name != "forward"
    loss = own_name or in_class or clue.returns_loss
    return loss or metric, metric and not loss


def compares(function, class_name):
    """True if it is given a prediction and a target first, as a loss or a metric is."""
    names = [p.name.value for p in function.params.params if p.name.value not in ("self", "cls")]
    plumbing = NO_PART_OF_A_LOSS.search(function.name.value) or NOT_A_LOSS.search(function.name.value)
    given = len(names) > 1 and PREDICTED.search(names[0]) and GIVEN.search(names[1])
    return bool(given) and class_name is not None and not plumbing


def formula(function, class_name, clue, measures):
    """True if it is a formula of a loss by its name, or returns the mean or the sum of everything. measures: it is in a
    file about metrics."""
    name = function.name.value
    if class_name is None or class_name and name not in ("forward", "__call__"):
        return False
    if not class_name and any(kind.search(name) for kind in (NO_PART_OF_A_LOSS, NOT_A_LOSS, NO_FORMULA)):
        return False
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", class_name or name).lower()
    named = FORMULA.search(words) is not None
    if (named or clue.reduces) and measures and not class_name:
        clue.metric = True  # the values alone
    return (named or clue.reduces) and not clue.numpy


def total(node, names, tensors):
    """True if an expression is a mean or a sum of everything, or made of these: `1 - 2 * tp / x.sum()`."""
    if isinstance(node, cst.BinaryOperation):
        sides = [total(n, names, tensors) for n in (node.left, node.right)]
        if isinstance(node.operator, cst.Divide):
            return sides[0]
        return all(sides) or any(sides) and any(_plain(n, tensors) for n in (node.left, node.right))
    if isinstance(node, cst.UnaryOperation):
        return total(node.expression, names, tensors)
    if isinstance(node, cst.Name):
        return node.value in names
    if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
        return isinstance(node, cst.Call) and dotted(node.func) == "sum"
    if node.func.attr.value in ("div", "mul", "neg", "sqrt", "log", "add", "sub"):
        return total(node.func.value, names, tensors)
    positional = sum(a.keyword is None for a in node.args)
    some = any(a.keyword and a.keyword.value in ("dim", "axis") for a in node.args)  # not of all
    of_torch = (dotted(node.func.value) or "").startswith("torch")
    return node.func.attr.value in ("mean", "sum", "norm", "std", "trace") and positional == of_torch and not some


def _plain(node, tensors):
    """A number, or a name that is used as no tensor is."""
    return number(node) is not None or isinstance(node, (cst.Name, cst.Attribute)) and dotted(node) not in tensors
