import torch


class GroupPolicyLoss:
    def __init__(self, clip_low=0.2, clip_high=0.28, kl_coef=0.04):
        self.clip_low, self.clip_high = clip_low, clip_high
        self.kl_coef = kl_coef

    @staticmethod
    def reference_kl(logp, ref_logp):
        delta = ref_logp - logp
        return torch.exp(delta) - delta - 1

    def __call__(self, logp, old_logp, ref_logp, advantages, mask):
        ratio = torch.exp(logp - old_logp)
        adv = advantages[:, None]
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        policy = -torch.min(ratio * adv, clipped * adv)
        kl = self.reference_kl(logp, ref_logp)
        m = mask.to(logp.dtype)
        mean = lambda v: ((v * m).sum(1) / m.sum(1).clamp(min=1)).mean()  # noqa: E731
        return {"policy": mean(policy), "kl": self.kl_coef * mean(kl)}


if __name__ == "__main__":
    torch.manual_seed(0)
    logp = -torch.rand(4, 32).half()
    old = (logp + 0.01 * torch.randn(4, 32)).half()
    ref = (logp + 0.015 * torch.randn(4, 32)).half()
    adv, mask = torch.randn(4).half(), torch.ones(4, 32)
    args = (logp, old, ref, adv)
    lo = GroupPolicyLoss()(*args, mask)["kl"]
    hi = GroupPolicyLoss()(*(a.double() for a in args), mask)["kl"]
    print(lo.item(), hi.item(), "BROKEN" if abs(lo - hi) > 0.1 * hi else "fine")
