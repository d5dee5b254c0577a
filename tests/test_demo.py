"""The demo: its tolerance tells rounding from mistakes, its memory is what the system saw, its figure hides no failure."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch

from tilewise.demo import Settings, run
from tilewise.demo.model import Attention, ByteGPT, eager_attention
from tilewise.demo.run import causal_attention
from tilewise.demo.scaling import Shape, check, measure, peak_bytes, step
from tilewise.demo.text import draw_batches, standard_library_text
from tilewise.demo.training import Curve, compare, train

CPU = torch.device("cpu")
TINY = Settings(
    device="cpu",
    steps=6,
    context=48,
    batch=2,
    lengths=(64, 128, 256, 512),
    heads=2,
    head_dim=16,
    dtype=torch.float32,
    memory_limit=1_000_000,
    time_budget=60.0,
)


def shape(seqlen: int) -> Shape:
    return Shape(seqlen, heads=2, head_dim=32, dtype=torch.float32)


def wrong_scale(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return eager_attention(1.03 * q, k, v)


def off_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each query sees one key too few, but for the first."""
    return torch.cat((eager_attention(q[:, :1], k[:, :1], v[:, :1]), eager_attention(q[:, 1:], k[:, :-1], v[:, :-1])), 1)


@pytest.fixture(scope="module")
def curves() -> dict[str, object]:
    batches = draw_batches(standard_library_text(1 << 16), 12, 2, 64, seed=0)
    attentions = {
        "eager": eager_attention,
        "reversed": partial(eager_attention, reverse_keys=True),
        "tilewise": causal_attention,
        "wrong_scale": wrong_scale,
        "off_by_one": off_by_one,
    }
    return {name: train(attention, batches, seed=0, device=CPU) for name, attention in attentions.items()}


def test_losses_fall_and_the_curves_agree(curves: dict) -> None:
    assert curves["eager"].losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert curves["tilewise"].losses[-1] < curves["tilewise"].losses[0] - 0.5
    assert compare(curves["tilewise"], curves["eager"], curves["reversed"]).holds


@pytest.mark.parametrize("mistake", ["wrong_scale", "off_by_one"])
def test_the_tolerance_catches_a_small_mistake(curves: dict, mistake: str) -> None:
    assert not compare(curves[mistake], curves["eager"], curves["reversed"]).holds


def test_training_stops_at_its_time_limit_and_keeps_its_schedule() -> None:
    batches = draw_batches(standard_library_text(1 << 16), 14, 1, 16, seed=0)
    full = train(eager_attention, batches, seed=0, device=CPU)
    short = train(eager_attention, batches, seed=0, device=CPU, seconds=0.0)
    assert short.losses == full.losses[:10]
    assert train(eager_attention, batches[:10], seed=0, device=CPU, planned=14).losses == short.losses


@pytest.mark.parametrize("attention", [wrong_scale, off_by_one])
def test_no_speed_for_a_wrong_result(attention: object) -> None:
    with pytest.raises(RuntimeError, match="off by"):
        next(measure(attention, [shape(64)], CPU, memory_limit=10**9, time_budget=10.0))
    check(causal_attention, shape(64), CPU)


def test_unfused_memory_is_as_predicted_and_tilewise_memory_is_linear() -> None:
    def peak(attention: object, seqlen: int) -> int:
        inputs, dout = shape(seqlen).inputs(CPU)
        return peak_bytes(lambda: step(attention, inputs, dout), CPU)

    peaks = {seqlen: peak(eager_attention, seqlen) for seqlen in (512, 1024)}
    for seqlen, bytes_ in peaks.items():
        assert bytes_ == pytest.approx(shape(seqlen).unfused_bytes(), rel=0.15)
    ours = {seqlen: peak(causal_attention, seqlen) for seqlen in (2048, 4096)}
    assert ours[4096] < 2.2 * ours[2048]
    assert peaks[1024] > 3.5 * peaks[512]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_agrees_with_what_the_system_saw() -> None:
    """The resident size of a fresh process grows by what the allocator is said to have held, within a tenth: over 200 MB here."""
    script = """
        import re, torch
        from pathlib import Path
        from tilewise.demo.model import eager_attention
        from tilewise.demo.scaling import Shape, peak_bytes, step

        def resident(which):
            return 1024 * int(re.search(which + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

        device = torch.device("cpu")
        for seqlen in (64, 2048):
            inputs, dout = Shape(seqlen, heads=4, head_dim=32, dtype=torch.float32).inputs(device)
            call = lambda: step(eager_attention, inputs, dout)
            before = resident("VmRSS")
            call()
            seen = resident("VmHWM") - before
        print(seen, peak_bytes(call, device))
    """
    output = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True).stdout
    seen, counted = map(int, output.split())
    assert counted > 2e8
    assert counted == pytest.approx(seen, rel=0.1)


