"""The script around NVIDIA's compute-sanitizer: what it makes of the tool's words, and that its calls reach the kernels they name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import attention, explain

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("sanitizer_cases", ROOT / "scripts" / "sanitizer_cases.py")
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

# Stands in for the tool: it does not run the call, and finds what the call's name says.
TOOL = r"""#!/bin/bash
[ "$1" = --help ] && echo "--padding --report-api-errors" && exit
[ "$2" = memcheck ] && [[ "$*" != *"--padding 4096"* ]] && echo "no gap" && exit 1
[ -n "$PYTORCH_NO_CUDA_MEMORY_CACHING" ] || exit 1
name=${@: -1}
case "$2 $name" in
  "memcheck first") echo "========= Invalid __global__ read of size 2 bytes"; echo "========= ERROR SUMMARY: 3 errors"; exit 1 ;;
  "racecheck "*)
    echo "========= Error: Race reported between Write access at some_kernel+0x10 in a.py:1"
    echo "=========     and Read access at some_kernel+0x20 in a.py:2 [4096 hazards]"
    echo "========="
    echo "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)" ;;
  *" second") echo "RuntimeError: no kernel"; echo "========= ERROR SUMMARY: 0 errors"; exit 1 ;;
  *" third") echo "========= Error: Device not supported"; exit 1 ;;
  *" slow") sleep 30 ;;
  *) echo "========= ERROR SUMMARY: 0 errors" ;;
esac
"""
LISTING = '#!/bin/bash\n[ "$1" = -c ] && exit\nprintf "%s\\n" "plain, one" first second third slow\n'

WHAT_IS_SAID = {
    "plain, one": ("0 errors", 0),
    "first": ("3 errors", 1),
    "second": ("the call failed: RuntimeError: no kernel", 1),
    "third": ("no summary, exit status 1: ========= Error: Device not supported", 1),
    "slow": ("not finished in 1 s", 1),
}


@pytest.fixture
def run_script(tmp_path: Path) -> Any:
    for name, text in (("compute-sanitizer", TOOL), ("python", LISTING)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(**options: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": "python", "OUT": str(tmp_path / "out"), "LIMIT": "1", **options}
        return subprocess.run(["bash", str(ROOT / "scripts" / "sanitizer.sh")], env=environment, capture_output=True, text=True, timeout=60)

    return run


on_posix = pytest.mark.skipif(sys.platform == "win32", reason="the script is for bash")


@on_posix
@pytest.mark.parametrize("name", WHAT_IS_SAID)
def test_each_outcome_has_its_line_and_status(run_script: Any, name: str) -> None:
    said, status = WHAT_IS_SAID[name]
    done = run_script(CASES=f"^{name}$", TOOLS="memcheck")
    assert done.returncode == status, done.stdout + done.stderr
    assert f"memcheck   {name:<36} {said}" in done.stdout.splitlines()


@on_posix
def test_races_are_told_once_and_do_not_fail_the_run(run_script: Any, tmp_path: Path) -> None:
    done = run_script(CASES="plain|first", TOOLS="racecheck", JOBS="2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 hazards") == 2 and "nothing found in 0 of 2 calls" in done.stdout
    race = "Error: Race reported between Write access at some_kernel+0x10 in a.py:1 and Read access at some_kernel+0x20 in a.py:2"
    assert done.stdout.count("Race reported") == 1 and f"2 {race}\n" in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"sanitizer.txt", "racecheck.log"}
    assert (tmp_path / "out" / "racecheck.log").read_text().count("######## ") == 2


@on_posix
def test_without_the_tool_it_says_so(run_script: Any) -> None:
    done = run_script(SANITIZER="/nowhere/compute-sanitizer")
    assert done.returncode == 2 and "compute-sanitizer is not here" in done.stdout


def test_the_calls_are_served_by_the_kernels_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, forward and backward; those over packed sequences and caches are only well-formed here."""
    pytest.importorskip("triton", reason="where Triton is not installed, no kernel of it serves a call")
    seen: list[str] = []

    def told(call: Any, backend: str, given: dict[str, Any]) -> None:
        seen.append(backend)
        if call is attention:
            for pass_ in ("fwd", "bwd"):
                chosen = explain(**{"deterministic": False, **given}, backend=backend, device="NVIDIA H200", pass_=pass_)
                assert chosen.backend == backend

    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "differentiate", told)
    for name, call in cases.CASES.items():
        if not name.startswith("cache"):
            call()
    assert len(seen) == len(cases.CASES) - 2


def test_a_call_that_other_kernels_serve_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "watch", lambda backend: ["forward"])
    with pytest.raises(SystemExit, match="alone"):
        cases.dense("tiled", queries=5, keys=7)


def test_values_that_are_not_finite_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(cases, "watch", lambda backend: ["forward", "backward"])
    monkeypatch.setattr(cases, "randn", lambda *shape, dtype=cases.BF16: torch.full(shape, float("nan"), dtype=dtype))
    with pytest.raises(SystemExit, match="finite"):
        cases.dense("tiled", queries=5, keys=7)
