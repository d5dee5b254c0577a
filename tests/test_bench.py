"""The benchmark's own promises: what it checks, what it refuses to report, and that it ends in time."""

import functools
import io
import itertools
import json
import math
import re
import subprocess
import sys
import time
import types
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise import reference
from tilewise.bench import adapters, cases, check, child, masked, peers, report, run, source_hash, step, timing, tune
from tilewise.bench.adapters import eager
from tilewise.bench.cases import Bar, Case
from tilewise.bench.check import Oracle, relative_error
from tilewise.bench.provider import Inputs, Prepared, Provider, Unsupported
from tilewise.kernels.triton import configs
from tilewise.plan import Target

KEYS = {
    *("run_id", "case", "head_dim", "head_dim_v", "seqlen", "batch", "heads", "kv_heads", "causal", "dtype", "pass", "provider"),
    *("ms", "ms_q1", "ms_q3", "rounds", "tflops", "tbps", "peak_bytes", "error", "status"),
    *("device", "torch", "triton", "clocks_mhz", "power_w", "source_hash"),
}
TINY = Case("tiny", "full", seqlen_q=40, heads=4, head_dim=16, batch=2, dtype="fp32", device="cpu")


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(run, "ceilings", lambda device: (1e12, 1e11))


def options_of(case: Case, inputs: Inputs) -> dict:
    """The arguments of the specification for a case."""
    return dict(causal=case.causal, window_size=case.window, softcap=case.softcap, bias=inputs.bias, seqused_k=inputs.seqused_k)


def benchmark(case: Case, providers: list[Provider], **options) -> run.Benchmark:
    """A benchmark of one case with these providers alone."""
    made = run.Benchmark(run.Options(device="cpu", rounds=3, round_ms=1, **options), report.Reporter(quiet=True))
    made.cases, made.providers = [case], providers
    return made


def counting(name: str, order: list[str], change=lambda out: out) -> Provider:
    """A correct provider that notes its calls; `change` may spoil its results."""

    def prepare(case, inputs):
        correct = peers.BUILT_IN["eager"].prepare(case, inputs).call

        def call(*tensors):
            order.append(name)
            return change(correct(*tensors))

        return Prepared(call)

    return Provider(name, prepare)


# ------------------------------------------------------------------------------------------------------------------------ cases


def test_the_paper_grid_has_its_18_cells():
    grid = [c for c in cases.CASES if c.group == "paper"]
    assert len({(c.head_dim, c.causal, c.seqlen_q) for c in grid}) == len(grid) == 18
    assert {c.batch * c.seqlen_q for c in grid} == {16384}
    assert {c.heads * c.head_dim for c in grid} == {2048}


def test_ids_are_unique_and_select_keeps_the_order_of_its_patterns():
    ids = [c.id for c in cases.CASES]
    assert len(set(ids)) == len(ids)
    assert [c.group for c in cases.select("short,bias", "cuda")] == ["short", "short", "bias"]
    assert {c.device for c in cases.select("all", "cpu")} == {"cpu"}
    with pytest.raises(ValueError, match=r"no case for cpu matches 'paper'; groups: cpu"):
        cases.select("paper", "cpu")


def test_padded_cases_count_the_keys_that_are_there():
    case = replace(TINY, padded=True)
    assert case.key_lengths() == [20, 40]
    assert case.flops("fwd") * 4 == TINY.flops("fwd") * 3


def test_models_are_there_by_name():
    models = {c.label: c for c in cases.CASES if c.group == "models"}
    llama, deepseek, gemma = models["llama3-70b"], models["deepseek-v3-prefill"], models["gemma2-9b-local"]
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.causal) == (64, 8, 128, True)
    assert (deepseek.head_dim, deepseek.head_dim_v) == (192, 128)
    assert gemma.window == (4095, -1) and gemma.softcap == 50.0 and gemma.kv_heads == 8
    assert models["bert-base-padded"].padded and not models["bert-base-padded"].causal
    assert {"llama3-8b", "gpt2", "vit-l16", "wan-14b-video"} < set(models)
    kinds = {c.kind for c in cases.CASES if c.device == "cuda"}
    assert kinds >= {"speed", "host", "memory", "first_call"}
    assert any(c.dtype == "fp32" for c in cases.CASES if c.device == "cuda")


