"""DTensor and FSDP2 on two processes (gloo, CPU): the operators shard over batch and heads, with the numbers of one process."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from tilewise import UnsupportedAttention, attention, attention_varlen, attention_with_kvcache, masks
from tilewise.integrations.dtensor import allowed, sharded_dim

from .small import Block

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


def results(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, slopes: Tensor, sink: Tensor, weight: Tensor, **options: Any) -> list[Tensor]:
    """Outputs, gradients and second gradients."""
    leaves = (q, k, v, bias, slopes, sink)
    out, aux = attention(
        q, k, v, bias=bias, alibi_slopes=slopes, learnable_sink=sink, return_aux=("lse", "max_logits", "key_mass", "entropy"), **options
    )
    loss = (out * weight).sum() + aux.lse.sum() + aux.entropy.sum() + aux.key_mass.square().sum()
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    return [out, *aux, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def check_dtensors() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    shapes = [(2, 6, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), (4, 6, 7), (2, 4), (4,), (2, 6, 4, 8)]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    over = {
        "heads": ([Shard(2)] * 3 + [Shard(0), Shard(1), Shard(0), Shard(2)], Shard(2)),
        "batch": ([Shard(0)] * 3 + [Replicate(), Shard(0), Replicate(), Shard(0)], Shard(0)),
        "keys": ([Replicate(), Shard(1), Shard(1)] + [Replicate()] * 4, None),
    }
    options: list[dict[str, Any]] = [{"causal": True, "softcap": 2.0}, {"dropout_p": 0.4, "dropout_seed": 7}]
    for given in options:
        expected = results(*(x.requires_grad_() for x in whole), **given)
        for placements, result in over.values():
            parts = [distribute_tensor(x.detach(), mesh, [p]) for x, p in zip(whole, placements, strict=True)]
            got = results(*(x.requires_grad_() for x in parts), **given)
            if result is not None and "dropout_p" not in given:
                assert isinstance(got[0], DTensor) and got[0].placements == (result,)
                assert got[0].to_local().numel() == expected[0].numel() // 2
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a.full_tensor(), b)
    q, k, v = (distribute_tensor(x.detach(), mesh, [Shard(2)]) for x in whole[:3])
    with pytest.raises(UnsupportedAttention, match="every rank would draw"):
        attention(q, k, v, dropout_p=0.5)
    one_key_head = [distribute_tensor(x.detach()[:, :, :1], mesh, [Replicate()]) for x in whole[1:3]]
    shared = attention(q, *one_key_head)
    assert shared.placements == (Shard(2),)
    torch.testing.assert_close(shared.full_tensor(), attention(whole[0], whole[1][:, :, :1], whole[2][:, :, :1]))


def check_lengths_and_packed_sequences() -> None:
    """Grouped heads beside lengths of each item in either layout, and packed sequences over their heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    q, k, v, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 6, 6, 8), (2, 7, 2, 8), (2, 7, 2, 5), (2, 6, 6, 5)))
    lengths = [torch.tensor(x, dtype=torch.int32) for x in ([3, 6], [7, 2])]
    for layout, heads in (("bshd", 2), ("bhsd", 1)):
        whole = [x if layout == "bshd" else x.transpose(1, 2).contiguous() for x in (q, k, v, weight)]
        for dim in (heads, 0):

            def run(parts: list[Tensor], used: list[Tensor], layout: str = layout) -> list[Tensor]:
                leaves = [x.detach().requires_grad_() for x in parts[:3]]
                out = attention(*leaves, causal=True, window_size=(3, -1), seqused_q=used[0], seqused_k=used[1], layout=layout)
                return [out, *torch.autograd.grad((out * parts[3]).sum(), leaves)]

            used = [distribute_tensor(x, mesh, [Shard(0) if dim == 0 else Replicate()]) for x in lengths]
            got = run([distribute_tensor(x, mesh, [Shard(dim)]) for x in whole], used)
            assert got[0].placements == (Shard(dim),)
            for a, b in zip(got, run(whole, lengths), strict=True):
                torch.testing.assert_close(a.full_tensor(), b)

    packed, offsets = [x[0] for x in (q, k[:, :6], v[:, :6])], torch.tensor([0, 4, 6], dtype=torch.int32)
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in packed]
    everywhere = distribute_tensor(offsets, mesh, [Replicate()])
    out = attention_varlen(*parts, everywhere, everywhere, causal=True)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), attention_varlen(*packed, offsets, offsets, causal=True))

    query, *caches = (distribute_tensor(x, mesh, [Shard(2)]) for x in (q[:, :1], k, v))  # a decoding step: each rank its heads
    with pytest.raises(NotImplementedError, match="attention_cached"):
        attention_with_kvcache(query, *caches)
    token = DTensor.from_local(attention_with_kvcache(*(x.to_local() for x in (query, *caches))), mesh, [Shard(2)])
    torch.testing.assert_close(token.full_tensor(), attention_with_kvcache(q[:, :1], k, v))


