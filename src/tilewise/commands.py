"""The commands of the `tilewise` program, apart from their start in `cli.py`. Needs typer and rich."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tilewise
from tilewise import doctor as doctor_module
from tilewise import warmup as warmup_module

app = typer.Typer(
    help="Exact attention for PyTorch, tile by tile.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
Json = Annotated[bool, typer.Option("--json", help="Print plain JSON.")]


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine can run, what is missing and how to get it."""
    raise typer.Exit(doctor_module.main(["--json"] if as_json else []))


@app.command()
def explain(
    shape: Annotated[str, typer.Option(help="The queries: batch,length,heads,head_dim.")],
    kv: Annotated[str, typer.Option(help="The keys, where they differ: length,heads or length,heads,value_dim.")] = "",
    causal: Annotated[bool, typer.Option("--causal", help="A query sees no later key.")] = False,
    window: Annotated[str, typer.Option(help="left,right: how far a query sees; -1 is unlimited.")] = "-1,-1",
    softcap: Annotated[float, typer.Option(help="Scores become softcap·tanh(score/softcap); 0 is off.")] = 0.0,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="A torch device, or a GPU by name, such as 'NVIDIA H200'. Default: this machine's.")] = "",
    backward: Annotated[bool, typer.Option("--backward", help="Explain the backward pass.")] = False,
    backend: Annotated[str, typer.Option(help="Ask for one backend by name.")] = "auto",
    as_json: Json = False,
) -> None:
    """Which kernel a call would use and why no faster one, its work, memory and time at the roofline. Runs nothing."""
    try:
        batch, length, heads, head_dim = _integers("shape", shape, (4,))
        keys = [*_integers("kv", kv, (2, 3)), head_dim][:3] if kv else [length, heads, head_dim]
        left, right = _integers("window", window, (2,), least=-1)
        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
        q = torch.empty(batch, length, heads, head_dim, dtype=DTYPES[dtype], device="meta")
        k = torch.empty(batch, keys[0], keys[1], head_dim, dtype=q.dtype, device="meta")
        v = torch.empty(batch, *keys, dtype=q.dtype, device="meta")
        explanation = tilewise.explain(
            q,
            k,
            v,
            causal=causal,
            window_size=(left, right),
            softcap=softcap,
            backend=backend,
            device=device or None,
            pass_="bwd" if backward else "fwd",
        )
    except (ValueError, TypeError, RuntimeError) as error:  # a refusal in words; UnsupportedAttention is a RuntimeError
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(explanation.as_dict(), indent=2))
        return
    table = Table(show_header=False, title="tilewise.attention", title_justify="left", title_style="bold")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in str(explanation).splitlines():
        table.add_row(line[:14].strip(), line[14:])
    console.print(table, markup=False)