def shrunk(case: Case) -> Case:
    """The case with everything that makes it itself, small enough for a test and on the CPU."""
    heads = 2 * case.heads // case.kv_heads
    n = min(case.seqlen_q, 48)
    keys = min(case.seqlen_k, 48) if case.cached else n
    bias = None if case.bias is None else tuple(min(size, limit) for size, limit in zip(case.bias, (2, heads, n, n), strict=True))
    window = tuple(min(side, 11) for side in case.window)
    sizes = dict(seqlen_q=n, seqlen_k=keys, batch=min(case.batch, 2), heads=heads, kv_heads=2, bias=bias, window=window)
    dims = dict(head_dim=case.head_dim // 8, head_dim_v=case.head_dim_v // 8)
    mask = "documents-3" if case.mask.startswith("lengths") else case.mask  # the lengths themselves are not to be shrunk
    return replace(case, **sizes, **dims, mask=mask, dtype="fp32", device="cpu", kind="speed", bars=(), providers=())


def test_every_case_is_a_problem_that_runs(monkeypatch):
    """Each case, shrunk, through ours and unfused attention: all features reach the call, and both agree with the oracle."""
    monkeypatch.setattr(run.Benchmark, "_collect", lambda self: None)  # nothing here needs its memory back
    small = {replace(shrunk(case), group="small", label="") for case in cases.CASES}
    assert any(c.softcap and c.window != (-1, -1) for c in small) and any(c.padded for c in small) and any(c.bias for c in small)
    for case in sorted(small, key=repr):
        passes = ("fwd",) if case.cached else ("fwd", "bwd")
        names = ("tilewise",) if case.page_size else ("tilewise", "eager")
        made = benchmark(replace(case, passes=passes), [peers.BUILT_IN[name] for name in names])
        made.options.rounds = 1
        rows = made.run()
        found = [row["reason"] for row in rows]
        assert len(rows) == len(passes) * len(names) and {row["status"] for row in rows} == {"ok"}, (case, found)
        assert case.flops("bwd") > case.flops("fwd") > 0 and case.bytes("bwd") > case.bytes("fwd") > 0


# ------------------------------------------------------------------------------------------------------------ installed peers


def exact_out(q, k, v, **options):
    with torch.no_grad():
        return reference.attention(q, k, v, **options)[0].to(q.dtype)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """The signature that flash-attn 2.8 documents."""
    return exact_out(q, k, v, causal=causal, window_size=window_size, softcap=softcap)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
):
    """Likewise, of packed sequences."""
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    with torch.no_grad():
        return reference.attention_varlen_full(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal).out.to(q.dtype)


class LowerTriangularMask:
    """Stands for the bias of that name in xformers.ops."""


def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None, output_dtype=None):
    """The signature that xFormers documents; causal is given as a bias object."""
    assert attn_bias is None or isinstance(attn_bias, LowerTriangularMask)
    return exact_out(query, key, value, causal=attn_bias is not None)


