"""What goes on while a forward kernel compiles: the rehearsal of the backward pass compiles what that pass launches, and nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton

from tilewise.kernels import replay
from tilewise.kernels.hopper import backward_compiling, backward_launch, compiling, configs, launch
from tilewise.kernels.triton import kernel_index, meanwhile, recipes
from tilewise.plan import Cotangents, Gradients, Operands, Outputs, Rules, Saved, Target

H200 = Target("cuda", (9, 0), "NVIDIA H200", index=0)


class Compiled:
    """Stands for a compiled kernel."""

    src = metadata = None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_: None


COMPILED = Compiled()
LENGTHS = {"seqused_q": torch.tensor([60]).int(), "seqused_k": torch.tensor([50]).int()}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal, ordered": ({}, {"window_right": 0, "deterministic": True}),
    "lengths and slopes": (
        {"seqused_q": torch.tensor([60]).int(), "seqused_k": torch.tensor([50]).int(), "alibi_slopes": torch.ones(1, 4)},
        {},
    ),
    "sink": ({"sink": torch.ones(4)}, {"window_left": 16}),
    "dropout": ({"dropout_seed": torch.tensor(3)}, {"dropout_p": 0.5}),
    "tiles apart": ({}, {"window_right": 0}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch):
    """A machine with one H200, on which kernels compile to nothing: what was compiled and launched, and in which thread."""
    noted: list[tuple[str, bool, Any]] = []

    def note(what: str, x: Any = None) -> None:
        noted.append((what, meanwhile.rehearsing(), x))

    def find(*facts: Any) -> None:
        note("facts", facts)

    def run(self, *given, warmup, **named):
        assert warmup == meanwhile.rehearsing()
        note("compiled", self.__name__)
        return COMPILED

    def forward(*_):
        time.sleep(0.2)
        note("compiled", "attention_forward")
        return COMPILED, configs.Addresses(0, 0)

    def backward(*_):
        note("compiled", "attention_backward")
        return COMPILED, 0

    monkeypatch.setattr(kernel_index, "find", find)
    monkeypatch.setattr(kernel_index, "keep", lambda *_, **__: None)
    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(compiling, "compile_forward", forward)
    monkeypatch.setattr(backward_compiling, "compile_backward", backward)
    monkeypatch.setattr(replay, "note", lambda kernel, *_: note("launched"))
    for module in (launch, backward_launch):
        monkeypatch.setattr(module, "_programs", {})
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(backward_launch, "APART_FROM", 64)
    monkeypatch.setattr(launch, "target_of", lambda device: H200)
    monkeypatch.setattr(recipes, "_compiled", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: "key")
    return noted


def call(name: str, needs: tuple[str, ...] = ("q", "k", "v", "alibi_slopes", "sink")) -> tuple[Operands, Rules, Outputs]:
    tensors, rules = VARIANTS[name]
    heads_k = 2 if name == "tiles apart" else 4
    q, k, v, out = (torch.zeros(1, 64, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for heads in (4, heads_k, heads_k, 4))
    return Operands(q, k, v, **tensors), Rules(0.125, **rules), Outputs(out, torch.zeros(1, 4, 64), needs=frozenset(needs))


def differentiate(t: Operands, r: Rules, out: Outputs) -> None:
    slopes, sink = (
        None if x is None or name not in out.needs else x.float() for name, x in (("alibi_slopes", t.alibi_slopes), ("sink", t.sink))
    )
    grads = Gradients(*(torch.empty_like(x) for x in (t.q, t.k, t.v)), dalibi_slopes=slopes, dsink=sink)
    backward_launch.launch(t, r, Saved(out.out, out.lse), Cotangents(torch.ones_like(out.out)), grads)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_rehearsal_compiles_what_the_backward_pass_launches(name: str, calls) -> None:
    t, r, out = call(name)
    launch.program_for(t, r, out)
    meanwhile.wait()
    compiled = [(x, rehearsed) for what, rehearsed, x in calls if what == "compiled"]
    kernels = ["prepare_rows", "attention_backward", "finish_queries", *["finish_keys"] * (name == "tiles apart")]
    assert set(compiled[:-1]) == {(kernel, True) for kernel in kernels}
    assert compiled[-1] == ("attention_forward", False), "the rehearsal waits for the forward kernel"
    assert not any(what == "launched" for what, _, _ in calls)
    rehearsed = [x for what, _, x in calls if what == "facts"][1:]
    calls.clear()
    backward_launch._programs.clear()  # as on a GPU, where programs belong to a device and that of a rehearsal is none
    differentiate(t, r, out)
    assert [x for what, _, x in calls if what == "facts"] == rehearsed, "the pass needs other kernels than the rehearsal compiled"


def test_the_backward_pass_waits_for_its_rehearsal(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    ordinary = backward_compiling.compile_backward

    def slow(*arguments):
        if meanwhile.rehearsing():
            assert go.wait(20)
        return ordinary(*arguments)

    monkeypatch.setattr(backward_compiling, "compile_backward", slow)
    t, r, out = call("plain")
    launch.program_for(t, r, out)
    threading.Timer(0.3, go.set).start()
    backward_launch._programs.clear()
    backward_launch.program_for(t, r, False, "")
    order = [rehearsed for what, rehearsed, x in calls if x == "attention_backward"]
    assert order == [True, False] and go.is_set()


def test_all_who_wait_wait_for_the_same_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward passes of two devices run in two threads."""
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    go, ended, returned = threading.Event(), [], []
    meanwhile.rehearse(lambda: (go.wait(20), ended.append(True)), 0)
    waiting = [threading.Thread(target=lambda: (meanwhile.wait(), returned.append(bool(ended)))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    time.sleep(0.1)
    assert not returned
    go.set()
    for thread in waiting:
        thread.join(20)
    assert returned == [True] * 4 and not meanwhile._rehearsals


def test_where_no_thread_can_be_had_work_is_done_when_it_is_due(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refused)
    t, r, out = call("plain")
    launch.program_for(t, r, out)
    differentiate(t, r, out)
    assert not any(rehearsed for _, rehearsed, _ in calls) and any(what == "launched" for what, _, _ in calls)


ENDS = """
import contextlib, threading, time
import torch
from tilewise.kernels.triton import meanwhile

torch.cuda.device = lambda index: contextlib.nullcontext()

def compiles():
    time.sleep(0.5)
    print("compiled", flush=True)

begins = threading.Thread(target=lambda: meanwhile.rehearse(compiles, 0), daemon=True)
begins.start()
begins.join()
"""


def test_a_process_ends_after_its_rehearsal() -> None:
    """Also one that a thread of autograd began, which are daemons: a forward pass that is recomputed for the backward pass."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


@pytest.mark.parametrize("case", ["no gradient", "no gradient of q", "a bias", "found"])
def test_what_has_no_use_is_not_rehearsed(case: str, calls, monkeypatch: pytest.MonkeyPatch) -> None:
    t, r, out = call("plain", {"no gradient": (), "no gradient of q": ("k", "v")}.get(case, ("q", "k", "v")))
    if case == "a bias":
        t.bias = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16)
    elif case == "found":
        monkeypatch.setattr(kernel_index, "find", lambda *_: kernel_index.Kept(COMPILED, (0, 0)))
    launch.program_for(t, r, out)
    assert not meanwhile._rehearsals


def test_a_rehearsal_that_fails_is_not_heard_of(calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_):
        raise RuntimeError("no compiler")

    ordinary = backward_compiling.compile_backward
    monkeypatch.setattr(backward_compiling, "compile_backward", fails)
    t, r, out = call("plain")
    launch.program_for(t, r, out)
    with pytest.raises(RuntimeError, match="no compiler"):
        differentiate(t, r, out)
    monkeypatch.setattr(backward_compiling, "compile_backward", ordinary)
    differentiate(t, r, out)
    assert any(what == "launched" for what, _, _ in calls)


def test_a_forward_pass_says_which_gradients_may_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise import attention, masks
    from tilewise.kernels import tiled

    seen: list[frozenset[str]] = []
    ordinary = tiled.forward
    monkeypatch.setattr(tiled, "forward", lambda t, r, out: (seen.append(out.needs), ordinary(t, r, out)))
    for differentiable in (True, False):
        q, k, v = (torch.randn(1, 8, 2, 16, requires_grad=differentiable) for _ in range(3))
        for sink in (None, torch.zeros(2)):
            attention(q, k.detach(), v, mask=masks.Chunked(4), learnable_sink=sink, backend="tiled")
    assert seen == [{"q", "v"}] * 2 + [frozenset()] * 2


class Driver:
    """Stands for Triton's: made on a machine with a device, where the launcher of a kernel may be a library of C that takes a while."""

    def __init__(self, done: list[Any]) -> None:
        self.done = done

    @property
    def utils(self) -> None:
        time.sleep(0.1)
        self.done.append("driver")

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        time.sleep(0.1)
        self.done.append((source, len(metadata.tensordesc_meta), metadata.num_ctas))


def test_the_compiler_is_hashed_and_has_a_driver_before_a_compilation_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(triton.runtime.cache, "triton_key", lambda: (time.sleep(0.2), done.append("hashed")))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(done))
    monkeypatch.setattr(triton.runtime.driver, "_default", Driver(done))
    with meanwhile.compiler_made():
        done.append("meanwhile")
    assert done == ["meanwhile", "driver", "hashed"]


def test_a_launcher_is_made_while_its_kernel_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(done))
    monkeypatch.setattr(triton.runtime.driver, "_default", Driver(done))

    tile = "tensordesc<bf16[1, 1, 64, 64],...>"
    source = SimpleNamespace(signature={"q": tile, "lse": "*fp32", "k": tile, "n": "i32"})
    with meanwhile.launcher_made(source):
        done.append("compiled")
    assert done == ["compiled", (source, 2, 0)]


def test_what_cannot_be_made_ahead_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", None)  # as without a device
    with meanwhile.compiler_made(), meanwhile.launcher_made(None):
        pass
