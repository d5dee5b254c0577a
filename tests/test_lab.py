"""The lab: every step equals attention, every byte equals its prediction, and the page that draws it works in a browser."""

import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tilewise.lab import algorithms, block_sparse, claims, measured, predict, profile, results, run, sweeps, trace
from tilewise.lab.algorithms import Inputs
from tilewise.lab.predict import Case
from tilewise.lab.run import difference, exact
from tilewise.lab.traffic import DeviceMemory, Tiles

COUNTED = algorithms.SOFTMAX + algorithms.ATTENTION
ids = [f"{step.name}-{step.pass_}" for step in COUNTED]
ROOT = Path(__file__).parents[1]


def counted(step, inputs):
    memory = DeviceMemory()
    return step.count(memory, inputs), memory


# ------------------------------------------------------------------------------------------------------------ counted twins


@pytest.mark.parametrize("step", COUNTED, ids=ids)
@pytest.mark.parametrize("n,d,tiles", [(64, 16, (16, 32)), (50, 32, (32, 16)), (7, 16, (16, 16)), (33, 16, (8, 8))])
def test_twin_is_attention_and_its_bytes_are_predicted(step, n, d, tiles):
    inputs = Inputs.random(2, n, d, Tiles(*tiles), dtype=torch.float64, density=0.4, piece=16)
    got, memory = counted(step, inputs)
    want = exact(inputs, step.name)
    for name, value in got.items():
        assert difference(value, want[name]) < 1e-12, name
    prediction = step.predict(inputs.case(), 1)
    expected = Counter()
    for stream in prediction.streams():
        expected[stream.kind, stream.name] += stream.bytes
    assert memory.counts == expected
    assert memory.bytes() == prediction.bytes()
    assert memory.peak_scratch_bytes == prediction.extra_bytes
    assert memory.scratch_bytes in (0, prediction.extra_bytes)


@pytest.mark.parametrize("step", COUNTED, ids=ids)
def test_sixteen_bit_inputs_move_half_the_bytes_of_their_tensors(step):
    inputs = Inputs.random(1, 40, 16, Tiles(16, 16), dtype=torch.bfloat16, density=0.5, piece=16)
    got, memory = counted(step, inputs)
    assert memory.bytes() == step.predict(inputs.case(), 1).bytes()
    want = exact(inputs, step.name)
    assert all(difference(value, want[name]) < 0.05 for name, value in got.items())