class BatchPrefillWithRaggedKVCacheWrapper:
    """The part of FlashInfer's wrapper that its documentation shows: plan once, then run on packed tensors."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, *, causal=False, window_left=-1,
        logits_soft_cap=None, q_data_type="float16",
    ):  # fmt: skip
        self.batch = len(qo_indptr) - 1
        self.options = dict(causal=causal, window_size=(window_left, -1), softcap=logits_soft_cap or 0.0)

    def run(self, q, k, v):
        return exact_out(*(x.unflatten(0, (self.batch, -1)) for x in (q, k, v)), **self.options).flatten(0, 1)


@pytest.mark.parametrize("name", ["fa2", "xformers", "flashinfer"])
def test_installed_peers_are_called_as_they_document(name, monkeypatch):
    module = {"fa2": "flash_attn", "xformers": "xformers.ops", "flashinfer": "flashinfer"}[name]
    stand_in = types.SimpleNamespace(
        flash_attn_func=flash_attn_func,
        flash_attn_varlen_func=flash_attn_varlen_func,
        LowerTriangularMask=LowerTriangularMask,
        memory_efficient_attention=memory_efficient_attention,
        BatchPrefillWithRaggedKVCacheWrapper=BatchPrefillWithRaggedKVCacheWrapper,
    )
    monkeypatch.setitem(sys.modules, module.partition(".")[0], stand_in)
    monkeypatch.setitem(sys.modules, module, stand_in)
    (provider,), missing = peers.find(name, "cuda")
    assert not missing
    causal = replace(TINY, causal=True, dtype="bf16", passes=("fwd",))
    rows = [row for case in (TINY, causal) for row in benchmark(replace(case, dtype="bf16", passes=("fwd",)), [provider]).run()]
    assert [row["status"] for row in rows] == ["ok", "ok"], [row["reason"] for row in rows]
    if name != "xformers":
        windowed = replace(causal, window=(9, -1), softcap=3.0, kv_heads=2)
        assert [row["status"] for row in benchmark(windowed, [provider]).run()] == ["ok"]
    packed = replace(causal, causal=False, batch=1, mask="lengths-3", packed=True)
    assert [row["status"] for row in benchmark(packed, [provider]).run()] == ["ok" if name == "fa2" else "unsupported"]
    (refused,) = benchmark(replace(causal, bias=(1, 4, 40, 40)), [provider]).run()
    assert refused["status"] == "unsupported" and "bias" in refused["reason"]


# ------------------------------------------------------------------------------------------------------------------------ check


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(causal=True),
        dict(causal=True, seqlen_k=56),
        dict(window=(7, 3)),
        dict(causal=True, window=(9, -1)),
        dict(kv_heads=2, head_dim_v=8),
        dict(softcap=1.5),
        dict(bias=(1, 4, 40, 40)),
        dict(bias=(2, 1, 40, 40), causal=True),
        dict(padded=True),
    ],
    ids=str,
)
def test_the_oracle_is_the_specification(fields):
    """Its slices against autograd through the reference, all in float64."""
    case = replace(TINY, **fields)
    if fields.get("kv_heads"):
        case = replace(case, kv_heads=2)
    inputs = Inputs.make(case)
    leaves = inputs.leaves()
    exact = [x.double() for x in leaves]
    arguments = options_of(case, inputs) | {"bias": exact[3] if inputs.bias is not None else None}
    out, _ = reference.attention(*exact[:3], **arguments)
    grads = torch.autograd.grad(out, leaves, inputs.dout.double())
    results = {"out": out.detach(), **dict(zip(("dq", "dk", "dv", "dbias"), grads, strict=False))}
    oracle = Oracle(case, inputs, gradients=True)
    for names in (["out"], ["dq", "dk", "dv"]):
        error, right = oracle.judge({name: results[name] for name in names})
        assert right and error < 1e-6
    if case.bias is not None and case.bias[1] == case.heads:
        error, right = oracle.judge({"dbias": results["dbias"]})
        assert right and error < 1e-6


@pytest.mark.parametrize("spoil", ["last head", "last row", "nan"])
def test_the_oracle_sees_a_wrong_result(spoil):
    inputs = Inputs.make(TINY)
    out = peers.BUILT_IN["eager"].prepare(TINY, inputs).call(inputs.q, inputs.k, inputs.v).clone()
    oracle = Oracle(TINY, inputs, gradients=False)
    assert oracle.judge({"out": out})[1]
    if spoil == "last head":
        out[-1, :, -1] = out[-1, :, 0]
    elif spoil == "last row":
        out[0, -1, 0] = 0
    else:
        out[0, 3, 0, 2] = math.nan
    error, right = oracle.judge({"out": out})
    assert not right and not error < 0.01


def test_sampled_rows_include_both_ends():
    case = replace(TINY, seqlen_q=600)
    inputs = Inputs.make(case)
    oracle = Oracle(case, inputs, gradients=False, sampled=True)
    assert oracle.rows is not None and len(oracle.rows) == 256
    assert oracle.rows[0] == 0 and oracle.rows[-1] == 599
    out = peers.BUILT_IN["eager"].prepare(case, inputs).call(inputs.q, inputs.k, inputs.v)
    assert oracle.judge({"out": out})[1]


def test_relative_error_of_zeros_is_the_difference():
    assert relative_error(torch.full((4,), 0.5), torch.zeros(4)) == 1.0


# -------------------------------------------------------------------------------------------------------------------------- run


def test_every_row_has_the_keys_of_the_format_and_the_file_is_what_was_returned(tmp_path):
    out = tmp_path / "rows.jsonl"
    made = benchmark(TINY, [peers.BUILT_IN[name] for name in ("tilewise", "eager", "sdpa_flash", "sdpa_cudnn")], out=out)
    rows = made.run()
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    assert {row["pass"] for row in rows} == {"fwd", "bwd", "fwd+bwd"}
    for row in rows:
        assert set(row) >= KEYS
        if row["provider"] == "sdpa_cudnn":
            assert row["status"] == "unsupported" and row["reason"]
            assert row["ms"] is row["tflops"] is row["tbps"] is None
        else:
            assert row["status"] == "ok", row["reason"]
            assert row["ms_q1"] <= row["ms"] <= row["ms_q3"]
            assert row["rounds"] == len(row["ms_rounds"]) == 3
            assert row["error"] < 1e-5
            assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / row["ms"] / 1e9, rel=0.02, abs=1e-3)


def test_no_speed_for_a_wrong_result_and_out_of_memory_is_a_value():
    def out_of_memory(case, inputs):
        def call(*tensors):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        return Prepared(call)

    providers = [counting("wrong", [], lambda out: out * 1.01), Provider("eager", out_of_memory)]
    rows = benchmark(replace(TINY, passes=("fwd", "bwd")), providers).run()
    for row in rows:
        assert row["ms"] is row["tflops"] is row["tbps"] is None and row["rounds"] == 0
        if row["provider"] == "wrong":
            assert row["status"] == "wrong" and row["error"] > 1e-3
        else:
            assert row["status"] == "oom"
            assert row["predicted_bytes"] > 2 * 2 * 4 * 40 * 40 * 4
    assert "wrong" in report.closing_tables(rows)


def test_providers_take_turns_in_balanced_orders():
    order: list[str] = []
    made = benchmark(replace(TINY, passes=("fwd",)), [counting(name, order) for name in "abc"])
    made.run()
    turns = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    assert turns[:3] == ["a", "b", "c"]  # the checks
    assert "".join(turns[3:]) == "abcbacbca"


@pytest.mark.parametrize("size", range(8))
def test_everyone_stands_behind_everyone_equally_often(size):
    orders = run.balanced_orders(size)
    pairs = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len(pairs) == size * (size - 1) and len({*pairs.values()}) <= 1


def test_a_spent_budget_keeps_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(run.Benchmark, "_watch", lambda self: None)  # it ends the process, which here is the test's own
    slow = Provider("slow", lambda case, inputs: Prepared(lambda *t: (time.sleep(0.2), eager(case, inputs).call(*t))[1]))
    made = benchmark(TINY, [slow], budget=4.0, out=tmp_path / "rows.jsonl")
    made.cases = [TINY] * 50
    begin = time.monotonic()
    rows = made.run()
    assert time.monotonic() - begin < 8
    assert 0 < len(rows) < 150


HANGING = """
import time, sys
from tilewise.bench import peers, provider, run, report
from tilewise.bench.cases import Case
case = Case("tiny", "full", seqlen_q=40, heads=4, head_dim=16, dtype="fp32", device="cpu", passes=("fwd",))
made = run.Benchmark(run.Options(device="cpu", budget=4.0, round_ms=1), report.Reporter())
hang = provider.Provider("hang", lambda case, inputs: provider.Prepared(lambda *t: time.sleep(600)))
made.cases, made.providers = [case, case], [peers.BUILT_IN["eager"]]
original = made._case
made._case = lambda c: (original(c), setattr(made, "providers", [hang]))[0]
made.run()
"""


def test_a_call_that_never_returns_does_not_outlive_the_budget():
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begin < 60
    assert "budget of 4 s spent inside a call" in done.stdout


def test_a_child_answers_first_calls_and_memory(capsys):
    first = next(c for c in cases.CASES if c.group == "cpu_first_call")
    assert child.main([json.dumps({"id": first.id, "pass": "fwd+bwd", "provider": "eager"})]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ms"] > 0 and answer["ms_warm"] > 0


def test_a_child_times_its_first_and_its_third_call(monkeypatch, capsys):
    """The second is slower than all that follow: it is watched, so that they can be played."""
    clock, lasts = [0.0], [8.0, 4.0, 2.0]

    def passes(*of: object) -> None:
        clock[0] += lasts.pop(0)

    monkeypatch.setattr(child, "_once", passes)
    monkeypatch.setattr(child, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    first = next(c for c in cases.CASES if c.group == "cpu_first_call")
    assert child.main([json.dumps({"id": first.id, "pass": "fwd", "provider": "eager"})]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ms"], answer["ms_warm"], lasts) == (8000, 2000, [])


def test_ceilings_are_measured():
    product, copy = timing.ceilings("cpu")
    assert product > copy / 100 > 0


def test_unknown_providers_are_refused_and_absent_ones_are_named():
    with pytest.raises(ValueError, match="no provider is named 'fa9'"):
        peers.find("fa9", "cpu")
    found, missing = peers.find("eager,fa3,tilewise:tiled", "cpu")
    assert [p.label for p in found] == ["eager", "tilewise:tiled"]
    assert "fa3" in missing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar_and_the_time_left(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stdout", Terminal())
    made = benchmark(TINY, [peers.BUILT_IN["eager"]], budget=600.0)
    made.report = report.Reporter()
    made.cases = [TINY] * 3
    made.run()
    shown = sys.stdout.getvalue()
    assert all(f"{done}/3" in shown for done in range(4)) and "\u2501" in shown
    assert re.search(r"tiny/full \w+ eager, \d+ s left", shown)
    assert shown.count("TFLOP/s") >= 3  # and a line for each measurement, above the bar


def test_flex_attention_is_compiled_anew_for_each_case_and_never_run_eagerly(monkeypatch):
    """What it compiled for an earlier case would make shapes dynamic, and a break of the graph would run unfused attention in its place."""
    import torch._dynamo
    import torch._functorch.config

    done: list[Any] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: done.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: done.append(options) or function)
    with torch._functorch.config.patch(donated_buffer=True):  # restored after
        for case in (TINY, replace(TINY, causal=True)):
            adapters.flex(case, Inputs.make(case))
    assert done == ["reset", {"dynamic": False, "fullgraph": True}] * 2


# ------------------------------------------------------------------------------------------------------------------------- step


def step_case(block: str, **fields) -> Case:
    """A training step small enough for a test."""
    sizes = dict(seqlen_q=48, heads=4, kv_heads=4 if block == "gpt2" else 2, head_dim=16, batch=2, dtype="fp32")
    return Case("step", block, **{**sizes, **fields}, causal=True, kind="step", block=block, device="cpu", passes=("fwd+bwd",))


@pytest.fixture
def quick_compiler(monkeypatch):
    """Graphs are captured as always; what they hold is not turned into C++, which takes half a minute each."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize("block", ["gpt2", "llama"])
