# mypy: disable-error-code="import-untyped"
"""One small case of both loop orders, step by step, as a self-contained HTML page with a slider (plotly).

Each row of pictures is one order, the slider moves both through the same number of steps. From left to right: which tiles of which tensor
cross the border of the chip, the pair of tiles at work, m and l, and the accumulator O, as they are after the step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .algorithms import FA1, FA2, Inputs
from .results import Row
from .traffic import DeviceMemory, Step, Tiles

ROWS, DIM, BLOCK = 8, 4, 2
TENSORS = ("Q", "K", "V", "O", "m", "l")
# Colour-blind safe (Okabe and Ito): nothing, loaded, stored, loaded and stored.
TOUCHED = ((0.0, "#eeeeee"), (0.33, "#56b4e9"), (0.66, "#e69f00"), (1.0, "#009e73"))
TOUCHED_NAMES = ("not touched", "loaded", "stored", "loaded and stored")


@dataclass(frozen=True, slots=True)
class Frame:
    """One order after one step: everything a picture shows."""

    title: str
    touched: Tensor  # (tensors, tiles): 0 nothing, 1 loaded, 2 stored, 3 both
    pairs: Tensor  # (tiles of Q, tiles of K): 0 to come, 1 done, 2 at work
    state: Tensor  # (rows, 2): m and l, NaN where none exists yet
    o: Tensor  # (rows, DIM), NaN where none exists yet
    bytes: int  # moved so far


def frames(order: str, inputs: Inputs) -> list[Frame]:
    """The frames of "fa1" or "fa2", one a pair of tiles, and a last one for what is written after all."""
    step = {"fa1": FA1, "fa2": FA2}[order]
    assert step.count is not None
    memory = DeviceMemory(record=True)
    results = step.count(memory, inputs)
    memory.step()  # what was stored after the last pair
    tiles = inputs.case().tiles_m
    pairs, made, moved = torch.zeros(tiles, tiles), [], 0
    state, o = torch.full((ROWS, 2), float("nan")), torch.full((ROWS, DIM), float("nan"))
    for number, now in enumerate(_with_own_stores(memory.steps), start=1):
        pairs = torch.where(pairs == 2, 1.0, pairs)
        moved += sum(access.nbytes for access in now.accesses)
        if now.state:
            rows, cols = now.state["rows"], now.state["cols"]
            pairs[rows.start // BLOCK, cols.start // BLOCK] = 2
            state, o = state.clone(), o.clone()
            state[rows, 0], state[rows, 1], o[rows] = now.state["m"], now.state["l"], now.state["o"]
            if order == "fa2":  # finished rows were divided by l when they left the chip
                done = slice(0, rows.start)
                o[done] = results["o"][0, done]
            title = f"step {number}: queries {_span(rows)}, keys {_span(cols)}"
        else:
            o = results["o"][0]
            title = f"step {number}: done"
        made.append(Frame(title, _touched(now, tiles), pairs.clone(), state, o, moved))
    return made


def rows() -> list[Row]:
    """Both orders of the small case as results rows: for each step the pair of tiles at work, and what crosses the border."""
    inputs = Inputs.random(1, ROWS, DIM, Tiles(BLOCK, BLOCK))
    made: list[Row] = []
    for order in ("fa1", "fa2"):
        steps = []
        for frame in frames(order, inputs)[:-1]:
            pair = (frame.pairs == 2).nonzero()[0].tolist()
            moved = [
                [TENSORS[place], tile, TOUCHED_NAMES[int(frame.touched[place, tile])]] for place, tile in frame.touched.nonzero().tolist()
            ]
            steps.append({"q_tile": pair[0], "k_tile": pair[1], "moved": moved, "bytes": frame.bytes})
        made.append({"experiment": "trace", "algorithm": order, "pass": "fwd", "seqlen": ROWS, "head_dim": DIM, "block_m": BLOCK,
                     "block_n": BLOCK, "dtype": "float32", "steps": steps, "status": "ok"})  # fmt: skip
    return made


def _with_own_stores(steps: list[Step]) -> list[Step]:
    """The steps, with what one stores at its end (O and the LSE of a finished query tile) counted to it and not to the next."""
    moved = [steps[0]]
    for step in steps[1:]:
        own = list(itertools.takewhile(lambda access: access.kind == "store", step.accesses))
        moved[-1] = Step(moved[-1].accesses + tuple(own), moved[-1].state)
        moved.append(Step(step.accesses[len(own) :], step.state))
    return moved


def _touched(step: Step, tiles: int) -> Tensor:
    touched = torch.zeros(len(TENSORS), tiles)
    seen: Counter[tuple[int, int]] = Counter()
    for access in step.accesses:
        name = access.name if access.name in "ml" else access.name.upper()
        if name not in TENSORS:
            continue  # the LSE stands for m and l once a query tile is done
        rows = access.index[1]
        assert isinstance(rows, slice)
        seen[TENSORS.index(name), rows.start // BLOCK] |= 1 if access.kind == "load" else 2
    for place, kind in seen.items():
        touched[place] = kind
    return touched


def _span(rows: slice) -> str:
    return f"{rows.start} to {rows.stop - 1}"


def write_trace(path: Path) -> Path:
    """Writes the page and returns where it is.

    Raises:
        ImportError: plotly is not installed; the message says how to install it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(figure().to_html(include_plotlyjs=True, full_html=True, auto_play=False, div_id="trace"), encoding="utf-8")
    return path


