import torch
import torch.nn.functional as F


class PackedLMLoss:
    def __init__(self, pad_id=0, z_weight=0.0):
        self.pad_id = pad_id
        self.z_weight = z_weight

    def token_weights(self, logits, labels):
        return labels.ne(self.pad_id).to(logits.dtype)

    def __call__(self, logits, labels):
        weights = self.token_weights(logits, labels)
        flat = logits.float().flatten(0, 1)
        losses = F.cross_entropy(flat, labels.flatten(), reduction="none")
        if self.z_weight:
            losses = losses + self.z_weight * flat.logsumexp(-1).pow(2)
        n_tokens = weights.sum()
        return (losses * weights.flatten()).sum() / n_tokens


if __name__ == "__main__":
    torch.manual_seed(0)
    logits = torch.randn(18, 4096, 6).half()
    labels = torch.randint(0, 6, (18, 4096))
    labels[labels == 0] = torch.where(torch.rand((labels == 0).sum()) < 0.8, 3, 0)
    lo = PackedLMLoss()(logits, labels)
    hi = PackedLMLoss()(logits.float(), labels)
    print(lo.item(), hi.item(), "BROKEN" if abs(lo - hi) > 0.1 * hi else "fine")