class Exponentials(TorchDispatchMode):
    """Counts the elements that `torch.exp` is applied to."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.exp.default,):
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("step", algorithms.ATTENTION, ids=ids[3:])
def test_operations_and_exponentials_are_predicted(step):
    inputs = Inputs.random(1, 40, 16, Tiles(16, 16), density=0.5, piece=8)
    with FlopCounterMode(display=False) as products, Exponentials() as exponentials:
        counted(step, inputs)
    flops, exps = products.get_total_flops(), exponentials.count
    if step.pass_ == "bwd":  # the twin runs the forward pass first
        forward = {"fa1": algorithms.FA1, "fa2": algorithms.FA2}[step.name].predict(inputs.case(), 1)
        flops, exps = flops - forward.flops, exps - forward.exponentials
    prediction = step.predict(inputs.case(), 1)
    assert (flops, exps) == (prediction.flops, prediction.exponentials)


def test_unwritten_memory_shows():
    memory = DeviceMemory()
    x = memory.scratch("x", (4, 2), torch.float32)
    assert x.load(0).isnan().all()
    x.store(1.0, slice(0, 2))
    assert memory.counts == {("load", "x"): 8, ("store", "x"): 16}
    memory.free(x)
    assert (memory.scratch_bytes, memory.peak_scratch_bytes) == (0, 32)


def test_a_tile_on_chip_is_a_copy():
    memory = DeviceMemory()
    x = memory.place("x", torch.zeros(4))
    tile = x.load(slice(0, 2))
    tile += 1
    assert x.data.sum() == 0


def test_rows_without_a_tile_are_empty():
    inputs = Inputs.random(1, 32, 16, Tiles(16, 16))
    mask = torch.tensor([[True, False], [False, False]])
    memory = DeviceMemory()
    q, k, v = (memory.place(name, getattr(inputs, name)) for name in "qkv")
    o, lse = memory.result("o", (1, 32, 16), torch.float32), memory.result("lse", (1, 32), torch.float32)
    lists = [memory.place(name, x) for name, x in zip(("counts", "indices"), block_sparse.tile_lists(mask), strict=True)]
    block_sparse.forward(memory, q, k, v, o, lse, *lists, inputs.scale, inputs.tiles)
    assert (o.data[0, 16:] == 0).all() and (lse.data[0, 16:] == float("-inf")).all()
    assert o.data[0, :16].isfinite().all()


# ----------------------------------------------------------------------------------------------------------------- kernels


@pytest.fixture(scope="session")
def interpreted():
    pytest.importorskip("triton", reason="the kernels need Triton, which torch brings on Linux")
    script = Path(__file__).with_name("lab_interpreted.py")
    finished = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stderr[-3000:]
    return json.loads(finished.stdout)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("step", COUNTED, ids=ids)
def test_kernel_is_attention_in_the_interpreter(interpreted, step, dtype):
    eps = torch.finfo(getattr(torch, dtype)).eps
    for name, (error, twin_error) in interpreted[f"{step.name} {step.pass_} {dtype}"].items():
        # Kernels round P and dS to 16 bits before a product, the twins do not: a few roundings of numbers of order one.
        assert error <= 1.5 * twin_error + 8 * eps, name


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("step", COUNTED, ids=ids)
def test_kernel_is_attention_on_the_gpu(step, d):
    from tilewise.lab import gpu

    point = sweeps.Point("bytes", step.name, step.pass_, 3, 1000, d, 64, 64, density=0.5, piece=64)
    if step in algorithms.SOFTMAX:
        point = sweeps.Point("softmax", step.name, step.pass_, 1, 100, 5000, 64, 64)
    inputs = point.inputs(torch.bfloat16, "cuda")
    for _ in range(3):  # state that one program wrote and reads again would differ from run to run if it were read too early
        error, allowed = gpu.checked(step.launch(inputs)(), inputs, point)
        assert error <= allowed


def test_compiler_reports_what_a_kernel_takes():
    pytest.importorskip("triton", reason="the kernels need Triton, which torch brings on Linux")
    from tilewise.lab import resources

    small = resources.fa2_forward(64, 64, 32)
    assert small.fits(232448) and small.spill_bytes == 0
    assert 0 < small.registers <= resources.REGISTERS_PER_THREAD
    assert small.shared_bytes >= 2 * 32 * 64 * 2  # at least the K and V tiles
    assert not small.fits(small.shared_bytes - 1)


def test_accuracy_gate_of_the_gpu_runs_lets_right_results_pass_and_no_others():
    from tilewise.lab import gpu

    for step in (algorithms.FA2, algorithms.BLOCK_SPARSE, algorithms.FA2_BACKWARD, algorithms.SOFTMAX[0]):
        experiment = "softmax" if step in algorithms.SOFTMAX else "bytes"
        point = sweeps.Point(experiment, step.name, step.pass_, 2, 48, 16, 16, 16, density=0.5)
        inputs = point.inputs(torch.bfloat16, "cpu")
        got, _ = counted(step, inputs)
        error, allowed = gpu.checked(got, inputs, point)
        assert 0 < error <= allowed
        broken = {name: value * 1.05 for name, value in got.items()}
        error, allowed = gpu.checked(broken, inputs, point)
        assert error > allowed


# ------------------------------------------------------------------------------------------------------------- predictions


def test_standard_attention_moves_four_squares_and_four_tensors_behind_a_cache():
    case = Case(heads=3, n=1024, d=64, itemsize=2, tiles=Tiles(128, 64))
    assert predict.standard_forward(case).device_bytes(50 << 20) == 3 * 2 * (4 * 1024**2 + 4 * 1024 * 64)


def test_state_of_the_first_order_is_the_papers_count():
    case = Case(heads=1, n=1024, d=64, itemsize=4, tiles=Tiles(64, 64))
    state = sum(s.bytes for launch in predict.fa1_forward(case).launches[1:] for s in launch.streams if s.name in ("o", "m", "l"))
    assert state == 4 * case.tiles_n * (2 * 1024 * 64 + 4 * 1024)


@pytest.mark.parametrize("step", COUNTED, ids=ids)
def test_a_cache_never_adds_traffic_and_a_huge_one_moves_each_stream_once(step):
    inputs = Inputs.random(1, 256, 32, Tiles(32, 32), density=0.5, piece=16)
    prediction = step.predict(inputs.case(), 8)
    assert prediction.device_bytes(1 << 40) <= prediction.device_bytes(1 << 10) <= prediction.bytes()
    assert prediction.device_bytes(1 << 40) == sum(min(s.size, s.bytes) for s in prediction.streams())


def test_traffic_falls_with_the_memory_on_chip_as_the_theorem_says():
    n, d = 1024, 64
    scaled = []
    for elements in sweeps.ON_CHIP_ELEMENTS:
        case = Case(1, n, d, 4, predict.paper_tiles(d, elements))
        scaled.append(predict.fa1_forward(case).bytes() / 4 / predict.theorem_elements(n, d, elements))
    assert max(scaled) / min(scaled) < 1.3


def test_loop_orders_differ_by_their_state():
    inputs = Inputs.random(1, 256, 32, Tiles(32, 32))
    (_, first), (_, second) = counted(algorithms.FA1, inputs), counted(algorithms.FA2, inputs)
    assert first.bytes("store") > 8 * second.bytes("store")
    assert second.bytes("store") == second.bytes("store", "o") + second.bytes("store", "lse") == 4 * (256 * 32 + 256)


def test_block_sparse_traffic_is_linear_in_the_density():
    moved = {}
    for density in (0.25, 0.5, 1.0):
        _, memory = counted(algorithms.BLOCK_SPARSE, Inputs.random(1, 256, 16, Tiles(32, 32), density=density))
        moved[density] = memory.bytes("load", "k") + memory.bytes("load", "v")
    assert moved[0.25] * 4 == moved[0.5] * 2 == moved[1.0]


@pytest.mark.parametrize("step", [algorithms.STANDARD, algorithms.FA1, algorithms.FA2], ids=["standard", "fa1", "fa2"])
def test_extra_memory_grows_as_promised(step):
    rows = []
    for n in (32, 64, 128):
        _, memory = counted(step, Inputs.random(1, n, 16, Tiles(16, 16)))
        rows.append({"seqlen": n, "extra": memory.peak_scratch_bytes})
    assert run.exponent(rows, "extra") == pytest.approx(2.0 if step is algorithms.STANDARD else 1.0)


def test_ratio_of_traffic_to_compute():
    assert predict.traffic_over_compute(64, 2e12, 312e12) == pytest.approx(468 / 64)
    assert predict.traffic_over_compute(128, 4.8e12, 989e12) == pytest.approx(618 / 128, rel=1e-3)


# ------------------------------------------------------------------------------------------------------------------ claims


def test_each_repeated_mistake_has_its_right_answer():
    found = {finding.name: finding for finding in (claim() for claim in claims.ALL)}
    assert not any(finding.holds for finding in found.values())
    assert found["float16 overflow"].numbers["first"] == 12
    assert found["rescale factor"].numbers["right"] == pytest.approx(found["rescale factor"].numbers["exact"])
    assert found["loop order"].numbers["fa1_state"] > 16 * found["loop order"].numbers["fa2_state"]
    assert found["traffic against compute"].numbers["a100_d64"] == pytest.approx(468 / 64)
    assert found["six trips"].numbers["milliseconds"] == pytest.approx(51.54, abs=0.01)


# --------------------------------------------------------------------------------------------------------------- the command


def test_rows_carry_what_they_promise():
    rows = run.run_lab((64,), (16,), budget_s=60)
    assert {row["experiment"] for row in rows} >= {"claim", "softmax", "bytes", "production", "density", "theorem", "tiles"}
    for row in rows:
        assert row["status"] == "ok" and row["source_hash"] == results.source_hash()
    assert len(run.counted_rows(rows)) > 20
    assert all(row["counted_bytes"] == row["predicted_bytes"] for row in run.counted_rows(rows))


def test_a_spent_budget_ends_the_run():
    assert {row["experiment"] for row in run.run_lab((64,), (16,), budget_s=0.0)} == {"claim", "trace"}


def test_command_prints_tables_and_writes_rows(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    assert run.command(["--seqlens", "32,64", "--head-dims", "16", "--budget", "60", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "counts equal their prediction" in printed and "N^2.00" in printed and "float16 overflow" in printed
    assert len(results.read(out)) > 30


def test_command_prints_json(capsys):
    assert run.command(["--seqlens", "32", "--head-dims", "16", "--budget", "0", "--json"]) == 0
    assert [json.loads(line)["experiment"] for line in capsys.readouterr().out.splitlines()] == ["claim"] * len(claims.ALL) + ["trace"] * 2


def test_a_count_that_differs_is_an_error(monkeypatch, capsys):
    wrong = {"experiment": "bytes", "status": "ok", "counted_bytes": 1, "predicted_bytes": 2}
    monkeypatch.setattr(run, "run_lab", lambda *a, **k: [wrong])
    assert run.main(as_json=True) == 1


def test_every_gpu_point_is_a_step_of_the_table():
    points = [*sweeps.gpu_points(), *sweeps.memory_points()]
    assert len(points) == len({json.dumps(point.row()) for point in points})  # a row must lead back to its point
    for point in points:
        assert point.found().name == point.algorithm
        assert point.d & (point.d - 1) == 0 or point.experiment == "softmax"


# ---------------------------------------------------------------------------------------------------------------- profiler

HEADER = '"ID","Process ID","Kernel Name","Block Size","Grid Size","Section Name","Metric Name","Metric Unit","Metric Value"'


def profiler_csv(launches):
    lines = ["==PROF== Connected to process 12", "some text of the program", HEADER]
    for number, (name, grid, values) in enumerate(launches):
        for metric, value in values.items():
            lines.append(f'"{number}","12","{name}","(128, 1, 1)","({grid}, 1, 1)","Command line","{metric}","byte","{value}"')
    return "\n".join([*lines, "==PROF== Disconnected"])


def test_profile_is_added_to_the_rows():
    point = next(sweeps.gpu_points())
    row = point.row() | {"predicted_bytes": 1000, "predicted_device_bytes": 500, "ms": 1.0, "status": "ok"}
    other = row | {"seqlen": 1}
    values = {
        "dram__bytes_read.sum": "1,024",
        "dram__bytes_write.sum": "76",
        "lts__t_sectors_srcunit_tex_op_read.sum": "30",
        "lts__t_sectors_srcunit_tex_op_write.sum": "2",
    }
    noise = {"dram__bytes_read.sum": "999999", "dram__bytes_write.sum": "n/a"}
    text = profiler_csv([("before", 3, noise), ("lab_marker_kernel", 1, noise), ("a", 5, values), ("b", 6, values)])
    merged, untouched = profile.merge([text], [{"marker": 1, **asdict(point)}], [row, other])
    assert (merged["kernels"], merged["measured_device_bytes"], merged["measured_l2_bytes"]) == (2, 2200, 2 * 32 * 32)
    assert merged["device_ratio"] == pytest.approx(4.4) and merged["l2_ratio"] == pytest.approx(2.048)
    assert untouched == other
    assert "4.400" in profile.report([merged, untouched])


def test_a_profile_without_a_table_says_why():
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        list(profile.kernels("==ERROR== ERR_NVGPUCTRPERM"))


# Stands in for the interpreter: measuring and profiling are played.
PYTHON_STUB = """#!/bin/bash
case "$*" in
  *tilewise.lab.gpu*) [ -n "$ROW" ] && printf '%s\\n' "$ROW" >>"$4"; echo "budget of 1 s spent"; [ -z "$HANGS" ] || sleep 60 ;;
  *"lab.profile launch"*) printf '%s' "$PLAN" >"$5" ;;
