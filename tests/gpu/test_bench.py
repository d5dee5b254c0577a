"""The benchmark's GPU half: device time, memory and the check work, and rows say so."""

from __future__ import annotations

import functools

import pytest
import torch

from tilewise.bench import peers, report, run, timing
from tilewise.bench.cases import Case


@pytest.mark.unpoisoned
@pytest.mark.parametrize("kind", ["speed", "host", "memory"])
def test_rows_of_a_small_case(kind, monkeypatch):
    monkeypatch.setattr(run, "ceilings", lambda device: (1e15, 4e12))
    made = run.Benchmark(run.Options(device="cuda", rounds=3, round_ms=2), report.Reporter(quiet=True))
    made.cases = [Case("tiny", "causal", seqlen_q=512, heads=8, head_dim=64, batch=2, causal=True, kind=kind)]
    made.providers = [peers.BUILT_IN[name] for name in ("tilewise", "eager", "sdpa_flash")]
    rows = made.run()
    assert len(rows) == 9
    for row in rows:
        assert row["status"] == "ok", row
        assert row["peak_bytes"] > 0
        assert kind == "memory" or row["rounds"] == 3
        assert (row["tflops"] is not None) == (kind == "speed")
    ours = next(row for row in rows if row["provider"] == "tilewise" and row["pass"] == "fwd+bwd")
    unfused = next(row for row in rows if row["provider"] == "eager" and row["pass"] == "fwd+bwd")
    assert ours["peak_bytes"] < unfused["peak_bytes"]


@pytest.mark.unpoisoned
def test_a_training_step_has_time_and_memory(monkeypatch):
    monkeypatch.setattr(run, "ceilings", lambda device: (1e15, 4e12))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # kernels of the MLP are not the matter
    made = run.Benchmark(run.Options(device="cuda", rounds=3, round_ms=2), report.Reporter(quiet=True))
    sizes = dict(seqlen_q=1000, heads=8, kv_heads=2, head_dim=128, causal=True, passes=("fwd+bwd",))
    made.cases = [Case("step", "tiny", kind="step", block="llama", **sizes)]
    made.providers = [*peers.find("tilewise,tilewise:deterministic,sdpa_flash,eager", "cuda")[0]]
    rows = made.run()
    assert [row["status"] for row in rows] == ["ok"] * 4, [row["reason"] for row in rows]
    assert all(row["rounds"] == 3 and row["peak_bytes"] > 0 for row in rows)
    assert rows[0]["peak_bytes"] < rows[3]["peak_bytes"] and rows[1]["backend"].endswith(" deterministic")


@pytest.mark.unpoisoned
def test_device_time_grows_with_the_work_and_leaves_out_the_host():
    clock = timing.CudaClock(timing.Sensors.open("cuda"), 5)
    times = []
    for size in (1024, 8192):
        a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        samples = timing.Samples()
        clock.round(lambda a=a: a @ a, samples)
        times.append(samples.ms[0])
    assert times[0] < 0.2 * times[1]
    assert times[0] < 0.2, "a product of 1024 takes some 10 us on any data-centre GPU"
