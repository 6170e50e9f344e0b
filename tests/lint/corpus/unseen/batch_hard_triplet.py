import torch
import torch.nn.functional as F


def pairwise_distances(embeddings, squared=False):
    gram = embeddings @ embeddings.t()
    sq = gram.diagonal()
    dist = (sq.unsqueeze(0) - 2.0 * gram + sq.unsqueeze(1)).clamp(min=0.0)
    if not squared:
        zero = dist.eq(0.0).to(dist.dtype)
        dist = dist + zero * 1e-16
        dist = (1.0 - zero) * torch.sqrt(dist)
    return dist


class BatchHardTriplet(torch.nn.Module):
    def __init__(self, margin=0.3, squared=False):
        super().__init__()
        self.margin = margin
        self.squared = squared

    def forward(self, embeddings, labels):
        dist = pairwise_distances(embeddings, self.squared)
        same = labels[:, None] == labels[None, :]
        hardest_pos = (dist * same.to(dist.dtype)).max(1).values
        far = dist.max(1, keepdim=True).values
        hardest_neg = (dist + far * same.to(dist.dtype)).min(1).values
        return F.relu(hardest_pos - hardest_neg + self.margin).mean()


if __name__ == "__main__":
    torch.manual_seed(0)
    emb = F.normalize(torch.randn(16, 64), dim=1).half()
    lab = torch.arange(16) // 4
    grads = []
    for dt in (torch.float16, torch.float64):
        e = emb.detach().to(dt).requires_grad_()
        BatchHardTriplet()(e, lab).backward()
        grads.append(e.grad)
    bad = grads[0].isnan().any() and grads[1].isfinite().all()
    print(grads[0].norm().item(), grads[1].norm().item(), "BROKEN" if bad else "fine")