esac
"""
NCU_STUB = """#!/bin/bash
while [ "$1" != --log-file ]; do shift; done
printf '%s\\n' "$PROFILE" >"$2"
shift 4
"$@"
"""


@pytest.fixture
def played(tmp_path, monkeypatch):
    """What `measured.run` starts, played: the row that is measured, and what the profiler writes (None: there is none)."""
    point = next(sweeps.gpu_points())
    row = point.row() | {"predicted_bytes": 1000, "predicted_device_bytes": 500, "ms": 1.0, "status": "ok", "error": 1e-3}

    def play(profiler):
        (tmp_path / "bin").mkdir()
        for name, text in {"python": PYTHON_STUB, "ncu": NCU_STUB}.items():
            path = tmp_path / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
        monkeypatch.setenv("ROW", json.dumps(row))
        monkeypatch.setenv("PLAN", json.dumps([{"marker": 1, **asdict(point)}]))
        if profiler is None:
            monkeypatch.setattr(measured, "profiler", lambda: None)
        elif profiler == "table":
            values = {"dram__bytes_read.sum": "1,000", "dram__bytes_write.sum": "250"}
            monkeypatch.setenv("PROFILE", profiler_csv([("lab_marker_kernel", 1, values), ("a", 5, values)]))
        else:
            monkeypatch.setenv("PROFILE", profiler)
        return row

    return play


on_posix = pytest.mark.skipif(sys.platform == "win32", reason="the programs that are played are scripts")


@on_posix
@pytest.mark.parametrize(
    "profiler, said",
    [
        (None, "no ncu on this machine"),
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "may not read the GPU's counters"),
        ("==ERROR== Failed to find metric", "gave no table"),
        ("table", "part 1 of 1 profiled"),
    ],
)
def test_a_run_on_a_gpu_ends_with_the_rows_it_has(tmp_path, played, profiler, said):
    row = played(profiler)
    out, words, counts = tmp_path / "out" / "rows.jsonl", [], []
    results.write([{"of": "an earlier run"}], out)
    rows = measured.run(out, 400, parts=1, say=words.append, on_rows=counts.append, python=["python"])
    assert any(said in text for text in words) and words[0] == "budget of 1 s spent", words
    assert [r.get("device_ratio") for r in rows] == [2.5 if said.startswith("part") else None]
    assert results.read(out) == [{"of": "an earlier run"}, *rows] and rows[0] | row == rows[0] and counts[-1] == 1
    assert {path.name for path in out.parent.iterdir()} == {"rows.jsonl", "rows.log"}


@on_posix
def test_a_run_that_hangs_is_ended_and_keeps_its_rows(tmp_path, played, monkeypatch):
    row = played(None)
    monkeypatch.setenv("HANGS", "1")
    monkeypatch.setattr(measured, "TIMED_SHARE", -9.0)  # and ten seconds more
    words = []
    assert measured.run(tmp_path / "rows.jsonl", 1.0, say=words.append, python=["python"]) == [row]
    assert "exit status 124" in words[1]


@on_posix
def test_where_nothing_is_measured_the_log_says_why(tmp_path, played, monkeypatch, capsys):
    played(None)
    monkeypatch.setenv("ROW", "")
    monkeypatch.setitem(measured.run.__kwdefaults__, "python", ("python",))
    assert measured.main(["--out", str(tmp_path / "rows.jsonl")]) == 1
    assert "rows.log says why" in capsys.readouterr().out


def gpu_rows(**more):
    """A row of every point, as measured by some GPU."""
    rows = [{"experiment": "hierarchy", "status": "ok"}]
    for point in sweeps.gpu_points():
        row = point.row() | {"predicted_bytes": 2048, "predicted_device_bytes": 1024, "roofline_ms": 0.5, "status": "ok"}
        rows.append(row | {"ms": 3.0, "tflops": 7.0, "error": 1e-3} | more)
    for point in sweeps.memory_points():
        rows.append(point.row() | {"predicted_extra_bytes": 1 << 20, "measured_extra_bytes": point.n**2, "status": "ok"})
    return rows


@pytest.mark.parametrize("counted", [True, False], ids=["with a profiler", "without"])
def test_command_on_a_gpu_prints_prediction_beside_measurement(tmp_path, monkeypatch, capsys, counted):
    monkeypatch.setattr(run, "chosen_device", lambda device: "cuda")
    bytes_ = {"l2_ratio": 0.84, "device_ratio": 1.25, "measured_l2_bytes": 1720, "measured_device_bytes": 1280} if counted else {}
    asked = []

    def play(out, budget_s, *, say, on_rows):
        asked.append((out, budget_s))
        say("what was left out")
        on_rows(1)
        return gpu_rows(**bytes_)

    monkeypatch.setattr(measured, "run", play)
    assert run.main(device="auto", out=tmp_path / "rows.jsonl") == 0
    assert asked == [(tmp_path / "rows.jsonl", 400.0)]
    printed = capsys.readouterr().out
    assert all(title in printed for title in run.GPU_TITLES.values()) and "what was left out" in printed
    line = next(line for line in printed.splitlines() if "fa1" in line and "16x16" in line)
    cells = [cell.strip() for cell in line.strip("│ ").split("│")]
    both = ["2.0 KiB", "1.7 KiB", "0.84", "1.0 KiB", "1.2 KiB", "1.25"] if counted else ["2.0 KiB", "1.0 KiB"]
    assert cells[-len(both) - 4 :] == [*both, "0.500", "3.000", "7", "1e-03"]
    assert "N^2.00" in printed and ("within 15 %" in printed) == counted


def test_a_wrong_result_on_a_gpu_is_an_error(monkeypatch, capsys):
    monkeypatch.setattr(run, "chosen_device", lambda device: "cuda")
    rows = [gpu_rows()[1] | {"status": "wrong", "ms": None}]
    monkeypatch.setattr(measured, "run", lambda *a, **k: rows)
    assert run.main(device="cuda", as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == rows[0]
    monkeypatch.setattr(measured, "run", lambda *a, **k: [])
    assert run.main(device="cuda") == 1


def test_devices_that_are_not_there_are_named(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.chosen_device("auto") == run.chosen_device("cpu") == "cpu"
    assert run.main(device="cuda") == 2 and "sees no CUDA device" in capsys.readouterr().err
    assert run.main(device="gpu") == 2 and "'gpu'" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert run.chosen_device("auto") == "cpu"
    monkeypatch.setattr(run, "find_spec", lambda name: name)
    assert run.chosen_device("auto") == run.chosen_device("cuda") == "cuda"
    with pytest.raises(SystemExit):
        run.command(["--device", "cuda", "--seqlens", "64"])


@on_posix
def test_the_script_starts_the_same_run(tmp_path):
    """From a checkout, without what prints tables."""
    (tmp_path / "python").write_text('#!/bin/bash\necho "$PYTHONPATH: $*"\n')
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"PYTHON": str(tmp_path / "python"), "OUT": str(tmp_path / "out"), "BUDGET": "7"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(["bash", str(ROOT / "scripts" / "lab_gpu.sh")], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"src: -m tilewise.lab.measured --out {tmp_path}/out/lab-gpu.jsonl --budget 7 --parts 4\n"


# ------------------------------------------------------------------------------------------------------------------- trace


def test_frames_show_what_is_on_chip():
    inputs = Inputs.random(1, trace.ROWS, trace.DIM, Tiles(trace.BLOCK, trace.BLOCK))
    want = exact(inputs, "fa2")
    first, second = trace.frames("fa1", inputs), trace.frames("fa2", inputs)
    assert len(first) == len(second) == 17
    for own in (first, second):
        assert difference(own[-1].o, want["o"][0]) < 1e-6
        m, l = own[-1].state.T.double()
        assert difference(m + torch.log(l), want["lse"][0]) < 1e-6
        assert (own[-1].pairs == 1).all()
    store_of_state = [trace.TENSORS.index(name) for name in ("O", "m", "l")]
    assert all((frame.touched[store_of_state] >= 2).any() for frame in first[:-1])  # the state is stored at every step
    assert [bool((frame.touched[store_of_state] >= 2).any()) for frame in second] == ([False] * 3 + [True]) * 4 + [False]
    assert first[-1].bytes > second[-1].bytes


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    pytest.importorskip("plotly", reason="the trace is drawn with plotly: pip install plotly")
    return trace.write_trace(tmp_path_factory.mktemp("trace") / "trace.html")


def test_page_is_self_contained(page):
    text = page.read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.(https?:)?//", text)
    assert "Plotly.newPlot" in text


@pytest.fixture
def browser(tmp_path):
    webdriver = pytest.importorskip("selenium.webdriver", reason="the browser is driven with selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    binary = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"))), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        missing = pytest.fail if os.environ.get("CI_BROWSER") == "required" else pytest.skip
        missing("no browser here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1500,950"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=Service(driver))
    yield running
    running.quit()


def test_a_reader_scrubs_through_the_page(page, browser):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get(page.as_uri())
    wait = WebDriverWait(browser, 20)

    def title():
        return browser.find_element(By.CSS_SELECTOR, ".gtitle").text

    wait.until(lambda _: "step 1: queries 0 to 1, keys 0 to 1" in title())
    assert len(browser.find_elements(By.CSS_SELECTOR, ".subplot .heatmaplayer .hm")) == 8
    rail = browser.find_element(By.CSS_SELECTOR, ".slider-rail-touch-rect")
    ActionChains(browser).move_to_element(rail).click().perform()
    wait.until(lambda _: "step 9: queries 0 to 1, keys 4 to 5" in title() and "step 9: queries 4 to 5, keys 0 to 1" in title())
    end = int(rail.rect["width"] / 2) - 3
    ActionChains(browser).move_to_element(rail).click_and_hold().move_by_offset(end, 0).release().perform()
    wait.until(lambda _: title().count("done") == 2)
    inputs = Inputs.random(1, trace.ROWS, trace.DIM, Tiles(trace.BLOCK, trace.BLOCK))
    drawn = browser.execute_script("return document.getElementById('trace').data[7].text.map(row => row.map(Number))")
    assert difference(torch.tensor(drawn), exact(inputs, "fa2")["o"][0]) < 0.006  # two decimals
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe


# ------------------------------------------------------------------------------------------------------------------ the page


@pytest.fixture(scope="session")
def lab_docs():
    pytest.importorskip("jupytext", reason="the notebook is made with jupytext: pip install jupytext")
    spec = importlib.util.spec_from_file_location("lab_docs", ROOT / "scripts" / "lab_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_of_the_page_are_up_to_date(lab_docs):
    rows = [row for path in lab_docs.files() for row in results.read(path)]
    text = lab_docs.PAGE.read_text()
    assert lab_docs.page(text, rows) == text, "run scripts/lab_docs.py"
    assert lab_docs.NOTEBOOK.read_text() == lab_docs.notebook(text), "run scripts/lab_docs.py"
    assert set(re.findall(r"<!-- generated: (\w+) -->", text)) == set(lab_docs.PARTS)


def test_gpu_part_of_the_page_reads_the_gpu_rows(lab_docs):
    assert lab_docs.gpu([]) == lab_docs.hierarchy([]) == ""
    memories = {
        "experiment": "hierarchy", "device": "some GPU", "multiprocessors": 100, "register_bytes_per_sm": 2**18, "l2_bytes": 2**20,
        "shared_bytes_per_block": 2**17, "device_bytes": 2**30, "copy_bytes_per_s": 4e12, "l2_read_bytes_per_s": 8e12,
        "matmul_flops_per_s": 800e12,
    }  # fmt: skip
    assert "8.0 TB/s, read" in lab_docs.hierarchy([memories])
    rows = [memories]
    for point in sweeps.gpu_points():
        measured = {"device": "some GPU", "ms": 3.0, "roofline_ms": 0.5, "l2_ratio": 1.03, "predicted_device_bytes": 10, "flops": 8e11}
        rows.append(point.row() | measured)
    rows += [point.row() | {"measured_extra_bytes": point.n**2} for point in sweeps.memory_points()]
    text = lab_docs.gpu(rows)
    assert "by a factor of 3.0 at d = 64 (predicted from four passes: 6.2)" in text
    assert "N^2.00 (standard" in text and "| FlashAttention-2 order | bwd | 8192 | 128 |" in text


def test_sweeps_of_the_page_read_the_gpu_rows(lab_docs):
    assert lab_docs.tile_sweep([]) == lab_docs.density_sweep([]) == lab_docs.head_dim_sweep([]) == ""
    rows = []
    for point in sweeps.gpu_points():
        row = point.row() | {"device": "some GPU", "dtype": "bfloat16", "status": "ok", "ms": 3.0, "roofline_ms": 0.5}
        rows.append(row | {"predicted_bytes": 2048, "predicted_device_bytes": 1024, "l2_ratio": 0.84, "device_ratio": 0.98})
        if (point.experiment, point.d, point.block_n) == ("headdim", 512, 64) and point.algorithm == "fa2":
            rows[-1] |= {"status": "unsupported", "ms": None}
    assert "| FlashAttention-2 order | 16 × 16 | 2.0 KiB | 0.84 | 1.0 KiB | 0.98 | 3.000 | 0.500 |" in lab_docs.tile_sweep(rows)
    assert "| block-sparse | 0.0625 | 2.0 KiB |" in lab_docs.density_sweep(rows)
    wide = lab_docs.head_dim_sweep(rows)
    assert wide.startswith("N = 2048, bfloat16, some GPU:") and "| FlashAttention-2 order | 512 | 64 × 64 | does not fit |" in wide
    for row in rows:  # without a profiler: predictions and times alone
        row.pop("l2_ratio"), row.pop("device_ratio")
    assert "| block-sparse | 1 | 2.0 KiB |  | 1.0 KiB |  | 3.000 | 0.500 |" in lab_docs.density_sweep(rows)


def test_every_picture_of_the_page_exists_and_every_picture_is_shown(lab_docs):
    linked = set(re.findall(r"\(figures/(lab-[\w-]+\.svg)\)", lab_docs.PAGE.read_text()))
    assert linked == {path.name for path in (ROOT / "docs" / "figures").glob("lab-*.svg")}


def test_pictures_are_drawn_from_rows_alone(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    from tilewise.lab import figures

    assert figures.draw([], tmp_path) == []
    gpu_rows = []
    for point in sweeps.gpu_points():
        row = point.row() | {"device": "some GPU", "ms": 1.0, "tflops": 2.0, "roofline_ms": 0.5, "status": "ok"}
        gpu_rows.append(row | {"l2_ratio": 1.0, "device_ratio": 1.1, "predicted_device_bytes": 10})
    results.write([*run.run_lab((32, 64), (16,), budget_s=60), *gpu_rows], tmp_path / "rows.jsonl")
    drawn = {path.stem for path in figures.draw([tmp_path / "rows.jsonl"], tmp_path)}
    assert drawn == {f"lab-{name}" for name in figures.PICTURES} - {"lab-headdim"}


def test_notebook_runs(lab_docs):
    nbclient = pytest.importorskip("nbclient", reason="the notebook is run with nbclient: pip install nbclient ipykernel")
    pytest.importorskip("ipykernel", reason="the notebook is run with ipykernel: pip install ipykernel")
    import nbformat

    book = nbformat.read(lab_docs.NOTEBOOK, as_version=4)
    nbclient.NotebookClient(book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT / "docs")}}).execute()
    printed = "".join(output.get("text", "") for cell in book.cells if cell.cell_type == "code" for output in cell.outputs)
    assert "FlashAttention-2 order" in printed and "the first integer that overflows is 12" in printed
    assert printed.count("largest difference from autograd") == 2 and all(
        float(worst) < 1e-12 for worst in re.findall(r"N x N matrix (\S+)", printed)
    )
