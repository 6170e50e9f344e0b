import torch
import torch.nn.functional as F


class SoftTargetDistiller:
    def __init__(self, temperature=2.0, alpha=0.5, ignore_index=-100):
        self.t = temperature
        self.alpha = alpha
        self.ignore_index = ignore_index

    def _distribution(self, logits):
        return F.softmax(logits / self.t, dim=-1)

    def soft_loss(self, student_logits, teacher_logits):
        p_s = self._distribution(student_logits)
        p_t = self._distribution(teacher_logits)
        return F.kl_div(p_s.log(), p_t, reduction="batchmean") * self.t**2

    def __call__(self, student_logits, teacher_logits, labels):
        vocab = student_logits.size(-1)
        s = student_logits.reshape(-1, vocab)
        t = teacher_logits.reshape(-1, vocab)
        hard = F.cross_entropy(s, labels.reshape(-1), ignore_index=self.ignore_index)
        return self.alpha * hard + (1 - self.alpha) * self.soft_loss(s, t)


if __name__ == "__main__":
    torch.manual_seed(0)
    s = (8 * torch.randn(2, 6, 50)).half()
    t = (s + torch.randn(2, 6, 50)).half()
    y = t.argmax(-1)
    lo = SoftTargetDistiller()(s, t, y)
    hi = SoftTargetDistiller()(s.float(), t.float(), y)
    print(lo.item(), hi.item(), "BROKEN" if hi.isfinite() and not lo.isfinite() else "fine")
