import torch
import torch.nn as nn
import torch.nn.functional as F


class InBatchSoftmax(nn.Module):
    def __init__(self, item_counts, temperature=0.05, correct_bias=True):
        super().__init__()
        self.register_buffer("counts", item_counts)
        self.total = float(item_counts.sum())
        self.temperature = temperature
        self.correct_bias = correct_bias

    def log_q(self, item_ids, dtype):
        freq = self.counts[item_ids].to(dtype) / self.total
        return torch.log(freq)

    def forward(self, user_emb, item_emb, item_ids):
        logits = user_emb @ item_emb.t() / self.temperature
        if self.correct_bias:
            logits = logits - self.log_q(item_ids, logits.dtype)[None, :]
        labels = torch.arange(logits.size(0), device=logits.device)
        return F.cross_entropy(logits, labels)


if __name__ == "__main__":
    torch.manual_seed(0)
    counts = (60000 / torch.arange(1, 30001).float() ** 1.1).long().clamp(min=1)
    crit = InBatchSoftmax(torch.cat([counts, torch.full((1000,), 40000)]))
    ids = torch.tensor([0, 12, 77, 3500, 25000, 30200])
    u = F.normalize(torch.randn(6, 16), dim=1)
    v = F.normalize(u + 0.3 * torch.randn(6, 16), dim=1)
    hi = crit(u, v, ids)
    with torch.autocast("cpu", torch.float16):
        lo = crit(u, v, ids)
    bad = hi.isfinite() and (not lo.isfinite() or abs(lo - hi) > 0.1 * hi)
    print(lo.item(), hi.item(), "BROKEN" if bad else "fine")