def check_tensor_parallel_modules() -> None:
    """torch's own plan for a block: projections sharded by columns, then by rows; their outputs stay DTensors through attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
            self.out = torch.nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (project(x).unflatten(-1, (-1, 8)) for project in (self.q, self.k, self.v))
            return self.out(attention(q, k, v, causal=True).flatten(-2))

    torch.manual_seed(0)
    alone, sharded = Attend(), Attend()
    sharded.load_state_dict(alone.state_dict())
    columns = ColwiseParallel(use_local_output=False)
    parallelize_module(sharded, init_device_mesh("cpu", (2,)), {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()})
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(sharded(x), alone(x))
    for module in (alone, sharded):
        module(x).square().mean().backward()
    for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6)


def check_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    alone, sharded = Block(), Block()
    sharded.load_state_dict(alone.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    inputs = torch.randn(4, 9, 32)
    rank = torch.distributed.get_rank()
    alone(inputs).square().mean().backward()
    sharded(inputs[2 * rank : 2 * rank + 2]).square().mean().backward()
    for a, b in zip(sharded.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-6)


def work(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        check_dtensors()
        check_lengths_and_packed_sequences()
        check_tensor_parallel_modules()
        check_fsdp()
    finally:
        torch.distributed.destroy_process_group()


def test_two_processes_compute_what_one_does() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port,), nprocs=2)


def arguments(**changes: Any) -> dict[str, Any]:
    return {"score_mod": "", "mask_mod": "", "dropout_p": 0.0, **changes}


def test_what_counts_from_the_start_of_the_whole_tensor_is_not_sharded() -> None:
    assert allowed(arguments()) == ["replicate", "batch", "heads"]
    assert allowed(arguments(dropout_p=0.1)) == ["replicate"]
    assert allowed(arguments(score_mod="score + float(q_idx - kv_idx)")) == ["replicate", "batch", "heads"]
    assert allowed(arguments(score_mod="score * f0[h]")) == ["replicate", "batch"]
    assert allowed(arguments(mask_mod="i0[b, q_idx] == i0[b, kv_idx]")) == ["replicate", "heads"]
    lowered = masks.lower(masks.Document(torch.zeros(2, 4, dtype=torch.int64)), batch=2, heads=2, seqlen_q=4, seqlen_k=4, device="cpu")
    assert "batch" not in allowed(arguments(mask_mod=lowered.program_text))


@pytest.mark.parametrize(
    ("name", "shape", "batch", "heads"),
    [
        ("q", (2, 6, 4, 8), 0, 2),
        ("k", (2, 6, 1, 8), 0, None),
        ("lse", (2, 4, 6), 0, 1),
        ("bias", (4, 6, 7), None, 0),
        ("bias", (2, 1, 6, 7), 0, None),
        ("mask", (6, 7), None, None),
        ("alibi_slopes", (4,), None, 0),
        ("alibi_slopes", (2, 4), 0, 1),
        ("sink", (4,), None, 0),
        ("seqused_k", (2,), 0, None),
        ("entropy", (0,), None, None),
    ],
)
def test_which_dimension_is_sharded(name: str, shape: tuple[int, ...], batch: int | None, heads: int | None) -> None:
    assert (sharded_dim(name, shape, "batch", "bshd"), sharded_dim(name, shape, "heads", "bshd")) == (batch, heads)
