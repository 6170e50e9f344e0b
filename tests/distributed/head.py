"""head_loss of sharded and replicated heads, on several processes: gradients of one process with the whole batch, and
no more collectives than head(hidden) needs."""

import copy
import functools
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import safeops
from safeops.core.private_torch import TorchDispatchMode
from safeops.head import _chunks
from tests.distributed import processes
from tests.head.heads import LoRA

D, C, ROWS = 8, 24, 40  # of one rank


class Model(nn.Module):
    """A trunk and a head; its forward returns the loss, of all logits or by head_loss."""

    def __init__(self, head, trunk=True):
        super().__init__()
        self.trunk, self.head = nn.Linear(D, D) if trunk else nn.Identity(), head

    def forward(self, x, target, chunks, head=None, **options):
        head, hidden = head or self.head, torch.tanh(self.trunk(x))
        if chunks:
            return loss_of(safeops.head_loss(head, hidden, target, **options))
        loss = options.pop("loss", "cross_entropy")
        return loss_of(getattr(safeops, loss)(head(hidden), target, **options))


def loss_of(result):
    """A number of any result; rows have different upstream gradients."""
    if isinstance(result, tuple):
        result = result.log_prob + 0.5 * result.entropy
    if result.dim() == 0:
        return result
    slopes = torch.linspace(0.5, 1.5, len(result), dtype=result.dtype).view(-1, *[1] * (result.dim() - 1))
    return (result * slopes).mean()


def heads(dtype=torch.float64):
    torch.manual_seed(0)
    return {
        "linear": nn.Linear(D, C).to(dtype),
        "two layers": nn.Sequential(nn.Linear(D, 12), nn.GELU(), nn.Linear(12, C)).to(dtype),
        "adapter": LoRA(D, C).to(dtype),
    }


def batch(dtype):
    g = torch.Generator().manual_seed(1)
    world = dist.get_world_size()
    x, target = torch.randn(world, ROWS, D, generator=g), torch.randint(C, (world, ROWS), generator=g)
    return x.to(dtype), target


class Collectives(TorchDispatchMode):
    """Counts what is sent. (CommDebugMode follows modules by global hooks, which expect that a module calls itself.)"""

    def __init__(self):
        super().__init__()
        self.counts = {"gather": 0, "reduce": 0}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = str(op)
        for key in self.counts:
            self.counts[key] += name.startswith(("c10d", "_c10d_functional")) and key in name
        return op(*args, **(kwargs or {}))


def step(model, x, target, chunks, **options):
    """The collectives of a training step."""
    model.zero_grad()
    with Collectives() as sent:
        model(x, target, chunks, **options).backward()
    return sent.counts


def gradients(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in parameters]


def compare(name, wrap, dtype=torch.float64, tolerance=1e-12, trunk=True, **options):
    """A wrapped model must get the gradients of one process with all rows, and send as often as with all logits."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(dtype)
    single = Model(heads(dtype)[name], trunk).to(dtype)
    net = copy.deepcopy(single)
    plain, rank = wrap(copy.deepcopy(single)), dist.get_rank()
    net = wrap(net)
    for _ in range(2):  # (the first step of DDP and fully_shard prepares what later ones use)
        sent = step(net, x[rank], target[rank], True, **options)
        most = step(plain, x[rank], target[rank], False, **options)
    assert sent == most and sent["reduce"] > 0, (sent, most)
    losses = [single(x[r], target[r], False, **options) for r in range(len(x))]
    torch.stack(losses).mean().backward()
    for got, want in zip(gradients(net), gradients(single), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def sharded(model, **options):
    """The head as a group of its own, as every guide of fully_shard has it."""
    fully_shard(model.head, mesh=mesh(), **options)
    return fully_shard(model, mesh=mesh(), **options)


def sharded_layers(model):
    for layer in model.head:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh())
    return fully_shard(model, mesh=mesh())


def sharded_at_the_root(model):
    return fully_shard(model, mesh=mesh())


def ddp(model):
    return DistributedDataParallel(model)


def ddp_of_the_head(model):
    model.head = DistributedDataParallel(model.head)
    return model


def bf16_by_policy():
    """Casts of a mixed precision policy: parameters and hidden in bf16, logits in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    compare("two layers", functools.partial(sharded, mp_policy=policy), torch.float32, 2e-2)