def figure() -> Any:
    """The plotly figure with a frame a step."""
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError as missing:
        raise ImportError("the trace needs plotly: pip install plotly") from missing

    inputs = Inputs.random(1, ROWS, DIM, Tiles(BLOCK, BLOCK))
    by_order = [frames(order, inputs) for order in ("fa1", "fa2")]
    count = max(map(len, by_order))
    by_order = [own + own[-1:] * (count - len(own)) for own in by_order]
    names = ("FlashAttention-1 order: K and V outside", "FlashAttention-2 order: Q outside")
    picture = make_subplots(
        rows=2,
        cols=4,
        column_widths=[0.3, 0.2, 0.2, 0.3],
        horizontal_spacing=0.05,
        vertical_spacing=0.16,
        subplot_titles=[
            title
            for o in ("O, divided by l at every step", "O, divided by l when its row is done")
            for title in ("tiles that cross the border", "tile of S at work", "m and l", o)
        ],
    )
    for row, own in enumerate(by_order, start=1):
        for column, trace in enumerate(_traces(go, own[0]), start=1):
            picture.add_trace(trace, row=row, col=column)
        picture.update_yaxes(autorange="reversed", row=row)
        picture.update_yaxes(title_text="query tile", row=row, col=2)
        picture.update_xaxes(title_text="key tile", row=row, col=2)
    picture.frames = [
        go.Frame(
            name=str(number),
            data=[trace for own in by_order for trace in _traces(go, own[number])],
            layout={"title": {"text": _title(names, [own[number] for own in by_order])}},
        )
        for number in range(count)
    ]
    steps = [
        {
            "label": str(number + 1),
            "method": "animate",
            "args": [[str(number)], {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}],
        }
        for number in range(count)
    ]
    picture.update_layout(
        title={"text": _title(names, [own[0] for own in by_order]), "font": {"size": 15}},
        sliders=[{"active": 0, "steps": steps, "currentvalue": {"prefix": "step "}, "pad": {"t": 50}}],
        height=780,
        margin={"t": 140},
        template="plotly_white",
        showlegend=False,
    )
    return picture


def _title(names: tuple[str, str], now: list[Frame]) -> str:
    lines = [f"<b>{name}</b>, {frame.title}; {frame.bytes:,} bytes moved" for name, frame in zip(names, now, strict=True)]
    return "<br>".join([*lines, "blue loaded, orange stored, green loaded and stored; grey not touched"])


def _traces(go: Any, frame: Frame) -> list[Any]:
    """The four pictures of one order."""
    tiles = frame.pairs.shape[0]
    touched_names = [[TOUCHED_NAMES[int(value)] for value in row] for row in frame.touched]
    base = {"showscale": False, "xgap": 2, "ygap": 2}
    labels = [f"tile {number}" for number in range(tiles)]
    return [
        go.Heatmap(
            z=frame.touched.tolist(), x=labels, y=list(TENSORS), zmin=0, zmax=3, colorscale=TOUCHED, text=touched_names,
            hovertemplate="%{y}, %{x}: %{text}<extra></extra>", **base,
        ),
        go.Heatmap(z=frame.pairs.tolist(), zmin=0, zmax=2, colorscale=((0, "#eeeeee"), (0.5, "#999999"), (1, "#d55e00")), **base),
        _numbers(go, frame.state, ["m", "l"], base),
        _numbers(go, frame.o, [f"{column}" for column in range(frame.o.shape[1])], base),
    ]  # fmt: skip


def _numbers(go: Any, values: Tensor, columns: list[str], base: dict[str, Any]) -> Any:
    text = [["" if value != value else f"{value:.2f}" for value in row] for row in values.tolist()]
    shown = values.nan_to_num(0.0).tolist()
    return go.Heatmap(
        z=shown, x=columns, y=[f"query {row}" for row in range(len(shown))], zmin=-4, zmax=4, colorscale="RdBu", text=text,
        texttemplate="%{text}", hovertemplate="%{y}, %{x}: %{text}<extra></extra>", **base,
    )  # fmt: skip
