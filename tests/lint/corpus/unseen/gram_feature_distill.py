import torch
import torch.nn as nn
import torch.nn.functional as F


def gram_matrix(feat):
    b, c, h, w = feat.shape
    flat = feat.view(b, c, h * w)
    return torch.bmm(flat, flat.transpose(1, 2)) / (c * h * w)


class StyleLoss(nn.Module):
    def __init__(self, layer_weights=(1.0, 0.5)):
        super().__init__()
        self.layer_weights = layer_weights

    def forward(self, student_feats, teacher_feats):
        total = 0.0
        for w, fs, ft in zip(self.layer_weights, student_feats, teacher_feats):
            total = total + w * F.mse_loss(gram_matrix(fs), gram_matrix(ft.detach()))
        return total


if __name__ == "__main__":
    torch.manual_seed(0)
    fs = [torch.relu(8 * torch.randn(1, 8, 64, 64)), torch.relu(torch.randn(1, 16, 32, 32))]
    ft = [torch.relu(9 * torch.randn(1, 8, 64, 64)), torch.relu(torch.randn(1, 16, 32, 32))]
    hi = StyleLoss()(fs, ft)
    with torch.autocast("cpu", torch.float16):
        lo = StyleLoss()(fs, ft)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
