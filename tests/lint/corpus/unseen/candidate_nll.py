import torch
import torch.nn as nn
import torch.nn.functional as F


class CandidateRerankLoss(nn.Module):
    def __init__(self, scale=1.0, pad_penalty=-1e9):
        super().__init__()
        self.scale = scale
        self.pad_penalty = pad_penalty

    def log_probs(self, scores, cand_mask):
        bias = (1.0 - cand_mask.to(scores.dtype)) * self.pad_penalty
        return F.log_softmax(self.scale * scores + bias, dim=-1)

    def forward(self, scores, batch):
        logp = self.log_probs(scores, batch["cand_mask"])
        nll = -logp.gather(-1, batch["gold"].unsqueeze(-1)).squeeze(-1)
        has_cand = batch["cand_mask"].any(-1).to(nll.dtype)
        return (nll * has_cand).sum() / has_cand.sum().clamp(min=1)


if __name__ == "__main__":
    torch.manual_seed(0)
    scores = torch.randn(5, 8).half()
    mask = torch.arange(8)[None] < torch.tensor([8, 5, 0, 3, 6])[:, None]
    batch = {"cand_mask": mask, "gold": torch.tensor([1, 0, 0, 2, 4])}
    lo = CandidateRerankLoss()(scores, batch)
    hi = CandidateRerankLoss()(scores.float(), batch)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
