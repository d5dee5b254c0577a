"""The first minutes: blocked or unsupported packages, cache folders that cannot be written, warm-up, threads, and copies of masks."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch

import tilewise
from tests.helpers import make_inputs
from tilewise import UnsupportedAttention, masks, versions, warmup
from tilewise.cli import main
from tilewise.kernels import kernel_cache

SOURCE = Path(tilewise.__file__).parent


def run(script: str) -> str:
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_but_the_gpu_kernels_works_where_triton_cannot_be_imported() -> None:
    """As on Windows and macOS, where Triton has no packages."""
    printed = run(
        """
        import sys
        sys.modules["triton"] = None  # an import of it raises
        import torch, tilewise
        from tilewise import compat, doctor, masks
        from tilewise.compat import flash_attn, sdpa

        q, k, v = (torch.randn(2, 9, 4, 16, requires_grad=True) for _ in range(3))
        out = tilewise.attention(q, k, v, mask=masks.Causal() & masks.Chunked(4), return_aux="lse")[0]
        out.sum().backward()
        flash_attn.flash_attn_func(q, k, v, causal=True).sum().backward()
        sdpa.scaled_dot_product_attention(q, k, v)
        assert tilewise.explain(q, k, v).backend in ("torch", "tiled")
        try:
            tilewise.attention(q, k, v, backend="triton")
        except tilewise.UnsupportedAttention as refusal:
            print(refusal)
        print([x.what for x in doctor.examine().missing if "triton" in x.what], sys.modules["triton"])
        """
    )
    refusal, found = printed.strip().splitlines()
    assert "Triton is not installed" in refusal and "backend='auto'" in refusal
    assert found == "['triton 3.6 or newer'] None"


def test_recording_a_pass_does_not_import_torch_compile() -> None:
    """A call that comes again is recorded under a dispatch mode. What torch puts around a mode's method imports torch.compile when it is
    first called, which made the second call of every process two seconds longer."""
    printed = run(
        """
        import sys, torch
        from tilewise.kernels import replay

        x = torch.zeros(4, 4)
        before = set(sys.modules)
        recording = replay.Recording([x], [x.data_ptr()])
        with recording:
            made = torch.empty(4, 4), x.new_empty(3)
        print([y.data_ptr() for y in recording.made] == [y.data_ptr() for y in made], sorted(sys.modules.keys() - before))
        """
    )
    assert printed.strip() == "True []"


# Modules of the standard library that exist on some systems only.
ELSEWHERE = {"crypt", "curses", "fcntl", "grp", "msvcrt", "nis", "posix", "pty", "pwd", "readline", "resource", "select", "spwd", "syslog"}
ELSEWHERE |= {"termios", "tty", "winreg", "winsound", "_winapi"}


def test_no_module_imports_at_its_top_what_some_systems_lack() -> None:
    for path in SOURCE.rglob("*.py"):
        gpu_only = {"triton", "hopper", "lab"} & set(path.relative_to(SOURCE).parts[:-1])
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                package = name.partition(".")[0]
                assert package not in ELSEWHERE, f"{path} imports {package}"
                assert gpu_only or package != "triton", f"{path} imports triton"


@pytest.mark.parametrize(
    ("torch_version", "triton_version", "named"),
    [
        ("2.13.0+cpu", "3.9.0", []),
        ("2.11.0", "", []),
        ("2.12.1", "3.6.0", []),
        ("3.0.0", "4.0.0", []),
        ("2.10.0", "3.6.0", ["torch 2.10.0"]),
        ("2.11.0", "3.5.1", ["Triton 3.5.1"]),
        ("2.9.0", "3.5.0", ["torch 2.9.0", "Triton 3.5.0"]),
    ],
)
def test_an_unsupported_pair_is_told_in_one_sentence(torch_version: str, triton_version: str, named: list[str]) -> None:
    problem = versions.complaint(torch_version, triton_version)
    assert bool(problem) == bool(named)
    if named:
        supported = ["torch 2.11 or newer (tested to 2.13)", "Triton 3.6 or newer (tested to 3.9)"]
        assert all(words in problem for words in [*named, *supported])
        assert "\n" not in problem and problem.count(". ") == 0


def test_the_range_that_is_told_is_the_range_that_is_tested() -> None:
    """`make test` runs on the newest torch of the range, and the README says so."""
    root = Path(__file__).parents[1]
    newest = versions.dotted(versions.NEWEST_TESTED_TORCH)
    assert f"TORCH ?= torch=={newest}.0\n" in (root / "Makefile").read_text()
    assert f"torch {versions.dotted(versions.OLDEST_TORCH)} and {newest}" in (root / "README.md").read_text()
    assert f"OLDEST_TRITON := triton=={versions.dotted(versions.OLDEST_TRITON)}." in (root / "Makefile").read_text()


def test_the_sentence_comes_before_what_an_old_torch_breaks() -> None:
    printed = run(
        """
        import sys, warnings
        import torch

        torch.__version__ = "2.6.0"
        sys.modules["tilewise.api"] = None  # stands for the first import that fails there
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                import tilewise
            except ImportError:
                print(*[x.message for x in caught if "tilewise supports" in str(x.message)])
        """
    )
    assert "torch 2.11 or newer" in printed and "has torch 2.6.0" in printed


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the warning is about the Triton that is installed")
def test_the_sentence_is_a_warning_at_import() -> None:
    """Once, with everything still importable and the tiled path at work."""
    printed = run(
        """
        import importlib.metadata, warnings
        import torch

        version = importlib.metadata.version
        importlib.metadata.version = lambda name: "3.2.0" if name == "triton" else version(name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import tilewise
        print(*[x.message for x in caught if "tilewise supports" in str(x.message)], sep="\\n")
        print(tilewise.attention(*torch.randn(3, 1, 4, 2, 8)).shape)
        """
    )
    sentence, shape = printed.strip().splitlines()
    assert "torch 2.11 or newer (tested to 2.13) with Triton 3.6 or newer (tested to 3.9)" in sentence and "has Triton 3.2.0" in sentence
    assert shape == "torch.Size([1, 4, 2, 8])"


# ------------------------------------------------------------------------------------------------------- Triton's cache folder


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch):
    knobs = pytest.importorskip("triton.knobs")
    kernel_cache.prepare.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(knobs.cache, "dir", knobs.cache.dir)
        yield lambda folder: patch.setattr(knobs.cache, "dir", str(folder))
    kernel_cache.prepare.cache_clear()


def test_a_writable_cache_folder_is_left_alone(cache_folder, tmp_path: Path) -> None:
    from triton import knobs

    cache_folder(tmp_path / "new" / "folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel_cache.prepare()
    assert knobs.cache.dir == str(tmp_path / "new" / "folder") and Path(knobs.cache.dir).is_dir()


def test_a_folder_that_cannot_exist_is_replaced_with_one_warning(cache_folder, tmp_path: Path) -> None:
    from triton import knobs

    (tmp_path / "file").touch()
    cache_folder(tmp_path / "file" / "cache")
    with pytest.warns(UserWarning, match=r"cannot be written .* TRITON_CACHE_DIR") as caught:
        kernel_cache.prepare()
        kernel_cache.prepare()
    assert len(caught) == 1
    assert os.access(knobs.cache.dir, os.W_OK) and "tilewise-triton-" in knobs.cache.dir


def test_kernels_of_a_read_only_folder_are_still_found(cache_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.cache import FileCacheManager

    cache_folder(tmp_path)
    FileCacheManager("KEY").put("compiled before", "kernel.ptx", binary=False)
    monkeypatch.setattr(kernel_cache, "_why_not_writable", lambda folder: "Read-only file system")  # root may write anywhere
    with pytest.warns(UserWarning, match="Read-only file system"):
        kernel_cache.prepare()
    assert Path(FileCacheManager("KEY").get_file("kernel.ptx")).read_text() == "compiled before"
    FileCacheManager("OTHER").put("compiled now", "kernel.ptx", binary=False)
    assert not (tmp_path / "OTHER").exists()


# -------------------------------------------------------------------------------------------------------------------- warm-up


def test_a_model_s_calls_run_on_any_device() -> None:
    """What warm-up does for each kind of call, on the CPU: the calls are valid ones."""
    for name in ("gpt-oss-20b", "bert-base"):
        model = warmup.MODELS[name]
        small = warmup.Model(4, 2 if model.kv_heads < model.heads else 4, 16, model.windows, model.causal, model.softcap, model.sinks)
        for case in warmup.cases(small, torch.float32):
            assert warmup.run(case, "cpu", 40) > 0


def test_models_have_head_dims_that_the_kernels_take() -> None:
    for name, model in warmup.MODELS.items():
        assert model.heads % model.kv_heads == 0 and model.head_dim <= 256, name
        listed = warmup.cases(model, torch.bfloat16)
        assert len({case.name for case in listed}) == len(listed) == len(model.windows) * (2 if model.causal else 1)


def name_length(case: warmup.Case) -> float:
    """Stands for a compilation; at the top of a module, so that another process finds it."""
    return float(len(case.name))


def test_cases_run_in_other_processes() -> None:
    listed = warmup.cases(warmup.MODELS["bert-base"], torch.bfloat16)
    assert list(warmup.run_all(listed, call=name_length)) == [(listed[0], len("training"))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "llama-3-8b"], "the GPU of this machine"),
        ([], "one of --model and --shape"),
        (["--model", "llama-9"], "must be one of"),
        (["--shape", "32,128"], "3 integers"),
        (["--shape", "32,8,128", "--dtype", "int8"], "--dtype"),
    ],
)
def test_the_warmup_command_refuses_in_words(arguments, words, capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["warmup", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_warmup_command_lists_what_it_compiled(capsys, monkeypatch) -> None:
    monkeypatch.setattr(warmup, "check_device", lambda: None)
    monkeypatch.setattr(warmup, "run_all", lambda listed, processes: ((case, 1.5) for case in listed))
    assert main(["warmup", "--model", "mistral-7b", "--json"]) == 0
    assert capsys.readouterr().out.strip() == '{"training, window 4096": 1.5, "decoding, window 4096": 1.5}'
    assert main(["warmup", "--shape", "8,2,64", "--full"]) == 0
    assert capsys.readouterr().out.split() == ["training", "1.5", "s"]


def test_the_bar_of_warmup_advances_with_each_case(capsys, monkeypatch) -> None:
    commands = pytest.importorskip("tilewise.commands")
    bars, seen = [], []

    class Watched(commands.Progress):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            bars.append(self)

    def one_after_the_other(listed, processes):
        for case in listed:
            seen.append([(task.completed, task.total) for task in bars[-1].tasks])
            yield case, 1.5

    monkeypatch.setattr(commands, "Progress", Watched)
    monkeypatch.setattr(warmup, "check_device", lambda: None)
    monkeypatch.setattr(warmup, "run_all", one_after_the_other)
    assert main(["warmup", "--model", "mistral-7b"]) == 0
    assert seen == [[(0, 2)], [(1, 2)]] and bars[-1].finished
    assert "decoding, window 4096" in (shown := capsys.readouterr().err) and "100%" in shown
    assert main(["warmup", "--model", "mistral-7b", "--json"]) == 0
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------------------------------------------- threads


def test_two_threads_compute_what_one_does() -> None:
    """First calls included: tracing of rules, choice of backends and their caches are shared."""
    cases = [
        (make_inputs(seqlen_q=40, seqlen_k=40), dict(causal=True)),
        (make_inputs(seqlen_q=24, seqlen_k=48), dict(mask=masks.Chunked(8) | masks.FirstKeys(2), softcap=3.0)),
        (make_inputs(seqlen_q=17, seqlen_k=33), dict(score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1)),
    ]

    def compute(out: list[torch.Tensor]) -> None:
        for inputs, rules in cases:
            leaves = [x.clone().requires_grad_() for x in inputs.values()]
            result = tilewise.attention(*leaves, **rules)
            out.extend([result.detach(), *torch.autograd.grad(result.sum(), leaves)])

    results: list[list[torch.Tensor]] = [[], [], []]
    threads = [threading.Thread(target=lambda out=out: [compute(out) for _ in range(4)]) for out in results[:2]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    compute(results[2])
    for out in results[:2]:
        assert len(out) == 4 * len(results[2])
        for index, x in enumerate(out):
            assert torch.equal(x, results[2][index % len(results[2])])


def test_a_refusal_without_a_gpu_is_the_library_s_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedAttention, match="nothing to compile"):
        warmup.check_device()