@app.command()
def warmup(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(warmup_module.MODELS)}.")] = "",
    shape: Annotated[str, typer.Option(help="Instead of a model: heads,kv_heads,head_dim.")] = "",
    window: Annotated[int, typer.Option(help="With --shape: keys that a query sees, its own included; 0 is all.", min=0)] = 0,
    softcap: Annotated[float, typer.Option(help="With --shape: scores become softcap·tanh(score/softcap); 0 is off.", min=0)] = 0.0,
    full: Annotated[bool, typer.Option("--full", help="With --shape: no causal order.")] = False,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    processes: Annotated[int, typer.Option(help="How many compile side by side; 0: one for each core.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Compile the kernels of a model ahead of its first call, side by side, into Triton's cache on disk."""
    try:
        if bool(model) == bool(shape):
            raise ValueError("give one of --model and --shape")
        if model and model not in warmup_module.MODELS:
            raise ValueError(f"--model is {model!r}; it must be one of {', '.join(warmup_module.MODELS)}, or give --shape")
        if dtype not in DTYPES:
            raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
        if shape:
            heads, kv_heads, head_dim = _integers("shape", shape, (3,))
            chosen = warmup_module.Model(heads, kv_heads, head_dim, windows=(window,), causal=not full, softcap=softcap)
        else:
            chosen = warmup_module.MODELS[model]
        warmup_module.check_device()
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    listed = warmup_module.cases(chosen, DTYPES[dtype])
    seconds = {}
    with Progress(console=Console(stderr=True, quiet=as_json)) as bars:
        bar = bars.add_task("compiling", total=len(listed))
        for case, spent in warmup_module.run_all(listed, processes):
            seconds[case.name] = round(spent, 2)
            bars.update(bar, advance=1, description=case.name)
    if as_json:
        print(json.dumps(seconds))
        return
    for name, spent in seconds.items():
        console.print(f"{name:<28}{spent:6.1f} s", highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the figure and the numbers go.")] = Path("demo-output"),
    device: Annotated[str, typer.Option(help="A torch device. Default: a GPU where there is one.")] = "",
    steps: Annotated[int, typer.Option(help="Training steps; 0: as many as suit the device.", min=0)] = 0,
    memory_limit: Annotated[
        float,
        typer.Option(help="GB beyond which unfused attention is not tried; 0: 2 on a CPU, nine tenths of the free memory on a GPU.", min=0),
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Train a small GPT on Python's own source, with tilewise and with unfused attention, then watch memory grow with the context."""
    from tilewise.demo import Settings, plot, report, run

    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings.for_device(name, steps=steps or None, memory_limit=int(memory_limit * 1e9) or None)
    with report.progress_bar(Console(stderr=True, quiet=as_json)) as progress:
        results = run(settings, progress)
    figures = plot.draw(results, out)
    numbers = out / "results.json"
    numbers.write_text(json.dumps(results, indent=1) + "\n")
    if as_json:
        print(json.dumps(results))
    else:
        report.show(results, [*figures, numbers], console)
    raise typer.Exit(0 if results["training"]["agree"] else 1)


@app.command()
def lab(
    device: Annotated[
        str, typer.Option(help="cpu counts bytes tile by tile, cuda measures kernels; auto: cuda where there is one.")
    ] = "auto",
    budget: Annotated[float, typer.Option(help="Seconds after which nothing new is started; 0: 90 on a CPU, 400 on a GPU.", min=0)] = 0.0,
    trace: Annotated[str, typer.Option(help="Draw one small case step by step into this HTML file instead.")] = "",
    out: Annotated[str, typer.Option(help="A file that the rows are appended to as JSON lines.")] = "",
    as_json: Json = False,
) -> None:
    """The road from the N x N matrix to tiles: each algorithm run, its memory traffic predicted and counted, or on a GPU measured."""
    from tilewise.lab import run

    out_to, trace_to = (Path(path) if path else None for path in (out, trace))
    raise typer.Exit(run.main(device=device, budget_s=budget or None, out=out_to, trace_to=trace_to, as_json=as_json))


_FORWARDED = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_FORWARDED)
def bench(context: typer.Context) -> None:
    """Time attention beside its peers, every result checked first. `tilewise bench --help` lists the options."""
    from tilewise.bench.run import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=_FORWARDED)
def plot(context: typer.Context) -> None:
    """Draw the figures of a results file. `tilewise plot --help` lists the options."""
    from tilewise.bench.plot import main

    raise typer.Exit(main(context.args))


@app.command(context_settings=_FORWARDED)
def tune(context: typer.Context) -> None:
    """Measure tiles for the portable Triton kernels on this device. `tilewise tune --help` lists the options."""
    from tilewise.bench.tune import main

    raise typer.Exit(main(context.args))


def _integers(option: str, text: str, lengths: tuple[int, ...], least: int = 0) -> list[int]:
    """The comma-separated integers of an option, as many as one of `lengths`, none below `least`."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in lengths or min(numbers) < least:
        wanted = " or ".join(map(str, lengths))
        raise ValueError(f"--{option} is {text!r}; it must be {wanted} integers from {least} on, joined by commas")
    return numbers
