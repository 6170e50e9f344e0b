import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedPolicyLoss(nn.Module):
    def __init__(self, clip=0.2, entropy_coef=0.01):
        super().__init__()
        self.clip = clip
        self.entropy_coef = entropy_coef

    def entropy(self, logp, legal):
        plogp = torch.where(legal, logp.exp() * logp, torch.zeros_like(logp))
        return -plogp.sum(-1)

    def forward(self, logits, legal, actions, old_logp, adv):
        logits = logits.masked_fill(~legal, float("-inf"))
        logp = F.log_softmax(logits, dim=-1)
        taken = logp.gather(-1, actions[:, None]).squeeze(-1)
        ratio = torch.exp(taken - old_logp)
        surrogate = torch.min(ratio * adv, ratio.clamp(1 - self.clip, 1 + self.clip) * adv)
        return -(surrogate + self.entropy_coef * self.entropy(logp, legal)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    logits = torch.randn(5, 6).half()
    legal = torch.ones(5, 6, dtype=torch.bool)
    legal[:, 4:] = False
    act, adv = torch.tensor([0, 1, 2, 3, 0]), torch.randn(5).half()
    old = torch.full((5,), -1.5).half()
    x = logits.clone().requires_grad_()
    loss = MaskedPolicyLoss()(x, legal, act, old, adv)
    loss.backward()
    y = logits.double().requires_grad_()
    ref = MaskedPolicyLoss()(y[:, :4], legal[:, :4], act, old.double(), adv.double())
    ref.backward()
    bad = x.grad.isnan().any() and y.grad.isfinite().all()
    print(loss.item(), ref.item(), "BROKEN" if bad else "fine")
