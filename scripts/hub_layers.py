"""Layers for `kernels.kernelize`, which replaces the forward of a torch.nn module by the forward of the layer with its
name. There `self` is the torch.nn module.

scripts/hub.py copies this file into the package for the Hugging Face Hub, beside nn.py.
"""

import torch

from . import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)


class BCEWithLogitsLoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return binary_cross_entropy_with_logits(
            input, target, self.weight, reduction=self.reduction, pos_weight=self.pos_weight
        )


class CrossEntropyLoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        return cross_entropy(input, target, self.weight, reduction=self.reduction, **options)


class HuberLoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return huber_loss(input, target, reduction=self.reduction, delta=self.delta)


class KLDivLoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return kl_div(input, target, reduction=self.reduction, log_target=self.log_target)


class L1Loss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return l1_loss(input, target, reduction=self.reduction)


class MSELoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return mse_loss(input, target, reduction=self.reduction)


class NLLLoss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return nll_loss(input, target, self.weight, reduction=self.reduction, ignore_index=self.ignore_index)


class SmoothL1Loss(torch.nn.Module):
    can_torch_compile = True

    def forward(self, input, target):
        return smooth_l1_loss(input, target, reduction=self.reduction, beta=self.beta)
