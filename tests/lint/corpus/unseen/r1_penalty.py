import torch
import torch.nn as nn
import torch.nn.functional as F


class DiscriminatorLoss:
    def __init__(self, discriminator, r1_gamma=10.0):
        self.d = discriminator
        self.r1_gamma = r1_gamma

    def r1_penalty(self, logits, images):
        (grads,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
        penalty = grads.square().sum(dim=(1, 2, 3))
        return 0.5 * self.r1_gamma * penalty.mean()

    def __call__(self, real, fake, regularize=False):
        real = real.detach().requires_grad_(regularize)
        real_logits = self.d(real)
        loss = F.softplus(-real_logits).mean() + F.softplus(self.d(fake.detach())).mean()
        reg = self.r1_penalty(real_logits, real) if regularize else loss.new_zeros(())
        return {"d_loss": loss, "r1": reg}


class PooledCritic(nn.Sequential):
    def __init__(self, width=8):
        super().__init__(
            nn.Conv2d(3, width, 3, padding=1),
            nn.LeakyReLU(0.2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(width, 1),
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    net, real, fake = PooledCritic(), torch.randn(2, 3, 48, 48), torch.randn(2, 3, 48, 48)
    hi = DiscriminatorLoss(net)(real, fake, True)["r1"]
    lo = DiscriminatorLoss(net.half())(real.half(), fake.half(), True)["r1"]
    print(lo.item(), hi.item(), "BROKEN" if abs(lo - hi) > 0.1 * hi else "fine")
