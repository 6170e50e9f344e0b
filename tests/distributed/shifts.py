"""Cases of shift_labels, and of means over sequences that ranks share. Each rank compares with the whole labels."""

import functools
import importlib.util
import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from safeops.distributed import shift_labels
from safeops.integrations.transformers import ForCausalLMLoss, compute_loss_func
from tests.distributed.processes import raises
from tests.distributed.sharded import sending


def numbers(*shape):
    return torch.randint(100, shape, generator=torch.Generator().manual_seed(3))


def own_part(labels, sizes):
    """This rank's part of labels that are cut into parts of these sizes."""
    return labels.split(sizes, -1)[dist.get_rank()]


def parts():
    """Parts of any sizes, also of no tokens, at the begin, the end and between; in any shape and dtype."""
    world, rank = dist.get_world_size(), dist.get_rank()
    uneven = [list(range(1, world + 1)), [0, *[2] * (world - 1)], [*[2] * (world - 1), 0], [0] * world]
    uneven += [[3, *[0] * (world - 2), 1], [1] * world]
    for sizes in uneven:
        for shape in ((), (2,), (2, 3), (0,)):
            labels = numbers(*shape, sum(sizes))
            want = own_part(shift_labels(labels), sizes)
            got = shift_labels(own_part(labels, sizes), dist.group.WORLD)
            assert got.dtype == torch.int64 and torch.equal(got, want), (sizes, shape, rank, got, want)
    labels = numbers(3, 2 * world)
    for dtype in (torch.int32, torch.uint8):
        part = own_part(labels, [2] * world).to(dtype)
        got = shift_labels(part.t().contiguous().t(), dist.group.WORLD, ignore_index=7)
        assert torch.equal(got, own_part(shift_labels(labels, ignore_index=7), [2] * world))
        assert torch.equal(part, own_part(labels, [2] * world).to(dtype))