def test_a_training_step_is_checked_then_timed(block, quick_compiler):
    providers = [
        *peers.find("tilewise,tilewise:deterministic,sdpa_flash,sdpa_cudnn", "cpu")[0],
        counting("wrong", [], lambda out: out * 1.01),
    ]
    rows = benchmark(step_case(block), providers, budget=100.0).run()
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unsupported", "wrong"], [row["reason"] for row in rows]
    for row in rows[:3]:
        assert set(row) >= KEYS and row["kind"] == "step" and row["pass"] == "fwd+bwd"
        assert row["rounds"] == 3 and row["ms"] > 0 and row["tflops"] is None and row["error"] < 1e-5
    assert rows[4]["ms"] is None
    assert "step/" + block in report.closing_tables(rows)


def test_unfused_attention_of_the_step_is_the_specification():
    q, k, v = (torch.randn(2, 33, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    torch.testing.assert_close(step.unfused(q, k, v), reference.attention(q, k, v, causal=True)[0])


def test_each_contestant_of_a_step_runs_its_own_kernel(quick_compiler):
    """Nothing that the compiler keeps of one contestant may serve the next: their graphs differ in what SDPA may pick alone."""
    case, found = step_case("llama"), {}
    for provider in peers.find("sdpa_math,sdpa_flash,sdpa_math", "cpu")[0]:
        training = step.Training(case, provider.prepare(case, Inputs.make(case)))
        training()
        with torch.profiler.profile() as profile:
            training()
        names = {event.name for event in profile.events()}
        assert any("flash_attention_for_cpu" in name for name in names) == (provider.name == "sdpa_flash"), provider.name
        found[provider.name] = next(training.block.parameters()).detach()
    assert found["sdpa_math"].isfinite().all() and found["sdpa_flash"].isfinite().all()


def test_a_step_moves_every_parameter_and_keeps_no_gradient(quick_compiler):
    case = step_case("gpt2")
    training = step.Training(case, peers.BUILT_IN["eager"].prepare(case, Inputs.make(case)))
    before = [parameter.detach().clone() for parameter in training.block.parameters()]
    first = training.loss(training.block, training.x, training.target).item()
    for _ in range(5):
        training()
    assert training.loss(training.block, training.x, training.target).item() < first
    for old, parameter in zip(before, training.block.parameters(), strict=True):
        assert not torch.equal(old, parameter) and parameter.grad is None
    assert training.x.grad is None


def test_a_step_is_of_memory_too():
    bars = next(c for c in cases.CASES if c.id == "step/llama3-8b").bars
    assert {bar.peer for bar in bars} == {"sdpa_flash", "sdpa_cudnn", "sdpa_efficient"}
    fields = {"case": "step", "label": "llama3-8b", "tflops": None, "pass": "fwd+bwd"}
    rows = [timed("tilewise", [1.0] * 5, peak_bytes=103, **fields), timed("sdpa_flash", [1.0] * 5, peak_bytes=100, **fields)]
    speed, memory = report.closing_tables(rows).splitlines()[-2:]
    assert "1.000 of 1.000 pass" in speed and "memory" in memory and "103 B of 100 B MISS" in memory


# ---------------------------------------------------------------------------------------------------------------- determinism


def test_rows_say_that_an_order_was_asked_for(monkeypatch):
    """And the closing tables what it costs."""
    asked = []
    original = tilewise.attention

    def noted(*tensors, **options):
        asked.append(options.get("deterministic"))
        return original(*tensors, **options)

    monkeypatch.setattr(tilewise, "attention", noted)
    rows = benchmark(replace(TINY, causal=True, passes=("bwd",)), peers.find("tilewise:deterministic,tilewise", "cpu")[0]).run()
    assert [row["status"] for row in rows] == ["ok", "ok"] and set(asked) == {True, None}
    ordered, plain = rows
    assert ordered["backend"] == f"{plain['backend']} deterministic" and ordered["provider"] == plain["provider"] == "tilewise"
    assert report.provider_label(ordered) == f"tilewise[{ordered['backend']}]"
    assert "deterministic over default:" in report.closing_tables(rows)
    packed = replace(TINY, batch=1, mask="lengths-3", packed=True, passes=("bwd",))
    assert [row["status"] for row in benchmark(packed, peers.find("tilewise:deterministic", "cpu")[0]).run()] == ["ok"]
    cached = replace(TINY, cached=True, passes=("fwd",))
    assert [row["status"] for row in benchmark(cached, peers.find("tilewise:deterministic", "cpu")[0]).run()] == ["unsupported"]


def test_the_paper_grid_is_also_measured_as_a_whole():
    """Both passes in one call, where --passes asks for it."""
    made = run.Benchmark(run.Options(cases="paper", passes="fwd+bwd", device="cuda", providers="eager"), report.Reporter(quiet=True))
    assert len(made.cases) == 18 and {tuple(made._passes(case)) for case in made.cases} == {("fwd+bwd",)}


# ----------------------------------------------------------------------------------------------------------------------- report


def timed(provider: str, ms: list[float], **fields) -> dict:
    row = dict(case="paper", label="d128-full-16384", provider=provider, backend=None, ms=sorted(ms)[len(ms) // 2], ms_rounds=ms)
    row |= dict(rounds=len(ms), tflops=500.0, status="ok", peak_bytes=None, reason=None)
    return {**row, "pass": "fwd", **fields}


def test_a_ratio_is_the_median_over_common_rounds():
    assert report.ratio(timed("tilewise", [1, 2, 4]), timed("fa2", [2, 2, 4, 100])) == 1.0


@pytest.mark.parametrize("peer_ms,verdict", [(1.34, "pass"), (1.30, "MISS")])
def test_promises_pass_within_one_percent(peer_ms, verdict):
    rows = [timed("tilewise", [1.0] * 5, backend="triton"), timed("sdpa_flash", [peer_ms] * 5)]
    last = report.closing_tables(rows).splitlines()[-1]
    assert "tilewise[triton] / sdpa_flash" in last and verdict in last
    assert Bar("fwd", "sdpa_flash", 1.35) in next(c for c in cases.CASES if c.id == "paper/d128-full-16384").bars


def test_where_we_lose_is_marked():
    rows = [timed("tilewise", [2.0] * 5), timed("fa3", [1.0] * 5)]
    assert "<- slower" in report.closing_tables(rows)


def test_the_hash_follows_kernel_sources_alone(tmp_path):
    kernels = tmp_path / "kernels" / "triton"
    kernels.mkdir(parents=True)
    (kernels / "a.py").write_text("x = 1\n")
    (tmp_path / "kernels" / "tiled.py").write_text("w = 1\n")
    before, on_cpu = (source_hash.kernel_source_hash(device, tmp_path) for device in ("cuda", "cpu"))
    (tmp_path / "api.py").write_text("y = 1\n")
    (kernels / "table.csv").write_text("z\n")
    assert source_hash.kernel_source_hash("cuda", tmp_path) == before
    (kernels / "a.py").write_text("x = 2\n")
    assert source_hash.kernel_source_hash("cuda", tmp_path) != before
    (kernels / "a.py").rename(kernels / "b.py")
    (kernels / "b.py").write_text("x = 1\n")
    assert source_hash.kernel_source_hash("cuda", tmp_path) != before
    assert source_hash.kernel_source_hash("cpu", tmp_path) == on_cpu
    (tmp_path / "kernels" / "tiled.py").write_text("w = 2\n")
    assert source_hash.kernel_source_hash("cpu", tmp_path) != on_cpu


# ------------------------------------------------------------------------------------------------------------------------- plot


def picture_row(provider: str, n: int, pass_: str = "fwd", **fields) -> dict:
    row = dict(case="paper", label=f"d64-full-{n}", kind="speed", head_dim=64, seqlen=n, heads=16, causal=False, dtype="bf16")
    row |= dict(provider=provider, backend=None, ms=1.0, ms_rounds=[1.0, 1.1], tflops=300.0, peak_bytes=None, predicted_bytes=0)
    row |= dict(status="ok", device="a device", torch="2", source_hash="0" * 64, ceiling_tflops=783.0)
    return {**row, "pass": pass_, **fields}


def test_pictures_are_drawn_in_both_themes(tmp_path):
    plot = pytest.importorskip("tilewise.bench.plot")
    rows = [picture_row(p, n, pass_) for p in ("tilewise", "fa3") for n in (1024, 4096) for pass_ in ("fwd", "bwd")]
    rows += [picture_row("tilewise", n, "fwd+bwd", case="memory", kind="memory", peak_bytes=n * 100) for n in (1024, 4096)]
    written = plot.draw(rows, tmp_path)
    names = {path.name for path in written}
    assert names == {f"{name}-{theme}.svg" for name in ("speed-fwd", "speed-bwd", "memory", "ratio") for theme in ("light", "dark")}
    assert all(path.stat().st_size > 1000 for path in written)


def test_plot_names_its_files_as_json(tmp_path, capsys):
    plot = pytest.importorskip("tilewise.bench.plot")
    results = tmp_path / "rows.jsonl"
    results.write_text("".join(json.dumps(picture_row("tilewise", n)) + "\n" for n in (1024, 4096)))
    assert plot.main([str(results), "--out", str(tmp_path), "--theme", "dark", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(tmp_path / "speed-fwd-dark.svg")]
    assert plot.fingerprint(plot.read([results])) in (tmp_path / "speed-fwd-dark.svg").read_text()


def test_out_of_memory_is_dashed_at_its_predicted_memory_never_zero():
    plot = pytest.importorskip("tilewise.bench.plot")
    shape = dict(case="memory", kind="memory", ms_rounds=[], tflops=None)
    rows = [
        picture_row("eager", 1024, "fwd+bwd", peak_bytes=2e9, **shape),
        picture_row("eager", 4096, "fwd+bwd", status="oom", predicted_bytes=32e9, **shape),
    ]
    axis = plot.memory(rows).axes[0]
    dashed = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert len(dashed) == 1
    assert list(dashed[0].get_ydata()) == [2.0, 32.0]


def density_row(provider: str, density: float, ms: float, **fields) -> dict:
    return picture_row(provider, 4096, case="block_sparse", label=f"density-{density}", density=density, ms=ms, ms_rounds=[ms], **fields)


def test_speed_up_against_density_has_its_ideal_line_and_break_even_point():
    plot = pytest.importorskip("tilewise.bench.plot")
    rows = [density_row("tilewise", d, ms) for d, ms in ((0.25, 1.0), (1.0, 4.0))]
    figure = plot.density([*rows, density_row("fa3", 1.0, 2.0)])
    (axis,) = figure.axes
    lines = {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in axis.lines}
    assert lines["ideal: 1 / density"] == [[0.25, 1], [4.0, 1]]
    assert lines["tilewise"] == [[0.25, 1.0], [2.0, 0.5]]  # over the fastest dense call, which is the peer's
    assert "tilewise breaks even at 50%" in axis.get_title()
    assert plot.density(rows[:1]) is None and plot.density([picture_row("tilewise", 1024)]) is None


def test_no_line_leaves_its_picture():
    plot = pytest.importorskip("tilewise.bench.plot")
    rows = [picture_row("tilewise", n, tflops=820.0) for n in (1024, 4096)]  # faster than the matrix product of 783
    for axis in plot.speed(rows, "fwd").axes:
        assert axis.get_ylim()[1] > 820


def test_a_row_is_filed_under_the_backend_of_its_pass():
    prepared = Prepared(lambda *t: t[0], backend="hopper", backward_backend="triton")
    assert [prepared.serving(p) for p in ("fwd", "bwd", "fwd+bwd")] == ["hopper", "triton", "hopper"]


def test_a_rerun_replaces_the_rows_it_repeats():
    plot = pytest.importorskip("tilewise.bench.plot")
    rows = [picture_row("fa3", 1024, tflops=1.0), picture_row("fa3", 1024, tflops=2.0)]
    assert [row["tflops"] for row in plot.latest(rows)] == [2.0]


def test_a_run_of_ours_alone_replaces_nothing_that_was_measured_beside_a_peer():
    """And our speed is put over that of peers of the same run alone: in another one the card had another clock."""
    plot = pytest.importorskip("tilewise.bench.plot")
    both = [picture_row("tilewise", 1024, run_id="a", tflops=1.0), picture_row("fa3", 1024, run_id="a", tflops=2.0)]
    alone = [picture_row("tilewise", 1024, run_id="b", tflops=4.0)]
    assert plot.latest(both + alone) == both and plot.latest(alone + both) == both
    assert plot.heat_map([*alone, both[1]]) is None and plot.heat_map(both) is not None


# ------------------------------------------------------------------------------------------------------------------------- tune


def test_candidates_start_with_the_table_and_fit_the_device():
    key = ("sm90", 16, configs.FORWARD)
    found = tune.candidates(key, 128, 232_448)
    assert found[0] == configs.TABLE[key][128]
    assert len(set(found)) == len(found) > 10
    assert all(configs.shared_bytes(c, 16, configs.FORWARD, 128, 128) <= 232_448 for c in found[1:])


def test_a_trial_is_in_force_only_inside_its_context():
    key, other = ("sm90", 16, configs.DQ), configs.Config(32, 32, 4, 1)

    def chosen():
        return configs.choose("sm90", 232_448, 16, configs.DQ, frozenset(), 64, 64)

    before = chosen()
    with tune.Trial(key, 64, other).in_force():
        assert chosen() == other
    assert chosen() == before == configs.TABLE[key][64]


def test_the_rewritten_table_differs_in_the_tuned_entry_alone():
    entry, new = (("sm90", 16, configs.DKDV), 256), configs.Config(32, 128, 4, 2, False)
    text = tune.rewritten(Path(configs.__file__).read_text(), {entry: new})
    module = types.ModuleType("rewritten")
    sys.modules["rewritten"] = module  # dataclasses look their module up
    try:
        exec(compile(text, "rewritten", "exec"), module.__dict__)
    finally:
        del sys.modules["rewritten"]
    as_values = {key: {dim: astuple(c) for dim, c in row.items()} for key, row in module.TABLE.items()}
    expected = {key: {dim: astuple(c) for dim, c in row.items()} for key, row in configs.TABLE.items()}
    expected[entry[0]][entry[1]] = astuple(new)
    assert as_values == expected


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """`tune.main` on a named device, over a copy of the table, with milliseconds that are given: by whether a config is the table's."""
    copy = tmp_path / "configs.py"
    copy.write_text(Path(configs.__file__).read_text())
    monkeypatch.setattr(configs, "__file__", str(copy))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune.plan, "target_of", lambda device: Target("cuda", (9, 0), "NVIDIA H200"))
    other = configs.Config(32, 128, 4, 2)

    def main(present: float, found: float, *options: str) -> str:
        def measured(keys, most, workers, budget):
            (entry,) = keys
            times = {configs.TABLE[entry[0]][entry[1]]: present, other: found}
            every = [tune.Measured(tune.Trial(*entry, config), {"full": ms, "causal": ms}) for config, ms in times.items()]
            return {entry: sorted(every, key=lambda one: one.score)}

        monkeypatch.setattr(tune, "tune", measured)
        assert tune.main(["--dims", "256", "--purposes", configs.DKDV, *options]) == 0
        return copy.read_text()

    main.faster = tune.rewritten(copy.read_text(), {(("sm90", 16, configs.DKDV), 256): other})
    return main


def test_tuning_shows_the_change_and_writes_it_when_told(tuned, capsys):
    before = Path(configs.__file__).read_text()
    assert tuned(2.0, 1.0) == before
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
    assert [line[0] for line in shown] == ["-", "+"] and "Config(32, 128, 4, 2)" in shown[1]
    assert tuned(2.0, 1.0, "--write") == tuned.faster != before


def test_a_gain_within_the_noise_changes_nothing(tuned, tmp_path, capsys):
    before = Path(configs.__file__).read_text()
    assert tuned(2.0, 1.99, "--write", "--out", str(tmp_path / "measured.jsonl")) == before
    assert "no change" in capsys.readouterr().out
    assert [json.loads(line)["ms"]["full"] for line in (tmp_path / "measured.jsonl").read_text().splitlines()] == [1.99, 2.0]


@pytest.mark.parametrize("name", ["blocks-26", "documents-4"])
def test_the_mask_of_a_case_is_one_thing_to_everybody(name: str) -> None:
    """As a function, as a rule, as a density, to the unfused computation and to the check."""
    mask = masked.case_mask(name, 300, "cpu")
    index = torch.arange(300)
    seen = mask.function(0, 0, index[:, None], index)
    assert torch.equal(seen, mask.rule.dense(1, 1, 300, 300)[0, 0])
    if name.startswith("documents"):  # blocks count as whole ones, which they are at every length that is measured
        assert masked.density(name, 300) == pytest.approx(seen.double().mean().item())
    case = Case("masked", name, 300, 2, 16, mask=name, device="cpu", dtype="fp32")
    inputs = Inputs.make(case)
    expected = check.slice_of(case, inputs, 0, 1, torch.float64, gradients=False)["out"][0]
    for provider in ("tilewise", "eager"):
        out = peers.BUILT_IN[provider].prepare(case, inputs).call(inputs.q, inputs.k, inputs.v)
        torch.testing.assert_close(out[0, :, 1].double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(Unsupported, match="no mask"):
        peers.BUILT_IN["sdpa_flash"].prepare(case, inputs)
    assert case.flops("fwd") == round(masked.density(name, 300) * 4 * 300 * 300 * 2 * 16)


def test_a_step_of_a_server_is_one_thing_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, and single queries over keys that are there: as a function, as offsets, as a share, and to the check."""
    monkeypatch.setattr(masked, "serving_lengths", lambda decodes: ([30, 7] + [1] * decodes, [30, 7] + [50] * decodes))
    masked._density.cache_clear()
    queries, keys = 30 + 7 + 3, 30 + 7 + 150
    case = Case("serving", "small", queries, 2, 16, seqlen_k=keys, mask="serving-3", packed=True, device="cpu", dtype="fp32")
    inputs = Inputs.make(case)
    seen = masked.case_mask(case.mask, queries, "cpu").function(0, 0, torch.arange(queries)[:, None], torch.arange(keys))
    assert masked.density(case.mask, queries) == pytest.approx(seen.double().mean().item())
    expected = check.slice_of(case, inputs, 0, 1, torch.float64, gradients=False)["out"][0]
    out = peers.BUILT_IN["tilewise"].prepare(case, inputs).call(inputs.q, inputs.k, inputs.v)
    torch.testing.assert_close(out[0, :, 1].double(), expected, rtol=1e-5, atol=1e-5)
    masked._density.cache_clear()


def test_flash_attention_4_gets_the_blocks_of_a_block_mask_as_lists() -> None:
    case = Case("blocks", "small", 512, 2, 16, mask="blocks-50", device="cpu", dtype="fp32")
    inputs = Inputs.make(case)
    bits = masked.case_mask(case.mask, 512, "cpu").bits
    assert bits is not None

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask_mod: object, block_sparse_tensors: dict) -> torch.Tensor:
        assert mask_mod is None and not block_sparse_tensors["mask_block_cnt"].any()
        count, index = block_sparse_tensors["full_block_cnt"], block_sparse_tensors["full_block_idx"]
        for head in range(2):
            for m in range(4):
                assert sorted(index[0, head, m, : count[0, head, m]].tolist()) == bits[0, 0, m].nonzero()[:, 0].tolist()
        return q

    assert adapters.flash(function, None, lists=dict)(case, inputs).call(inputs.q, inputs.k, inputs.v) is inputs.q
    with pytest.raises(Unsupported, match="mask"):
        adapters.flash(function, None)(case, inputs)
