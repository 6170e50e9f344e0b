"""Cases of policies: n tokens of answers of 1,024, with the advantage of each answer. Each is made of several ops,
which pass tensors between them."""

import torch

import safeops

from .case import ROW, Case, case, data, keep_mask


def tokens(n, dtype, device, *seeds):
    shape = max(1, n // ROW), min(ROW, n)
    return [data(shape[0] * shape[1], dtype, device, seed, grad=False).view(shape) for seed in seeds]


@case("policy_loss")
def policy_loss(n, dtype, device):
    x, old, reference = tokens(n, dtype, device, 0, 1, 2)
    s, mask = dtype.itemsize, keep_mask(x.numel(), device).view(x.shape)
    advantage = data(x.shape[0], torch.float32, device, 3, grad=False)

    def theirs(x):
        """Computes GRPO's loss as trainers write it."""
        ratio, d = (x - old).exp(), reference - x
        a = advantage[:, None]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) + 0.04 * (d.exp() - d - 1)
        return ((loss * mask).sum(-1) / mask.sum(-1)).mean()

    def ours(x):
        options = {"clip": 0.2, "reference_log_prob": reference, "beta": 0.04, "reduction": "sequence_mean"}
        return safeops.policy_loss(x, old, advantage, mask=mask, **options).loss

    return Case(
        (x.requires_grad_(),),
        forward_bytes=3 * s + 1,  # read the three log-probabilities, mask
        backward_bytes=4 * s + 1,  # read them again; write dx
        ours=ours,
        eager={"GRPO as trainers write it": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


@case("kl_to_reference")
def kl_to_reference(n, dtype, device):
    (x, reference), s = tokens(n, dtype, device, 0, 1), dtype.itemsize

    def theirs(x):
        d = reference.float() - x.float()
        return d.exp() - d - 1

    return Case(
        (x.requires_grad_(),),
        forward_bytes=2 * s + max(4, s),  # read both; write the estimates, at least fp32
        backward_bytes=3 * s + max(4, s),  # read them and their gradient; write dx
        ours=lambda x: safeops.kl_to_reference(x, reference),
        eager={"exp(d) - d - 1": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


@case("group_advantages")
def group_advantages(n, dtype, device):
    n = max(8, n - n % 8)
    rewards, s = data(n, dtype, device, 0), dtype.itemsize

    def theirs(rewards):
        r = rewards.float().view(-1, 8)
        return (r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)

    return Case(
        (rewards,),
        forward_bytes=s + max(4, s),  # read the rewards; write the advantages
        backward_bytes=2 * s + max(4, s),  # read the rewards and the gradient; write dr
        ours=lambda r: safeops.group_advantages(r, 8),
        eager={"(r - r.mean(1)) / (r.std(1) + 1e-4)": theirs},
        compiled=theirs,
        variant=True,
        counted=False,
    )


@case("discounted_sum")
def discounted_sum(n, dtype, device):
    (rewards, values), s = tokens(n, dtype, device, 0, 1), dtype.itemsize

    def theirs(values):
        """Computes GAE by a loop over time, as trainers write it."""
        r, v, following, results = rewards.float(), values.float(), 0, []
        for t in reversed(range(r.shape[1])):
            next_value = v[:, t + 1] if t + 1 < r.shape[1] else 0
            following = r[:, t] + 0.99 * next_value - v[:, t] + 0.99 * 0.95 * following
            results.append(following)
        return torch.stack(results[::-1], 1)

    return Case(
        (values.requires_grad_(),),
        forward_bytes=2 * s + max(4, s),  # read both; write the advantages
        backward_bytes=s + max(4, s),  # read the gradient; write dv
        ours=lambda values: safeops.discounted_sum(rewards, values, gamma=0.99, lam=0.95),
        eager={"a loop over time": theirs},
        compiled=None,
        variant=True,
        counted=False,
    )
