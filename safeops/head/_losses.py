"""The table of the losses that head_loss knows."""

from safeops.head._classes import CrossEntropy, LogProbs
from safeops.head._divergences import Divergence
from safeops.ops.divergences.js_div_with_logits import _js_div_with_logits, js_div_with_logits
from safeops.ops.divergences.kl_div_with_logits import _kl_div_with_logits, kl_div_with_logits
from safeops.ops.divergences.reverse_kl_div_with_logits import reverse_kl_div_with_logits
from safeops.ops.divergences.tv_with_logits import _tv_with_logits, tv_with_logits
from safeops.ops.linear.linear_js_div import linear_js_div
from safeops.ops.linear.linear_kl_div import linear_kl_div
from safeops.ops.linear.linear_reverse_kl_div import linear_reverse_kl_div
from safeops.ops.linear.linear_tv import linear_tv


def _divergence(name, of_logits, of_layer, op, swap=False):
    members = {"of_logits": staticmethod(of_logits), "of_layer": staticmethod(of_layer), "op": op, "swap": swap}
    return type(name, (Divergence,), members)


LOSSES = {
    "cross_entropy": CrossEntropy,
    "token_log_probs": LogProbs,
    "kl_div": _divergence("KLDiv", kl_div_with_logits, linear_kl_div, _kl_div_with_logits),
    "reverse_kl_div": _divergence(
        "ReverseKLDiv", reverse_kl_div_with_logits, linear_reverse_kl_div, _kl_div_with_logits, swap=True
    ),
    "js_div": _divergence("JSDiv", js_div_with_logits, linear_js_div, _js_div_with_logits),
    "tv": _divergence("TV", tv_with_logits, linear_tv, _tv_with_logits),
}
