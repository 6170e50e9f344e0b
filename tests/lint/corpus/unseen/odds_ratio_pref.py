import torch
import torch.nn.functional as F


def sequence_logps(logits, labels, mask):
    logp = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    return (logp * mask).sum(-1) / mask.sum(-1).clamp(min=1)


class OddsRatioPreference:
    def __init__(self, beta=0.1):
        self.beta = beta

    @staticmethod
    def log_odds(logps):
        return logps - torch.log1p(-torch.exp(logps))

    def __call__(self, chosen_logps, rejected_logps):
        log_ratio = self.log_odds(chosen_logps) - self.log_odds(rejected_logps)
        penalty = -self.beta * F.logsigmoid(log_ratio)
        return (penalty - chosen_logps).mean()


if __name__ == "__main__":
    chosen = torch.tensor([-0.8, -0.00018, -1.3, -0.4]).half()
    rejected = torch.tensor([-1.1, -0.9, -1.2, -2.0]).half()
    grads = []
    for dt in (torch.float16, torch.float32):
        c = chosen.detach().to(dt).requires_grad_()
        r = rejected.detach().to(dt).requires_grad_()
        OddsRatioPreference()(c, r).backward()
        grads.append(torch.cat([c.grad, r.grad]))
    bad = not grads[0].isfinite().all() and grads[1].isfinite().all()
    print(grads[0].tolist(), grads[1].tolist(), "BROKEN" if bad else "fine")
