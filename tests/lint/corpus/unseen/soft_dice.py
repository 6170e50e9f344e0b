import torch
import torch.nn as nn


class SoftDiceLoss(nn.Module):
    def __init__(self, smooth=1.0, batch_dice=False, from_logits=True):
        super().__init__()
        self.smooth = smooth
        self.batch_dice = batch_dice
        self.from_logits = from_logits

    def aggregate(self, x):
        dims = (0, 2) if self.batch_dice else (2,)
        return x.sum(dim=dims)

    def forward(self, y_pred, y_true):
        if self.from_logits:
            y_pred = y_pred.sigmoid()
        bs, c = y_true.shape[:2]
        y_pred = y_pred.reshape(bs, c, -1)
        y_true = y_true.reshape(bs, c, -1)
        intersection = self.aggregate(y_pred * y_true)
        cardinality = self.aggregate(y_pred + y_true)
        score = (2.0 * intersection + self.smooth) / (cardinality + self.smooth)
        return (1.0 - score).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    mask = (torch.rand(1, 1, 512, 512) > 0.35).half()
    logits = (4 * mask - 2 + 0.5 * torch.randn_like(mask)).half()
    crit = SoftDiceLoss()
    lo = crit(logits, mask)
    hi = crit(logits.float(), mask.float())
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