def function_of_a_sharded_module():
    """A function with a sharded module in its closure must be gathered once, too."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(torch.float64)
    single = Model(heads()["two layers"]).double()
    net, rank = sharded(copy.deepcopy(single)), dist.get_rank()
    for _ in range(2):
        sent = step(net, x[rank], target[rank], True, head=lambda hidden: 0.5 * net.head(hidden))
    scaled = [single(x[r], target[r], False, head=lambda hidden: 0.5 * single.head(hidden)) for r in range(len(x))]
    torch.stack(scaled).mean().backward()
    for got, want in zip(gradients(net), gradients(single), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert sent["reduce"] == 2, sent  # one of the head, one of the trunk


def hooks_stay():
    """A hook of a sharded head must see each chunk's logits, and nothing else; afterwards all is as before."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(torch.float64)
    net, rank, seen = sharded(Model(heads()["linear"]).double()), dist.get_rank(), []
    net.head.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    hooks = dict(net.head._forward_hooks), dict(net.head._forward_pre_hooks)
    step(net, x[rank], target[rank], True)
    assert seen == [(7, C)] * 5 + [(5, C)] and "forward" not in vars(net.head), seen
    assert hooks == (dict(net.head._forward_hooks), dict(net.head._forward_pre_hooks))


def layer_of_dtensors():
    """A plain layer whose classes are sharded must take the linear function, with its bits."""
    x, target = batch(torch.float64)
    layer, m = heads()["linear"], mesh()
    for key, p in list(layer.named_parameters()):
        setattr(layer, key, nn.Parameter(distribute_tensor(p.detach(), m, [Shard(0)])))
    hidden, labels = (distribute_tensor(t[0], m, [Replicate()]) for t in (x, target))
    results = (
        safeops.head_loss(layer, hidden, labels),
        safeops.linear_cross_entropy(hidden, layer.weight, labels, linear_bias=layer.bias),
    )
    whole = safeops.cross_entropy(heads()["linear"](x[0]), target[0])
    assert torch.equal(*(loss.full_tensor() for loss in results))
    torch.testing.assert_close(results[0].full_tensor(), whole, rtol=1e-12, atol=1e-12)


def colwise(sequence=False, loss="cross_entropy", shared=False, fsdp=False, tolerance=1e-12, **options):
    """A head under ColwiseParallel must take the linear function, of plain tensors as of DTensors, and under sequence
    parallel of a rank's own tokens: values and gradients of one process, and never all logits of a rank."""
    both = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    g, m, layer = torch.Generator().manual_seed(2), both["tp"], heads()["linear"]
    rank, tokens, single = dist.get_rank(), 4 * dist.get_world_size(), copy.deepcopy(layer)
    hidden, labels = torch.randn(3, tokens, D, generator=g).double(), torch.randint(C, (3, tokens), generator=g)
    labels[0, :2], hidden[0, :2] = -100, float("nan")
    if loss == "kl_div":
        hidden[0, :2], labels = 0, torch.randn(3, tokens, C, generator=g).double()
    parallelize_module(layer, m, ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate()))
    if fsdp:
        policy = MixedPrecisionPolicy(param_dtype=torch.float64 if tolerance < 1e-9 else torch.float32)
        fully_shard(layer, mesh=both["dp"], mp_policy=policy)
    x = hidden.clone().requires_grad_()
    want = loss_of(safeops.head_loss(single, x, labels, loss=loss, **options))
    want.backward()
    part = hidden[:, 4 * rank : 4 * rank + 4] if sequence else hidden
    leaf = part.clone().requires_grad_()
    layout = [Shard(1) if sequence else Replicate()]
    operand = DTensor.from_local(leaf, m, layout, run_check=False) if shared else leaf
    refuse = mock.Mock(side_effect=AssertionError("all logits"))
    before = torch.get_rng_state()
    with mock.patch.object(nn.functional, "linear", refuse), Collectives() as sent, warnings.catch_warnings():
        warnings.simplefilter("error")
        got = loss_of(safeops.head_loss(layer, operand, labels, loss=loss, **options))
        got *= 1  # as transformers' Trainer does
        got.backward()
    assert torch.equal(torch.get_rng_state(), before)
    # The numbers of each row are gathered, and the input's gradient is added up. Under sequence parallel the hidden
    # rows are gathered, in forward and in backward, and that sum is scattered.
    if not fsdp and not options:
        assert sent.counts == {"gather": 1 + 2 * sequence, "reduce": 1}, sent.counts
    assert isinstance(got, DTensor) == shared
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close((got.full_tensor() if shared else got).double(), want)
    close(leaf.grad, x.grad[:, 4 * rank : 4 * rank + 4] if sequence else x.grad)
    for p, q in zip(layer.parameters(), single.parameters()):
        close(p.grad.full_tensor(), q.grad)


