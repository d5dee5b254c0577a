"""Calls that come again, without a GPU: what is recorded of a pass and what is not, and what makes a call another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tilewise import UnsupportedAttention, attention, attention_varlen, attention_with_kvcache, masks, plan, repeats
from tilewise.kernels import replay
from tilewise.kernels.triton import launching
from tilewise.kernels.triton.launching import Descriptor


class Kernel:
    """Stands for a compiled kernel that has nothing of Triton's launcher but the public call, and records it."""

    def __init__(self, **types: Any) -> None:
        self.src = SimpleNamespace(signature=types)
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, stream=None: self.launches.append((grid[0], *arguments))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The CPU in the place of a GPU that captures nothing; the last stream in the list is the current one."""
    streams = [7]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: streams[-1], raising=False)
    repeats.forget()
    yield streams
    repeats.forget()
    replay.of_streams.cache_clear()
    replay.spaces.cache_clear()


def address(x: torch.Tensor) -> int:
    return x.data_ptr()


KERNEL = Kernel(x="*fp32", tile=launching.DESCRIPTOR + "<fp32[8, 8]>", work="*fp32", counter="*i32", n="i32", out="*fp32", none="*fp32")
counters: dict[int, torch.Tensor] = {}


def counter(device: torch.device) -> torch.Tensor:
    return counters[0]


def work(x: torch.Tensor, y: torch.Tensor, n: int, extra: Any = None) -> list[torch.Tensor]:
    """A pass: an output, a workspace of which the second half is passed, a view that is described, an answer that each pass asks for."""
    workspace, out = x.new_empty(2, 64), y.new_empty(y.shape)
    counting = replay.asked(counter, x.device)
    if extra is not None:
        extra(x)
    described = Descriptor(y.transpose(0, 1), [8, 8], [8, 1])
    replay.start(KERNEL, n, x, described, workspace[1], counting, n, address(out), None)
    return [out]


def test_a_played_pass_launches_with_the_addresses_of_its_own_tensors(streams: list[int]) -> None:
    passes, held = replay.Passes(), []
    for step in range(4):
        streams.append(step)
        x, y, counters[0] = torch.randn(16), torch.randn(8, 8), torch.zeros(2, dtype=torch.int32)
        held.append((x, y, counters[0]))
        (out,) = passes.run("key", (x, y), lambda x=x, y=y: work(x, y, 3))
        programs, first, tile, workspace, count, n, result, none = KERNEL.launches[-1]
        got = [p if isinstance(p, int) else p.data_ptr() for p in (first, workspace, count, result)]
        assert (programs, n, none, result) == (3, 3, None, out.data_ptr())
        assert got[0] == address(x) and got[2] == address(counters[0]) and out.shape == y.shape and out.stride() == y.stride()
        assert tile.base.data_ptr() == address(y) and tile.shape == [8, 8] and tile.strides == [8, 1]
        assert isinstance(passes.known["key"], replay.Pass) == (step > 0), "recorded when it comes again"
    kept = passes.known["key"]
    assert isinstance(kept, replay.Pass) and kept.workspace == replay.ALIGNMENT
    assert [offset for _, _, offset in kept.launches[0].pointers] == [0, 256, 0, 0]
    names = [*kept.launches[0].values, *kept.names.values()]
    assert not any(isinstance(x, torch.Tensor) for x in names), "memory stays alive"


def test_each_stream_asks_once_and_has_workspaces_of_its_own(streams: list[int]) -> None:
    passes = replay.Passes()
    x, y = torch.randn(16), torch.randn(8, 8)
    counters[0] = torch.zeros(2, dtype=torch.int32)
    for _ in range(2):
        passes.run("key", (x, y), lambda: work(x, y, 3))
    seen: dict[int, set[tuple[int, int]]] = {}
    for stream in (1, 2, 1, 2, 1):
        streams.append(stream)
        counters[0] = torch.zeros(2, dtype=torch.int32)
        passes.run("key", (x, y), lambda: work(x, y, 3))
        _, _, _, workspace, count, *_ = KERNEL.launches[-1]
        seen.setdefault(stream, set()).add((workspace, count))
    assert [len(places) for places in seen.values()] == [1, 1] and seen[1].isdisjoint(seen[2])


@pytest.mark.parametrize("size", [512, replay.SPACE + 1])
def test_no_other_pass_launches_on_a_workspace_before_its_own_has_launched_all(size: int) -> None:
    """Whoever comes between two launches of a pass: here the first launch itself starts other passes on the same stream."""
    kernel, passes, between = Kernel(x="*fp32", work="*u8", out="*fp32"), replay.Passes(), [0]

    def two(x: torch.Tensor) -> list[torch.Tensor]:
        workspace, out = x.new_empty(size, dtype=torch.uint8), torch.empty_like(x)
        for _ in range(2):
            replay.start(kernel, 1, x, workspace, out)
        return [out]

    class Interrupting(list[tuple[Any, ...]]):
        def append(self, launch: tuple[Any, ...]) -> None:
            super().append(launch)
            if between[0]:
                between[0] -= 1
                passes.run("key", (x,), lambda: two(x))

    x = torch.randn(64)
    for _ in range(3):
        passes.run("key", (x,), lambda: two(x))
    kernel.launches = Interrupting()
    for depth in (0, 2, 2):
        kernel.launches.clear()
        between[0] = depth
        passes.run("key", (x,), lambda: two(x))
        used = [place for _, _, place, _ in kernel.launches]
        assert used == used[::-1] and len(set(used)) == depth + 1, "a pass inside another has its own"
    kept = passes.known["key"]
    assert isinstance(kept, replay.Pass) and ("free.pop" in kept.source) == (size <= replay.SPACE)
    assert len(replay.spaces(x.device).get(7, [])) == (3 if size <= replay.SPACE else 0)


def test_threads_take_workspaces_at_once() -> None:
    """All four wait in their first launch, on workspaces of their own; afterwards all of those are free."""
    together, seen = threading.Barrier(4, timeout=30), []
    kernel, passes = Kernel(x="*fp32", work="*u8", out="*fp32"), replay.Passes()

    class Waiting(list[tuple[Any, ...]]):
        def append(self, launch: tuple[Any, ...]) -> None:
            seen.append(launch[2])
            together.wait()

    def one(x: torch.Tensor) -> list[torch.Tensor]:
        workspace, out = x.new_empty(512, dtype=torch.uint8), torch.empty_like(x)
        replay.start(kernel, 1, x, workspace, out)
        return [out]

    x = torch.randn(64)
    for _ in range(3):
        passes.run("key", (x,), lambda: one(x))
    kernel.launches = Waiting()
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            list(pool.map(lambda _: passes.run("key", (x,), lambda: one(x)), range(4)))
    assert all(len(set(seen[i : i + 4])) == 4 for i in (0, 4, 8)) and len(set(seen)) == 4
    assert sorted(w.data_ptr() for w in replay.spaces(x.device)[7]) == sorted(set(seen))


@pytest.mark.parametrize("stride", [(64, 16, 1), (128, 16, 1), (2, 16, 1), (1, 4, 16)])
def test_a_result_lies_as_it_was_recorded_also_where_it_is_shaped_like_an_input(stride: tuple[int, ...]) -> None:
    kernel, passes = Kernel(x="*fp32", out="*fp32"), replay.Passes()

    def one(x: torch.Tensor) -> list[torch.Tensor]:
        out = torch.empty_strided(x.shape, stride)
        replay.start(kernel, 1, x, out)
        return [out]

    for given in (stride, (64, 16, 1), (256, 16, 1)):
        for _ in range(3):
            x = torch.empty_strided((2, 4, 16), given)
            (out,) = passes.run(given, (x,), lambda x=x: one(x))
            assert out.stride() == stride and out.shape == x.shape
            launched = [p if isinstance(p, int) else p.data_ptr() for p in kernel.launches[-1][1:]]
            assert launched == [x.data_ptr(), out.data_ptr()]
        assert isinstance(passes.known[given], replay.Pass)


def test_what_a_pass_zeroes_of_its_own_is_zeroed_whenever_it_is_played() -> None:
    kernel, passes = Kernel(x="*fp32", sums="*fp32", out="*fp32"), replay.Passes()

    def one(x: torch.Tensor) -> list[torch.Tensor]:
        other, sums, out = torch.empty(3), torch.empty(1 << 19).view(2, -1), torch.empty(4)
        sums[1].zero_()
        out.zero_()
        replay.start(kernel, 1, x, sums[1], out)
        replay.start(kernel, 1, x, other, out)
        return [out]

    for _ in range(4):
        (out,) = passes.run("key", (x := torch.randn(16),), lambda x=x: one(x))
        assert not out.any()
        out.fill_(1.0)  # the allocator gives the same memory again
    played = passes.known["key"]
    assert isinstance(played, replay.Pass) and played.source.count(".zero_()") == 2
    offset = replay.ALIGNMENT + (1 << 20)  # behind `other`, the second half of the sums
    assert f"work[{offset}:{offset + (1 << 20)}].zero_()" in played.source and played.workspace == replay.ALIGNMENT + (1 << 21)


@pytest.mark.parametrize(
    "extra",
    [
        lambda x: x.zero_(),
        lambda x: x.t().zero_() if x.ndim == 2 else x[::2].zero_(),
        lambda x: x + 1,
        lambda x: replay.note(None, 1, ()),
        lambda x: replay.start(Kernel(x="*fp32"), 1, torch.ones(4)),
        lambda x: replay.start(Kernel(x=("*fp32", "*fp32")), 1, (x, x)),
        lambda x: replay.start(Kernel(x="constexpr"), 1, x),
    ],
    ids=["in place", "in place with holes", "operator", "launch that cannot come again", "foreign tensor", "tuple", "no pointer"],
)
def test_a_pass_that_does_anything_else_is_worked_out_every_time(extra: Any) -> None:
    passes, runs = replay.Passes(), []
    counters[0] = torch.zeros(2, dtype=torch.int32)
    for _ in range(5):
        x, y = torch.randn(16), torch.randn(8, 8)
        passes.run("key", (x, y), lambda x=x, y=y: runs.append(1) or work(x, y, 3, extra))
    assert len(runs) == 5 and passes.known["key"] == replay.Passes.ATTEMPTS


def test_tensors_at_one_place_or_between_16_bytes_are_never_taken_for_others() -> None:
    passes = replay.Passes()
    counters[0] = torch.zeros(2, dtype=torch.int32)
    x, y = torch.randn(64), torch.randn(8, 8)
    for _ in range(2):
        passes.run("key", (x, y), lambda: work(x, y, 3))
    assert isinstance(passes.known["key"], replay.Pass)
    launches = len(KERNEL.launches)
    for pair in ((x, x.view(8, 8)), (torch.randn(17)[1:], y), (torch.empty(0), y)):
        runs: list[int] = []
        passes.run("key", pair, lambda runs=runs: runs.append(1) or [])
        assert runs == [1] and len(KERNEL.launches) == launches


def test_captured_or_watched_launches_are_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, x, y = replay.Passes(), torch.randn(16), torch.randn(8, 8)
    counters[0] = torch.zeros(2, dtype=torch.int32)
    runs: list[int] = []

    def worked_out() -> bool:
        before = len(runs)
        passes.run("key", (x, y), lambda: runs.append(1) or work(x, y, 3))
        return len(runs) > before

    assert [worked_out() for _ in range(3)] == [True, True, False]
    runtime = launching.knobs.runtime
    hook = lambda metadata: None  # noqa: E731
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(runtime, name)
        chain.add(hook)
        assert worked_out()
        chain.remove(hook)
        assert not worked_out()
        for other, heard in ((None, False), (hook, True)):
            with monkeypatch.context() as patch:
                patch.setattr(runtime, name, other)
                assert worked_out() == heard
    for name, changed in (("_cuda_isCurrentStreamCapturing", True), ("_cuda_getDevice", 0)):
        with monkeypatch.context() as patch:
            patch.setattr(torch._C, name, lambda changed=changed: changed)
            assert worked_out() and not replay.here(-1)
    assert not worked_out() and len(runs) == 8


def test_a_map_is_made_once_for_an_address_and_few_are_kept() -> None:
    made: list[int] = []
    maps = launching.Maps([8, 8], [8, 1], lambda d: made.append(d.base.data_ptr()) or (d.base.data_ptr(), *d.shape, *d.strides))
    assert [maps(16), maps(32), maps(16)] == [(16, 8, 8, 8, 1), (32, 8, 8, 8, 1), (16, 8, 8, 8, 1)] and made == [16, 32]
    for index in range(3 * launching.MOST_MAPS):
        maps(16 * index)
    assert len(maps.known) <= launching.MOST_MAPS


def test_the_launcher_in_c_is_called_as_tritons_public_way_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument: with the wrapping of descriptors, classes and order of the installed Triton, and only its compiled part replaced."""
    import triton
    from triton.backends.nvidia import driver
    from triton.compiler.compiler import CompiledKernel

    signature = {"x": "*fp32", "n": "i32", "tile": "tensordesc<fp32[8, 8]>", "C": "constexpr", "y": "*fp32"}
    meta = [{"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [8, 8], "fp4_padded": False}]
    calls: list[tuple[Any, ...]] = []
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        monkeypatch.setattr(launching.knobs.runtime, hook, None)

    def compiled(*arguments: Any) -> None:
        calls.append(tuple(tuple(x) if isinstance(x, list) else x for x in arguments))

    fill = lambda *arguments: ("map", *(tuple(x) if isinstance(x, list) else x for x in arguments))  # noqa: E731
    utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill, launch=compiled)
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(type(triton.runtime.driver), "active", active)
    run = driver.CudaLauncher.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(compiled, signature, meta)
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.global_scratch_align = run.profile_scratch_size = run.profile_scratch_align = 0
    if hasattr(driver, "annotate_arguments"):
        run.gsan_enabled, run.arg_annotations, run.kernel_signature = False, ["annotations"], b"signature"
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel._run, kernel.module, kernel.function, kernel.name, kernel._module_pid = run, 1, 99, "kernel", None
    kernel.packed_metadata, kernel.metadata = (4, 1, 1024), SimpleNamespace(tensordesc_meta=meta, num_warps=4)
    kernel.src = SimpleNamespace(signature=signature)
    x, tile, y = torch.randn(64), torch.randn(8, 8), torch.randn(64)

    kernel[(5, 1, 1)](address(x), 3, Descriptor(tile, [8, 8], [8, 1]), "constant", address(y) + 128, stream=7)
    launch = launching.Launch(kernel, 5, [None, 3, Descriptor(None, [8, 8], [8, 1]), "constant", None], {0: (0, 0), 2: (1, 0), 4: (2, 128)})
    play(launch, address(x), address(tile), address(y), stream=7)
    public, direct = calls
    assert direct == public and "map" in str(direct) and "constant" in str(direct)


def play(launch: launching.Launch, *addresses: int, stream: int) -> None:
    """Runs a launch as it is written."""
    objects: list[Any] = []

    def named(x: Any) -> str:
        objects.append(x)
        return f"objects[{len(objects) - 1}]"

    source = launch.written(named)
    eval(source, {"objects": objects, "stream": stream, **{f"p{i}": x for i, x in enumerate(addresses)}})


# ------------------------------------------------------------------------------------------------------------- what makes a call


RULES: dict[str, Any] = dict(causal=False, softmax_scale=None, softcap=0.0, layout="bshd", backend="auto", out_dtype=None)
OTHERS: dict[str, Any] = dict(window_size=(-1, -1), deterministic=False, excluded=(0.0, False), return_aux=())


def key(*tensors: torch.Tensor | None, **changes: Any) -> Any:
    rules = tuple((RULES | {name: x for name, x in changes.items() if name in RULES}).values())
    return repeats.key_of(tensors, rules, **(OTHERS | {name: x for name, x in changes.items() if name in OTHERS}))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """q, k and v that say that they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    return [torch.zeros(1 << 12).as_strided((1, 8, 4, 16), (512, 64, 16, 1)) for _ in range(3)]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("change", ["shape", "stride", "dtype", "absence"])
def test_the_key_of_a_call_holds_every_layout(on_gpu: list[torch.Tensor], which: int, change: str) -> None:
    on_gpu.append(torch.zeros(1 << 12).as_strided((1, 8, 4, 16), (512, 64, 16, 1)))
    x = on_gpu[which]
    other = {
        "shape": x.as_strided((1, 9, 4, 16), x.stride()),
        "stride": x.as_strided(x.shape, (512, 16, 128, 1)),
        "dtype": x.view(torch.int32).view(x.shape),
        "absence": None,
    }[change]
    assert other is None or other.data_ptr() == x.data_ptr()
    before = key(*on_gpu)
    assert before is not None and before == key(*on_gpu)
    tensors: list[torch.Tensor | None] = [*on_gpu[:which], other, *on_gpu[which + 1 :]]
    assert key(*tensors) != before and (key(*tensors) is None) == (other is None and which < 3)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True}, {"window_size": (3, -1)}, {"window_size": (-1, 3)}, {"softmax_scale": 0.5}, {"softcap": 1.0},
        {"deterministic": True}, {"layout": "bhsd"}, {"backend": "triton"}, {"out_dtype": torch.float32}, {"return_aux": "lse"},
    ],
    ids=str,
)  # fmt: skip
def test_the_key_of_a_call_holds_every_rule(on_gpu: list[torch.Tensor], change: dict[str, Any]) -> None:
    assert key(*on_gpu, **change) not in (None, key(*on_gpu))


@pytest.mark.parametrize(
    "pair",
    [
        ({"causal": 1}, {"causal": True}), ({"causal": 0}, {"causal": False}), ({"window_size": (True, 0)}, {"window_size": (1, 0)}),
        ({"window_size": (1, False)}, {"window_size": (1, 0)}), ({"softmax_scale": True}, {"softmax_scale": 1.0}),
        ({"softcap": False}, {"softcap": 0.0}), ({"deterministic": 0}, {"deterministic": False}), ({"excluded": (False, False)}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_only_equals_a_call_that_came_before_is_another_one(
    on_gpu: list[torch.Tensor], pair: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    wrong, right = pair
    assert key(*on_gpu, **wrong) != key(*on_gpu, **right) != None  # noqa: E711


@pytest.mark.parametrize(
    "change",
    [
        {"window_size": [-1, -1]}, {"window_size": (1, 2, 3)}, {"window_size": (1, [])}, {"excluded": (0.5, False)},
        {"excluded": (0.0, True)}, {"return_aux": "entropy"}, {"return_aux": ("lse",)}, {"return_aux": None}, {"out_dtype": []},
        {"softcap": torch.ones(2)},
    ],
    ids=str,
)  # fmt: skip
def test_other_calls_have_no_key(on_gpu: list[torch.Tensor], change: dict[str, Any]) -> None:
    assert key(*on_gpu, **change) is None


def test_torchs_settings_are_read_on_every_call(on_gpu: list[torch.Tensor]) -> None:
    before, flag = key(*on_gpu), torch.are_deterministic_algorithms_enabled()
    try:
        keys = []
        for setting in (True, False):
            torch.use_deterministic_algorithms(setting)
            keys.append(key(*on_gpu, deterministic=None))
            assert key(*on_gpu) == before
        assert keys[0] != keys[1]
    finally:
        torch.use_deterministic_algorithms(flag)
    torch.set_float32_matmul_precision("high")
    try:
        assert key(*on_gpu) != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert key(*on_gpu) == before


def test_what_watches_or_transforms_a_call_sees_the_operator(on_gpu: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(*on_gpu) is not None
    with FlopCounterMode(display=False):
        assert key(*on_gpu) is None
    with torch.autograd.profiler.profile():
        assert key(*on_gpu) is None
    with torch.autograd.forward_ad.dual_level():
        assert key(*on_gpu) is None
    with monkeypatch.context() as patch:  # a build without CUDA has no autocast for it
        patch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "cuda")
        assert key(*on_gpu) is None

    class Watched(torch.Tensor):
        pass

    assert key(on_gpu[0].as_subclass(Watched), *on_gpu[1:]) is None
    torch.func.vmap(lambda x: x if key(x, x, x) is None else 1 / 0)(torch.zeros(2, 1, 8, 4, 16))
    assert key(*(x.to_sparse() for x in on_gpu)) is None


def nothing_comes_again(patch: pytest.MonkeyPatch) -> None:
    for look_up in ("key_of", "again", "again_over_a_cache"):
        patch.setattr(repeats, look_up, lambda *_: None)


def test_a_call_that_comes_again_has_the_results_of_one_that_does_not(on_gpu: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tiled path, of which nothing is recorded: outputs, gradients, second derivatives, gradients of some inputs, hooks."""
    monkeypatch.setattr(plan, "target_of", lambda device: plan.Target("cpu"))
    offsets = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    calls: list[dict[str, Any]] = [
        {"causal": True},
        {"return_aux": "lse", "window_size": (2, -1)},
        {"layout": "bhsd", "softcap": 3.0},
        {"bias": torch.randn(4, 4), "mask": torch.tensor([True, False, True, True]), "return_aux": "lse"},
        {"alibi_slopes": torch.rand(2, 4), "learnable_sink": torch.randn(4), "seqused_q": torch.tensor([4, 3], dtype=torch.int32)},
        {"bias": torch.randn(4, 4, requires_grad=True), "seqused_k": torch.tensor([2, 4], dtype=torch.int32)},
        {"bias": torch.randn(2, 1, 4, 4, requires_grad=True), "alibi_slopes": torch.rand(4, requires_grad=True)},
        {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True},
        {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets + 1, "max_seqlen_k": 5, "return_aux": "lse", "window_size": (1, 1)},
        {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "learnable_sink": torch.randn(4, requires_grad=True), "return_aux": "lse"},
    ]
    for call in calls:
        sizes = (8, 4, 16) if "cu_seqlens_q" in call else (2, 4, 4, 16)
        inputs = [torch.randn(*sizes, requires_grad=True) for _ in range(3)]

        def derivatives_of(inputs: list[torch.Tensor], call: dict[str, Any]) -> list[torch.Tensor]:
            differentiable = [*inputs, *(x for x in call.values() if isinstance(x, torch.Tensor) and x.requires_grad)]
            result = (attention_varlen if "cu_seqlens_q" in call else attention)(*inputs, **call)
            outputs = [result[0], result[1].lse] if isinstance(result, tuple) else [result]
            loss = sum(x.square().sum() for x in outputs)
            first = torch.autograd.grad(loss, differentiable, create_graph=True)
            some = torch.autograd.grad(sum(x.sum() for x in outputs), differentiable[-1:], retain_graph=True)
            return [*outputs, *first, *some, *torch.autograd.grad(first[0].square().sum(), differentiable)]

        with monkeypatch.context() as patch:
            nothing_comes_again(patch)
            expected = derivatives_of(inputs, call)
        for _ in range(3):
            for x, y in zip(derivatives_of(inputs, call), expected, strict=True):
                assert torch.equal(x, y) and x.stride() == y.stride()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            for x, y in zip(derivatives_of(inputs, call), expected, strict=True):
                torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", ["packed", "cross", "documents"])
def test_a_checkpoint_that_is_watched_on_one_side_alone(on_gpu: list[torch.Tensor], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares what a call saves, which has to be the same whichever way the call goes."""
    monkeypatch.setattr(plan, "target_of", lambda device: plan.Target("cpu"))
    offsets = torch.tensor([0, 5, 32], dtype=torch.int32)
    rows, call, options = (32,), attention_varlen, {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    if kind == "cross":
        options["cu_seqlens_k"] = offsets.clone()
    elif kind == "documents":
        rows, call, options = (1, 32), attention, {"mask": masks.Document.from_cu_seqlens(offsets, 32)}
    inputs = [torch.randn(*rows, 4, 16, requires_grad=True) for _ in range(3)]
    for _ in range(3):
        expected = torch.autograd.grad(call(*inputs, **options).sum(), inputs)
    with FlopCounterMode(display=False):
        out = checkpoint(lambda *x: call(*x, **options), *inputs, use_reentrant=False)
    for x, y in zip(torch.autograd.grad(out.sum(), inputs), expected, strict=True):
        torch.testing.assert_close(x, y)


# ----------------------------------------------------------------------------------------------------------------- over a cache


def cached(**changes: Any) -> dict[str, torch.Tensor]:
    """A step of decoding: two items that append a token each."""
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    caches = [torch.randn(2, 32, 2, 16) for _ in range(2)]
    return dict(q=q, k_cache=caches[0], v_cache=caches[1], k=k, v=v, cache_seqlens=torch.tensor([3, 20], dtype=torch.int32)) | changes


def test_a_repeated_call_over_a_cache_appends_once_and_tells_autograd(on_gpu: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "target_of", lambda device: plan.Target("cpu"))
    for _ in range(5):
        call = cached()
        twin = {name: x.clone() for name, x in call.items()}
        versions = call["k_cache"]._version, call["v_cache"]._version
        out, aux = attention_with_kvcache(**call, causal=True, return_aux="lse")
        with monkeypatch.context() as patch:
            nothing_comes_again(patch)
            expected, lse = attention_with_kvcache(**twin, causal=True, return_aux="lse")
        assert torch.equal(out, expected) and torch.equal(aux.lse, lse.lse)
        assert all(torch.equal(call[name], twin[name]) for name in call)
        assert call["k_cache"]._version > versions[0] and call["v_cache"]._version > versions[1]
    with pytest.raises(UnsupportedAttention, match="requires grad"):
        attention_with_kvcache(**cached(q=torch.randn(2, 1, 4, 16, requires_grad=True)), causal=True, return_aux="lse")


def test_values_inside_the_keys_are_told_from_values_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same layouts: a kernel that loads both from one place must not be played for two."""
    monkeypatch.setattr(repeats, "_over_caches", replay.Passes())
    kernel = Kernel(k="*fp32", v="*fp32", out="*fp32")

    def read(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = k.new_empty(4)
        replay.start(kernel, 1, k, v, out)
        return out

    q = torch.randn(4)
    for together in (True, True, False, False, True):
        k = torch.randn(8)
        v = k.view(8) if together else torch.randn(8)
        (out,) = repeats.over_a_cache(("key",), (q, k, v, None), (), lambda k=k, v=v: (read(k, v),))
        launched = [x if isinstance(x, int) else x.data_ptr() for x in kernel.launches[-1][1:]]
        assert launched == [k.data_ptr(), v.data_ptr(), out.data_ptr()]
    assert len(repeats._over_caches.known) == 2 and all(isinstance(x, replay.Pass) for x in repeats._over_caches.known.values())