@pytest.fixture(scope="module")
def results() -> dict:
    stages = {}
    results = run(TINY, lambda what, done, total: stages.setdefault(what, []).append((done, total)))
    assert all(calls[-1] == (calls[-1][1],) * 2 for calls in stages.values()) and len(stages) == 4
    return json.loads(json.dumps(results))


def test_results_name_every_length_and_predict_what_did_not_fit(results: dict) -> None:
    points = {(point["provider"], point["seqlen"]): point for point in results["scaling"]["points"]}
    assert len(points) == 2 * len(TINY.lengths)
    assert results["training"]["agree"]
    for (provider, seqlen), point in points.items():
        fits = provider == "tilewise" or seqlen < 256
        assert point["status"] == ("ok" if fits else "limit")
        assert (point["seconds"] is None) == (point["peak_bytes"] is None) == (not fits)
        if not fits:
            assert point["predicted_bytes"] > TINY.memory_limit


def test_the_figure_draws_what_did_not_fit_at_its_predicted_memory(results: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from tilewise.demo import plot

    for path, magic in zip(plot.draw(results, tmp_path), (b"\x89PNG", b"<?xml"), strict=True):
        assert path.read_bytes().startswith(magic)
    axes = Figure().subplots()
    plot._draw_memory(axes, results["scaling"])
    predicted = [point["predicted_bytes"] for point in results["scaling"]["points"] if point["status"] != "ok"]
    hollow = [line for line in axes.lines if line.get_markerfacecolor() == plot.PAPER]
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in hollow] == [predicted]
    assert list(dashed[0].get_ydata())[1:] == predicted
    assert all(value > 0 for line in axes.lines for value in line.get_ydata())
    labels = [text for text in axes.texts if text.get_text()]
    axes.figure.canvas.draw()
    boxes = [label.get_window_extent() for label in labels]
    assert not any(first.overlaps(second) for index, first in enumerate(boxes) for second in boxes[:index])


def test_the_report_shows_both_curves_and_marks_predictions(results: dict) -> None:
    rich_console = pytest.importorskip("rich.console")
    from tilewise.demo import report

    console = rich_console.Console(record=True, width=120, file=io.StringIO())
    report.show(results, [Path("memory.png")], console)
    text = console.export_text()
    assert f"{results['training']['losses']['eager'][0]:.5f}" in text
    assert f"{results['training']['losses']['tilewise'][-1]:.5f}" in text
    assert "agree at every step" in text
    assert "(6.82 MB)" in text  # unfused attention at 512: 3 x 2 x 512^2 x 4 bytes and two masks, predicted


# --------------------------------------------------------------------------------------------------- the same model, elsewhere


class NextByte(torch.nn.Module):
    """A small `ByteGPT` with the loss inside, as `transformers.Trainer` expects it."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ByteGPT(attention, width=64, heads=2, layers=1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(input_ids)
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def windows() -> list[dict[str, torch.Tensor]]:
    batches = draw_batches(standard_library_text(1 << 16), 10, 4, 64, seed=0)
    return [dict(input_ids=tokens[:-1], labels=tokens[1:]) for tokens in batches.flatten(0, 1)]


def losses_of_a_loop(attention: Attention, backend: str | None) -> list[float]:
    model = NextByte(attention)
    step = torch.compile(model, backend=backend, fullgraph=True) if backend else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in torch.utils.data.DataLoader(windows(), batch_size=4):
        loss = step(**batch)["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of_the_trainer(attention: Attention, folder: Path) -> list[float]:
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=str(folder), max_steps=10, per_device_train_batch_size=4, learning_rate=2e-3, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    losses = []

    class Recorder(Trainer):  # its log rounds to four digits
        def compute_loss(self, *args: object, **kwargs: object) -> object:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(loss.item())
            return loss

    Recorder(model=NextByte(attention), args=settings, train_dataset=windows()).train()
    return losses


@pytest.mark.parametrize("where", ["aot_eager", "inductor", "trainer"])
def test_training_in_a_compiled_loop_and_in_the_trainer_follows_eager(where: str, tmp_path: Path) -> None:
    """The tolerance is that of the demo: what eager attention that sums in another order departs from eager attention."""
    if where == "trainer":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    run = partial(losses_of_the_trainer, folder=tmp_path) if where == "trainer" else partial(losses_of_a_loop, backend=where)
    plain = run if where == "trainer" else partial(losses_of_a_loop, backend=None)
    eager, other = plain(eager_attention), plain(partial(eager_attention, reverse_keys=True))
    ours, wrong = run(causal_attention), plain(wrong_scale)
    assert len(ours) == 10 and ours[-1] < ours[0] - 0.5
    mine, reference, noise, mistaken = (Curve(losses, 0.0) for losses in (ours, eager, other, wrong))
    assert compare(mine, reference, noise).holds
    assert not compare(mistaken, reference, noise).holds
