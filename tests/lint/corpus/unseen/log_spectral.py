import torch
import torch.nn.functional as F


class LogMagnitudeLoss(torch.nn.Module):
    def __init__(self, log_weight=1.0, power_floor=1e-8):
        super().__init__()
        self.log_weight = log_weight
        self.power_floor = power_floor

    def magnitude(self, spec):
        power = spec[..., 0] ** 2 + spec[..., 1] ** 2
        return power.clamp(min=self.power_floor).sqrt()

    def forward(self, batch):
        pred = self.magnitude(batch["pred_spec"])
        target = self.magnitude(batch["spec"])
        linear = F.l1_loss(pred, target)
        log = F.l1_loss(torch.log(pred), torch.log(target))
        return linear + self.log_weight * log


if __name__ == "__main__":
    torch.manual_seed(0)
    spec = torch.randn(2, 40, 20, 2).half()
    spec[..., 15:, :] = 0
    pred = (spec + 0.1 * torch.randn(2, 40, 20, 2)).half()
    pred[:, :, 18:] = 0
    batch = {"pred_spec": pred, "spec": spec}
    lo = LogMagnitudeLoss()(batch)
    hi = LogMagnitudeLoss()({k: v.float() for k, v in batch.items()})
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
