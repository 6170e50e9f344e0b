import torch

DEFAULT_EPS = 1e-10


def sort_by_label(scores, labels):
    order = labels.argsort(dim=-1, descending=True)
    return scores.gather(-1, order)


def list_mle(y_pred, y_true, eps=DEFAULT_EPS):
    ordered = sort_by_label(y_pred, y_true)
    shifted = ordered - ordered.max(dim=-1, keepdim=True).values
    tail = torch.cumsum(shifted.exp().flip(-1), dim=-1).flip(-1)
    nll = torch.log(tail + eps) - shifted
    return nll.sum(dim=-1).mean()


class ListwiseRanker(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.score = torch.nn.Linear(features, 1)

    def loss(self, batch):
        return list_mle(self.score(batch["x"]).squeeze(-1), batch["rel"])


if __name__ == "__main__":
    torch.manual_seed(0)
    rel = torch.randint(0, 5, (4, 12))
    scores = (5.0 * rel - 8 + torch.randn(4, 12)).half()
    lo = list_mle(scores, rel)
    hi = list_mle(scores.float(), rel)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