class Deep(Model):
    """Two depths of hidden states. Its forward returns sum_d w_d loss_d of a rank's rows, over the ranks' counts."""

    def forward(self, x, targets, chunks, count):
        hidden = [torch.tanh(self.trunk(x))]
        hidden.append(torch.tanh(self.trunk(hidden[0])))
        denominators, weights = [count(y != -100) for y in targets], (1.0, 0.3)
        if chunks:
            options = {"denominator": denominators, "depth_weight": weights}
            return safeops.head_loss(self.head, hidden, targets, **options).loss
        losses = [
            safeops.cross_entropy(self.head(h), y, denominator=n) for h, y, n in zip(hidden, targets, denominators)
        ]
        return sum(w * loss for w, loss in zip(weights, losses))


def depths(wrap):
    """Depths that keep other rows on each rank must have the gradients of one process, and no more collectives than one
    depth of hidden states has."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(torch.float64)
    rank, world = dist.get_rank(), dist.get_world_size()
    targets = [target, target.flip(1)]
    targets[0][0, :30] = targets[1][-1, :15] = -100
    head = heads()["two layers"]
    single, one = Deep(head).double(), wrap(Model(copy.deepcopy(head)).double())
    net = wrap(copy.deepcopy(single))
    own = [y[rank] for y in targets]
    for _ in range(2):
        sent = step(net, x[rank], own, True, count=safeops.distributed.global_count)
        most = step(one, x[rank], own[0], True)
    sent["reduce"] -= 2  # (the two counts)
    assert sent == most and sent["reduce"] > 0, (sent, most)
    counts = iter([(y != -100).sum() for y in targets] * world)
    sum(single(x[r], [y[r] for y in targets], False, lambda keep: next(counts)) for r in range(world)).backward()
    for got, want in zip(gradients(net), gradients(single), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def depths_under_sequence_parallel():
    """Depths of a rank's own tokens, with the targets of all tokens, must be those of one process."""
    m, layer = mesh(), heads()["linear"]
    rank, single = dist.get_rank(), copy.deepcopy(layer)
    g, tokens = torch.Generator().manual_seed(4), 4 * dist.get_world_size()
    hidden = [torch.randn(3, tokens, D, generator=g).double() for _ in range(3)]
    labels = [torch.randint(C, (3, tokens), generator=g) for _ in hidden]
    labels[0][0, :2] = -100
    keep = [torch.rand(3, tokens, generator=g) > 0.3 for _ in hidden]
    parallelize_module(layer, m, ColwiseParallel(input_layouts=Shard(1)))
    for options in ({}, {"mask": keep}, {"denominator": [40.0, 30.0, 2.0]}):
        options |= {"depth_weight": [1.0, 0.0, 0.3]}
        whole = [x.clone().requires_grad_() for x in hidden]
        want = safeops.head_loss(single, whole, labels, **options)
        leaves = [x[:, 4 * rank : 4 * rank + 4].clone().requires_grad_() for x in hidden]
        got = safeops.head_loss(layer, leaves, labels, **options)
        for a, b in zip(got, want):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        wanted = torch.autograd.grad(want.loss, [*whole, *single.parameters()])
        grads = torch.autograd.grad(got.loss, [*leaves, *layer.parameters()])
        for d, e in zip(grads[:3], wanted[:3]):
            torch.testing.assert_close(d, e[:, 4 * rank : 4 * rank + 4], rtol=1e-12, atol=1e-12)
        for d, e in zip(grads[3:], wanted[3:]):
            torch.testing.assert_close(d.full_tensor(), e, rtol=1e-12, atol=1e-12)


