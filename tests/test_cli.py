"""The command line: what it prints, in both forms, and how it behaves where packages are missing."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest
import torch

import tilewise
from tilewise import doctor
from tilewise.cli import main


def run_without(packages: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh process where `packages` cannot be imported."""
    script = f"""
        import sys
        for package in {packages!r}:
            sys.modules[package] = None
        from tilewise.cli import main
        sys.exit(main({arguments!r}))
    """
    return subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)


def test_doctor_as_json_lists_versions_devices_and_backends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["tilewise"] == tilewise.__version__
    assert report["versions"]["torch"] == torch.__version__
    cpu = report["devices"][0]
    assert cpu["device"] == "cpu" and cpu["serves"] in ("torch", "tiled")
    assert cpu["backends"]["reference"] == cpu["backends"]["tiled"] == ""
    assert "Hopper" in cpu["backends"]["hopper"] and cpu["backends"]["triton"]
    assert len(report["devices"]) == 1 + torch.cuda.device_count() + torch.xpu.device_count() + torch.backends.mps.is_available()


def test_doctor_prints_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for words in ("Versions", "Devices", "Backends", torch.__version__, "reference", "tiled"):
        assert words in printed


def test_doctor_needs_neither_typer_nor_rich_nor_triton() -> None:
    result = run_without(["typer", "rich", "triton", "matplotlib"], ["doctor"])
    assert result.returncode == 0, result.stderr
    for words in ("pip install 'tilewise[demo]'", "triton 3.6 or newer", "absent", torch.__version__):
        assert words in result.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_other_commands_say_which_extra_is_missing(package: str) -> None:
    result = run_without([package], ["explain", "--shape", "1,128,4,64"])
    assert result.returncode == 1
    assert result.stderr.strip().count("\n") == 0
    assert package in result.stderr and "pip install 'tilewise[demo]'" in result.stderr


def versions(**changed: str) -> dict[str, str]:
    return {"torch": "2.13.0", "triton": "3.9.0", **dict.fromkeys(doctor.OPTIONAL, "1.0"), **changed}


def gpu() -> doctor.DeviceReport:
    return doctor.DeviceReport("cuda:0", "NVIDIA H200", "", "hopper", {})


@pytest.mark.parametrize(
    ("changed", "what", "how"),
    [
        ({"torch": "2.10.1"}, "torch 2.11 or newer", "torch>=2.11"),
        ({"triton": "3.5.0"}, "triton 3.6 or newer", "triton"),
        ({"triton": ""}, "triton 3.6 or newer", "triton"),
        ({"transformers": ""}, "transformers", "tilewise[transformers]"),
    ],
)
def test_doctor_says_how_to_get_what_is_missing(changed: dict[str, str], what: str, how: str) -> None:
    found = {item.what: item.how for item in doctor._find_missing(versions(**changed), [gpu()])}
    assert list(found) == [what] and how in found[what].lower()
    assert doctor._find_missing(versions(), [gpu()]) == []


def test_an_old_torch_is_not_usable() -> None:
    report = doctor.Report(versions(torch="2.10.0"), "", [], [])
    assert not report.usable and doctor.Report(versions(), "", [], []).usable


def test_explain_as_json_is_what_the_function_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--shape", "2,128,8,64", "--kv", "96,2,32", "--causal", "--dtype", "float32", "--device", "cpu", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    q, k, v = (torch.empty(2, *size, device="meta") for size in ((128, 8, 64), (96, 2, 64), (96, 2, 32)))
    assert printed == json.loads(json.dumps(tilewise.explain(q, k, v, causal=True, device="cpu").as_dict()))


def test_explain_prints_a_table_for_a_gpu_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["explain", "--shape", "1,16384,16,128", "--window", "1023,0", "--device", "NVIDIA A100", "--dtype", "bfloat16"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    for words in ("backend", "triton", "hopper", "roofline", "NVIDIA A100"):
        assert words in printed
    assert main([*arguments, "--backward"]) == 0
    assert "bwd" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "1,128,4"], "--shape is '1,128,4'; it must be 4 integers"),
        (["--shape", "1,a,4,64"], "it must be 4 integers"),
        (["--shape", "1,-5,4,64"], "it must be 4 integers from 0 on"),
        (["--shape", "1,128,4,64", "--kv", "5"], "--kv is '5'; it must be 2 or 3 integers"),
        (["--shape", "1,128,4,64", "--window", "-3,0"], "window"),
        (["--shape", "1,128,4,64", "--dtype", "int8"], "--dtype is 'int8'"),
        (["--shape", "1,128,4,64", "--kv", "128,3"], "heads"),
        (["--shape", "1,128,4,64", "--device", "cpu", "--backend", "hopper"], "hopper"),
    ],
)
def test_explain_refuses_in_one_sentence(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""


def test_demo_writes_its_figure_and_prints_json(tmp_path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.demo import Settings

    tiny = Settings("cpu", 3, 32, 2, (64, 128), 2, 16, torch.float32, memory_limit=1_000_000, time_budget=30.0)
    asked = {}
    monkeypatch.setattr(Settings, "for_device", lambda device, **options: asked.update(device=device, **options) or tiny)
    assert main(["demo", "--out", str(tmp_path), "--device", "cpu", "--steps", "3", "--memory-limit", "0.5", "--json"]) == 0
    assert asked == {"device": "cpu", "steps": 3, "memory_limit": 500_000_000}
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "results.json").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.png", "memory.svg", "results.json"]
    assert main(["demo", "--out", str(tmp_path), "--device", "cpu"]) == 0
    assert "agree at every step" in capsys.readouterr().out


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("doctor", "explain", "demo"))


def test_python_dash_m_is_the_same_program() -> None:
    result = subprocess.run([sys.executable, "-m", "tilewise", "doctor", "--json"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and json.loads(result.stdout)["usable"]
