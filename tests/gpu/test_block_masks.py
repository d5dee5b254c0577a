"""Block masks on the device: built there without N x N memory and without waiting, equal to those built on the host, and right in use."""

from __future__ import annotations

import pytest
import torch

from tilewise import BlockMask, attention, explain, masks, reference, tile_cache

from ..test_block_mask import per_head, rules_for
from .common import BACKENDS, compare, qkv


def causal_far(b, h, q, k):
    return (q >= k) & ((q - k < 1024) | (k % 4096 < 64))


@pytest.mark.parametrize("block_size", [16, (32, 64), 128], ids=str)
def test_lists_built_on_the_device_equal_those_of_the_host(block_size):
    torch.manual_seed(0)
    for name, rule in rules_for(300, 410).items():
        host = BlockMask(rule, 300, 410, batch=2, heads=3, block_size=block_size)
        device = BlockMask(rule.to("cuda"), 300, 410, batch=2, heads=3, block_size=block_size, device="cuda")
        assert torch.equal(device.status().cpu(), host.status()), name
        device.verify()


@pytest.mark.parametrize("rule", ["window", "causal", "packed causal", "function"])
def test_a_mask_over_262144_tokens(rule):
    """Building, keeping and using it take O(tiles) memory: a bool matrix of these pairs would be 64 GiB, one of bits 8 GiB."""
    n = 262_144
    bounds = torch.arange(0, n + 1, 8192, device="cuda")
    made = {
        "window": lambda: masks.SlidingWindow(1023, 0),
        "causal": masks.Causal,
        "packed causal": lambda: masks.Document.from_cu_seqlens(bounds, n) & masks.Causal(),
        "function": lambda: masks.Custom(causal_far),
    }[rule]()
    tile_cache.clear()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    mask = BlockMask(made, n, device="cuda")
    torch.cuda.synchronize()
    tiles = (n // 128) ** 2
    assert torch.cuda.memory_allocated() - before <= (1 << 20 if rule == "window" else 24 * tiles)
    assert torch.cuda.max_memory_allocated() - before <= (8 << 20 if rule == "window" else 100 * tiles)
    counts = mask.counts()
    assert counts["partial"] and sum(counts.values()) == tiles

    if rule in ("window", "packed causal"):
        q, k, v = (torch.randn(1, n, 1, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
        out = attention(q, k, v, mask=mask)
        out.sum().backward()
        rows = slice(n - 300, n)
        keys = slice(n - 8192, n)
        part = [x.detach()[:, s] for x, s in ((q, rows), (k, keys), (v, keys))]
        options = {"window_size": (1023, 0)} if rule == "window" else {"causal": True}
        expected, _ = reference.attention(*part, **options)
        torch.testing.assert_close(out[:, rows].double(), expected, rtol=2e-2, atol=2e-2)
        assert torch.cuda.max_memory_allocated() < 8 << 30


def test_nothing_waits_for_the_device():
    """No value is read by the host while a mask is built, from boundaries as from functions, and while it is used."""
    bounds = torch.tensor([0, 300, 900, 1024], device="cuda")
    ids = torch.arange(1024, device="cuda") // 100
    inputs = qkv(1, 1024, 1024, heads=2, kv_heads=2)
    bits = torch.rand(1, 1, 8, 8, device="cuda") < 0.5

    def everything():
        tile_cache.clear()
        rules = (
            masks.Document.from_cu_seqlens(bounds, 1024) & masks.Causal(),
            masks.SlidingWindow(255, 0),
            masks.Custom(lambda b, h, q, k: ids[q] == ids[k]),
            masks.Blocks(bits, 128) & masks.Causal(),
            masks.FirstKeys(4) | masks.SlidingWindow(99, 0),
        )
        for rule in rules:
            attention(**inputs, mask=BlockMask(rule, 1024, device="cuda"))

    everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_cached_mask_follows_writes_and_streams():
    ids = torch.arange(512, device="cuda")[None] // 100
    first = BlockMask(masks.Document(ids), 512)
    assert BlockMask(masks.Document(ids), 512).lists is first.lists
    ids += torch.arange(512, device="cuda") // 256
    assert BlockMask(masks.Document(ids), 512).lists is not first.lists
    with torch.cuda.stream(torch.cuda.Stream()):
        again = BlockMask(masks.Document(ids), 512)
        assert again.lists is not first.lists
        again.verify()


@pytest.mark.parametrize("name", ["per head", "blocks 16", "blocks 32 causal", "sink and window", "packed causal", "dense", "nothing"])
def test_attention_with_lists_equals_attention_without(name):
    """The lists change no result: the same call with the rule alone, and against the specification."""
    torch.manual_seed(1)
    rule = rules_for(300, 410)[name].to("cuda")
    inputs = {key: x.requires_grad_() for key, x in qkv(2, 300, 410, heads=3, kv_heads=1).items()}
    mask = BlockMask(rule, 300, 410, batch=2, heads=3, block_size=16 if "16" in name else 32, device="cuda")
    out = attention(**inputs, mask=mask)
    plain = attention(**inputs, mask=rule)
    exact, _ = reference.attention(**{key: x.detach() for key, x in inputs.items()}, mask=rule)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    dout = torch.randn_like(out)
    leaves = list(inputs.values())
    for ours, theirs in zip(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(plain, leaves, dout), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_mask_built_while_a_graph_is_captured_is_not_kept():
    inputs = qkv(1, 512, 512, heads=2, kv_heads=2)
    ids = torch.arange(512, device="cuda")[None] // 100

    def step():
        return attention(**inputs, mask=BlockMask(masks.Document(ids) & masks.Custom(per_head), 512, heads=2))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    tile_cache.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    ids += torch.arange(512, device="cuda") // 300
    graph.replay()
    torch.testing.assert_close(out, step())


def random_blocks(rows, columns, batch=1, heads=1, density=0.5):
    """With a block of queries that sees nothing, and one of keys that nobody sees."""
    bits = torch.rand(batch, heads, rows, columns, device="cuda") < density
    bits[..., 1, :], bits[..., 2] = False, False
    return bits


def gradients(inputs, dout, **options):
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    return torch.autograd.grad(attention(**leaves, **options, deterministic=False), list(leaves.values()), dout)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "name, seqlen_q, seqlen_k, options",
    [
        ("shared", 500, 700, {}),
        ("per head", 500, 700, {"heads": 4, "batch": 2}),
        ("causal rule", 896, 896, {"heads": 4}),
        ("causal call", 600, 728, {"causal": True}),
        ("more queries than keys", 728, 600, {"heads": 4, "causal": True}),
        ("sparse", 1500, 2000, {"heads": 4, "density": 0.1}),
        ("blocks of 256", 700, 800, {}),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_whole_blocks(name, seqlen_q, seqlen_k, options, head_dim, backend):
    """Also: NaN in keys that nobody sees, and for the gradients in queries that see nothing, changes nothing."""
    torch.manual_seed(2)
    size = 256 if "256" in name else 128
    own = {key: options[key] for key in ("batch", "heads", "density") if key in options}
    rule = masks.Blocks(random_blocks(-(-seqlen_q // size), -(-seqlen_k // size), **own), size)
    inputs = qkv(2, seqlen_q, seqlen_k, heads=4, kv_heads=2, head_dim=head_dim)
    extra = {"learnable_sink": torch.randn(4, device="cuda").bfloat16()} if name == "shared" else {}
    extra |= {"causal": True} if "causal" in options else {}
    rule = rule & masks.Causal() if "rule" in name else rule
    answer = compare({**inputs, **extra, "mask": rule}, backend)
    for key in ("k", "v"):
        inputs[key][:, 2 * size : 3 * size] = float("nan")
    out = attention(**inputs, **extra, mask=rule, backend=backend)
    assert torch.equal(out, answer.out)

    dout = torch.randn_like(out)
    for x in (inputs["q"], dout):
        x[:, size : 2 * size] = float("nan")
    hidden = gradients(inputs, dout, **extra, mask=rule, backend=backend)
    for x in (*inputs.values(), dout):
        x.nan_to_num_(0.5)
    dq, dk, dv = gradients(inputs, dout, **extra, mask=rule, backend=backend)
    assert torch.equal(hidden[1], dk) and torch.equal(hidden[2], dv)
    torch.testing.assert_close(hidden[0], dq, rtol=2**-7, atol=1e-5)  # float32 additions in any order, then rounded
    assert not (dq[:, size : 2 * size].any() or dk[:, 2 * size : 3 * size].any() or dv[:, 2 * size : 3 * size].any())


def test_a_graph_is_replayed_with_other_blocks():
    inputs = qkv(1, 640, 640, heads=2, kv_heads=2, head_dim=128)
    bits = random_blocks(5, 5)

    def step():
        tile_cache.clear()
        return attention(**inputs, mask=masks.Blocks(bits, 128) & masks.Causal())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for _ in range(3):
        bits.copy_(torch.rand(bits.shape, device="cuda") < 0.5)
        graph.replay()
        assert torch.equal(out, step())


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("blocked", [False, True], ids=["rule", "block mask"])
@pytest.mark.parametrize("window", [None, masks.Causal(), masks.Causal() & masks.SlidingWindow(70, -1)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128, 80])
def test_documents_run_as_packed_sequences(head_dim, window, blocked, layout):
    """By the kernels of these, again and again with other data and the same rule."""
    n, backend = 700, BACKENDS[-1]
    bounds = torch.tensor([0, 100, 100, 357, 640], device="cuda")
    rule = masks.Document.from_cu_seqlens(bounds, n)
    rule = rule if window is None else rule & window
    mask = BlockMask(rule, n, device="cuda") if blocked else rule
    for _ in range(4):
        inputs = {
            name: x.transpose(1, 2) if layout == "bhsd" else x for name, x in qkv(1, n, n, head_dim=head_dim, heads=4, kv_heads=2).items()
        }
        call = {**inputs, "mask": mask, "layout": layout}
        assert explain(**call).backend == explain(**call, pass_="bwd").backend == backend
        compare(call, backend)


def test_a_long_rule_without_a_block_mask_visits_its_own_tiles():
    """What it takes is far from the time of all tiles, and it is right."""
    n = 8192
    q, k, v = (torch.randn(1, n, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    rule = masks.Custom(lambda b, h, q_idx, kv_idx: (q_idx // 512 == kv_idx // 512) & (q_idx >= kv_idx))
    out = attention(q, k, v, mask=rule)
    assert torch.equal(out, attention(q, k, v, mask=BlockMask(rule, n, device="cuda")))
    expected, _ = reference.attention(*(x[:, -512:] for x in (q, k, v)), causal=True)
    assert (out[:, -512:].double() - expected.double()).norm() <= 1e-2 * expected.double().norm()