def layers_of_dtensors():
    """A head of two layers whose classes are sharded must take DTensors, with padding of NaN and without a warning."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(torch.float64)
    whole = functools.partial(DTensor.from_local, device_mesh=mesh(), placements=[Replicate()], run_check=False)
    for rows in (ROWS, 0):  # (how many count)
        labels, hidden = torch.where(torch.arange(ROWS) < rows - 3, target[0], -100), x[0].clone()
        hidden[max(rows - 3, 0) :] = float("nan")
        head = heads()["two layers"]
        single, leaves = copy.deepcopy(head), [hidden.clone().requires_grad_() for _ in range(2)]
        first = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(head, mesh(), {"0": first, "2": ColwiseParallel(use_local_output=False)})
        want = safeops.head_loss(single, leaves[0], labels)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = safeops.head_loss(head, whole(leaves[1]), whole(labels))
            got.backward()
        want.backward()
        torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-12, atol=1e-12)
        for p, q in zip(head.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-12)


def refused_layers():
    """Logits that are some of the classes, or DTensors for plain hidden states, must be refused by name."""
    x, target = batch(torch.float64)
    layers = {kind: ColwiseParallel(use_local_output=kind == "plain") for kind in ("plain", "shared")}
    nets = {kind: parallelize_module(heads()["two layers"], mesh(), {"2": style}) for kind, style in layers.items()}
    refuse = functools.partial(processes.raises, ValueError, "head_loss", "output_layouts=Replicate()")
    part = target[0] % (C // dist.get_world_size())
    net = nets["plain"]
    for head in (net, lambda hidden: net(hidden) * 2):
        refuse("all 24 classes", call=lambda head=head: safeops.head_loss(head, x[0], part))
    refuse(call=lambda: safeops.head_loss(nets["plain"], [x[0], x[0]], [part, part]))
    words = "head_loss: head returns a DTensor of logits", "output_layouts=Replicate()"
    processes.raises(TypeError, *words, call=lambda: safeops.head_loss(nets["shared"], x[0], target[0]))
    whole = functools.partial(DTensor.from_local, device_mesh=mesh(), placements=[Replicate()], run_check=False)
    words = "head_loss: head returns plain logits", "use_local_output=False"
    layer = parallelize_module(heads()["linear"], mesh(), ColwiseParallel())
    gathering = ColwiseParallel(output_layouts=Replicate())
    last = nn.Sequential(parallelize_module(heads()["linear"], mesh(), gathering))
    processes.raises(TypeError, *words, call=lambda: safeops.head_loss(last, whole(x[0]), whole(target[0])))
    support = torch.ones(ROWS, C, dtype=torch.bool)
    words = "linear_cross_entropy", "must be DTensors of one mesh", "head_loss(layer, ...)"
    call = functools.partial(safeops.linear_cross_entropy, x[0], layer.weight, target[0])
    processes.raises(TypeError, *words, call=call)
    words = "head_loss: support= does not go with classes that are sharded"
    processes.raises(TypeError, words, call=lambda: safeops.head_loss(layer, x[0], target[0], support=support))


def gathered_layers():
    """A last layer that gathers its classes is a head as any other."""
    _chunks.FEWEST, _chunks.CHUNK = (7, 7), 1
    x, target = batch(torch.float64)
    head = heads()["two layers"]
    single = copy.deepcopy(head)
    parallelize_module(head, mesh(), {"2": ColwiseParallel(output_layouts=Replicate())})
    losses = [safeops.head_loss(module, x[0], target[0]) for module in (head, single)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


NONE = {"reduction": "none"}
LOG_PROBS = {"loss": "token_log_probs"}
CASES = {
    **{f"fsdp {name}": functools.partial(compare, name, sharded) for name in heads()},
    **{f"ddp {name}": functools.partial(compare, name, ddp) for name in heads()},
    "fsdp, depths": functools.partial(depths, sharded),
    "ddp, depths": functools.partial(depths, ddp),
    "fsdp, gradients by row": functools.partial(compare, "two layers", sharded, **NONE),
    "fsdp, log-probabilities": functools.partial(compare, "adapter", sharded, **LOG_PROBS),
    "fsdp, frozen hidden": functools.partial(compare, "two layers", sharded, trunk=False),
    "fsdp, frozen hidden, by row": functools.partial(compare, "two layers", sharded, trunk=False, **NONE),
    "fsdp of each layer": functools.partial(compare, "two layers", sharded_layers),
    "fsdp of each layer, by row": functools.partial(compare, "two layers", sharded_layers, **NONE),
    "fsdp of the model": functools.partial(compare, "two layers", sharded_at_the_root),
    "ddp, gradients by row": functools.partial(compare, "adapter", ddp, **NONE),
    "ddp of the head": functools.partial(compare, "two layers", ddp_of_the_head, trunk=False),
    "ddp of the head, by row": functools.partial(compare, "two layers", ddp_of_the_head, trunk=False, **NONE),
    "bf16 by policy": bf16_by_policy,
    "function of a sharded module": function_of_a_sharded_module,
    "hooks stay": hooks_stay,
    "layer of DTensors": layer_of_dtensors,
    "colwise": colwise,
    "colwise, DTensors": functools.partial(colwise, shared=True),
    "colwise, log-probabilities": functools.partial(colwise, **LOG_PROBS),
    "sequence parallel": functools.partial(colwise, True),
    "sequence parallel, DTensors": functools.partial(colwise, True, shared=True, label_smoothing=0.1),
    "sequence parallel, by row": functools.partial(colwise, True, **NONE),
    "sequence parallel, log-probabilities": functools.partial(colwise, True, **LOG_PROBS),
    "sequence parallel, divergence": functools.partial(colwise, True, "kl_div"),
    "sequence parallel, depths": depths_under_sequence_parallel,
    "layers of DTensors": layers_of_dtensors,
    "refused layers": refused_layers,
    "gathered layers": gathered_layers,
    "sequence parallel, fsdp": functools.partial(colwise, True, fsdp=True),
    "sequence parallel, fsdp, by policy": functools.partial(colwise, True, fsdp=True, tolerance=1e-6),
}