def meshes():
    """Sequences are cut along one dim of the mesh, or along several together, and whole along the others."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "cp"))
    labels = numbers(world // 2, 3, 6)[mesh.get_local_rank("dp")]
    want = shift_labels(labels).chunk(2, -1)[mesh.get_local_rank("cp")]
    part = labels.chunk(2, -1)[mesh.get_local_rank("cp")]
    for where in (
        {"mesh": mesh, "dims": "cp"},
        {"mesh": mesh["cp"]},
        {"group": mesh.get_group("cp")},
        {"group": mesh["cp"]},
    ):
        assert torch.equal(shift_labels(part, **where), want), where
    whole = numbers(3, 2 * world)
    for where in ({"mesh": mesh}, {"mesh": mesh, "dims": ("dp", "cp")}, {"group": dist.group.WORLD}):
        got = shift_labels(own_part(whole, [2] * world), **where)
        assert torch.equal(got, own_part(shift_labels(whole), [2] * world)), where


def wire():
    """One message of 8 bytes a sequence, and 8 more."""
    with sending() as sent, mock.patch("safeops.distributed.shift_labels.all_gather") as gather:
        gather.side_effect = lambda output, input, group: sent.append(input.nbytes)
        shift_labels(numbers(5, 4), dist.group.WORLD)
    assert sent == [8 * 6], sent


def compiled():
    labels = numbers(3, 2 * dist.get_world_size())
    part = own_part(labels, [2] * dist.get_world_size())
    function = torch.compile(functools.partial(shift_labels, group=dist.group.WORLD), backend="eager", fullgraph=True)
    assert torch.equal(function(part), shift_labels(part, dist.group.WORLD))
    loss = functools.partial(ForCausalLMLoss, vocab_size=100, sequence_group=dist.group.WORLD)
    logits = torch.randn(*part.shape, 100)
    got = torch.compile(loss, backend="aot_eager", fullgraph=True)(logits, part)
    torch.testing.assert_close(got, loss(logits, part))


def errors():
    rank, world = dist.get_rank(), dist.get_world_size()
    where, call = f"shift_labels (rank {rank})", functools.partial
    mesh, labels = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp")), numbers(2, 3)
    raises(TypeError, where, "labels", "float32", call=call(shift_labels, labels.float(), mesh=mesh))
    raises(TypeError, where, "labels", "list", call=call(shift_labels, [labels], mesh=mesh))
    raises(TypeError, where, "ignore_index", call=call(shift_labels, labels, mesh=mesh, ignore_index=0.5))
    raises(ValueError, where, "(..., T)", call=call(shift_labels, labels[0, 0], mesh=mesh))
    raises(ValueError, where, "group or mesh", call=call(shift_labels, labels, dist.group.WORLD, mesh=mesh))
    raises(ValueError, where, "dims", call=call(shift_labels, labels, dims="cp"))
    raises(ValueError, where, "dims", "'tp'", call=call(shift_labels, labels, mesh=mesh, dims="tp"))
    shared = distribute_tensor(labels, mesh["cp"], [Replicate()])
    raises(TypeError, where, "labels", "DTensor", call=call(shift_labels, shared, mesh=mesh))
    raises(TypeError, where, "group", "str", call=call(shift_labels, labels, "cp"))
    raises(TypeError, where, "mesh", "str", call=call(shift_labels, labels, mesh="cp"))
    loss = call(ForCausalLMLoss, torch.zeros(2, 3, 4), labels % 4, 4)
    raises(TypeError, f"ForCausalLMLoss (rank {rank}): sequence_group", "str", call=call(loss, sequence_group="cp"))
    shifted = call(loss, num_items_in_batch=1, shift_labels=labels % 4)  # it has no use for the group
    raises(TypeError, "sequence_group", "str", call=call(shifted, sequence_group="cp"))
    with sending() as sent:
        raises(ValueError, "num_items", call=call(loss, num_items_in_batch=-1, sequence_group=dist.group.WORLD))
    assert not sent
    raises(ValueError, "sequence_group must have one dim", call=call(loss, sequence_group=mesh))
    half = dist.new_group([0])
    if rank:
        raises(ValueError, where, "this rank is not in it", call=call(shift_labels, labels, half))
        raises(ValueError, "sequence_group", "this rank is not in it", call=call(loss, sequence_group=half))
    gone = dist.new_group(list(range(world)))
    dist.barrier()  # destroying the group early would close connections that another rank still makes
    dist.destroy_process_group(gone)
    raises((RuntimeError, ValueError), where, call=call(shift_labels, labels, gone))


def disagreement():
    """Under TORCH_DISTRIBUTED_DEBUG other numbers of sequences are an error on all ranks; lengths may differ."""
    rank, before = dist.get_rank(), dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)
    call = functools.partial(shift_labels, numbers(2 + (rank == 0), 3), dist.group.WORLD)
    raises(RuntimeError, f"shift_labels (rank {rank})", "do not make the same call", "labels is int64", call=call)
    shift_labels(numbers(2, rank), dist.group.WORLD)
    dist.set_debug_level(before)


def evaluation():
    """The average of the ranks' losses is the mean over all labels, and not that mean times the ranks: with the batch
    over ranks as a Trainer averages it, and with sequences over ranks, some of which have no label or no token."""
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(4)
    logits, labels = torch.randn(2 * world, 4 * world, 10, generator=g).double(), numbers(2 * world, 4 * world) % 10
    labels[0, 3:] = labels[1:3] = labels[3, -2:] = -100
    want = ForCausalLMLoss(logits, labels, 10)
    assert want > 0

    def average(loss):
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world, want, rtol=1e-12, atol=0)

    rows, count = slice(2 * rank, 2 * rank + 2), (labels[:, 1:] != -100).sum()  # transformers gathers this number
    average(ForCausalLMLoss(logits[rows], labels[rows], 10, count) * world)  # and multiplies by the ranks
    average(compute_loss_func({"logits": logits[rows]}, labels[rows], count) * world)
    for sizes in ([4] * world, [4 * world - 4, *[0] * (world - 2), 4], [0, *[4] * (world - 2), 8]):
        part, own = logits.split(sizes, 1)[rank], own_part(labels, sizes)
        average(ForCausalLMLoss(part, own, 10, sequence_group=dist.group.WORLD))
        average(ForCausalLMLoss(part, own, 10, count, sequence_group=dist.group.WORLD) * world)
        shifted = own_part(shift_labels(labels), sizes)  # made before the cut, as transformers' Trainer does
        average(ForCausalLMLoss(part, None, 10, shift_labels=shifted, sequence_group=dist.group.WORLD))
        average(ForCausalLMLoss(part, own, 10, count, shift_labels=shifted) * world)


def trainer():
    """transformers' Trainer on several processes reports the mean over all labels, whichever way it takes the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    rank, world, labels = dist.get_rank(), dist.get_world_size(), numbers(8, 9) % 50
    labels[0, 2:] = labels[3, :7] = -100
    data = [{"input_ids": row.clamp(min=0), "labels": row} for row in labels]
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    want = ForCausalLMLoss(model(torch.stack([x["input_ids"] for x in data])).logits.detach(), labels, 50)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}
    model.loss_function = ForCausalLMLoss
    with (
        mock.patch.dict(os.environ, {k: str(x) for k, x in environment.items()}),
        tempfile.TemporaryDirectory() as folder,
    ):
        arguments = TrainingArguments(
            folder, per_device_eval_batch_size=8 // world, use_cpu=True, report_to="none", disable_tqdm=True
        )
        assert arguments.world_size == world
        for function in (None, compute_loss_func):
            given = Trainer(model, arguments, eval_dataset=data, compute_loss_func=function).evaluate()
            torch.testing.assert_close(given["eval_loss"], want.item(), rtol=1e-6, atol=0)


CASES = {
    "parts": parts,
    "meshes": meshes,
    "wire": wire,
    "compiled": compiled,
    "evaluation": evaluation,
    "disagreement": disagreement,
    "errors": errors,
    **({"trainer": trainer} if importlib.util.find_spec("transformers") else {}),
}
