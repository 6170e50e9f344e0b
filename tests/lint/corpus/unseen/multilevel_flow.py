import torch
import torch.nn as nn


def robust_epe(pred, target, q=0.4, eps=0.01):
    sq = (pred - target).pow(2).sum(dim=1)
    return (sq + eps).pow(q)


class MultiLevelFlowLoss(nn.Module):
    def __init__(self, gamma=0.8, q=0.4, max_flow=400.0):
        super().__init__()
        self.gamma = gamma
        self.q = q
        self.max_flow = max_flow

    def forward(self, flow_preds, flow_gt, valid):
        keep = (valid > 0.5) & (flow_gt.abs().amax(dim=1) < self.max_flow)
        total = flow_gt.new_zeros(())
        for i, flow in enumerate(flow_preds):
            weight = self.gamma ** (len(flow_preds) - i - 1)
            total = total + weight * robust_epe(flow, flow_gt, self.q)[keep].mean()
        return total


if __name__ == "__main__":
    torch.manual_seed(0)
    gt = 10 * torch.randn(1, 2, 12, 16)
    gt[:, 0, :4] = 310.0
    gt = gt.half()
    preds = [(f * gt).half() for f in (0.05, 0.5, 0.9)]
    valid = torch.ones(1, 12, 16)
    lo = MultiLevelFlowLoss()(preds, gt, valid)
    hi = MultiLevelFlowLoss()([p.float() for p in preds], gt.float(), valid)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
