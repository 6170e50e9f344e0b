import math

import torch


class SquashedGaussianLoss:
    def __init__(self, alpha=0.2, log_std_bounds=(-5.0, 2.0)):
        self.alpha = alpha
        self.lo, self.hi = log_std_bounds

    def sample(self, mean, log_std, noise):
        log_std = log_std.clamp(self.lo, self.hi)
        pre_tanh = mean + log_std.exp() * noise
        logp = -0.5 * noise.pow(2) - log_std - 0.5 * math.log(2 * math.pi)
        action = torch.tanh(pre_tanh)
        logp = logp - torch.log(1 - action.pow(2) + 1e-6)
        return action, logp.sum(-1)

    def __call__(self, policy_out, q_fn, noise):
        mean, log_std = policy_out.chunk(2, dim=-1)
        action, logp = self.sample(mean, log_std, noise)
        return (self.alpha * logp - q_fn(action)).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    mean = torch.tensor([[5.0, -1.0], [-5.2, 0.4], [4.9, -5.1]])
    out = torch.cat([mean, torch.full((3, 2), -1.5)], -1).half()
    noise = torch.randn(3, 2).half()
    res = []
    for dt in (torch.float16, torch.float64):
        x = out.detach().to(dt).requires_grad_()
        loss = SquashedGaussianLoss()(x, lambda a: a.sum(-1), noise.to(dt))
        loss.backward()
        res.append((loss.item(), x.grad.norm().item()))
    (l0, g0), (l1, g1) = res
    print(res, "BROKEN" if abs(l0 - l1) > 0.1 * abs(l1) or abs(g0 - g1) > 0.1 * g1 else "fine")
