"""Speed-ups by method and task set, beside the paper's own: rows of ``python -m eagle2 bench`` -> info -> figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go

from visual.theme import LIGHT, SANS, SERIES, Palette, escape

# EAGLE-2 (arXiv 2406.16858v2), Table 1, Vicuna-7B at temperature 0: speed-up over plain autoregressive decoding.
PAPER = {
    "EAGLE-2": {
        "mt_bench": 3.62, "humaneval": 3.95, "gsm8k": 3.63, "alpaca": 3.46, "cnn_dm": 2.94, "natural_questions": 2.76,
        "mean": 3.39,
    },
    "EAGLE": {
        "mt_bench": 2.90, "humaneval": 3.33, "gsm8k": 3.01, "alpaca": 2.79, "cnn_dm": 2.33, "natural_questions": 2.31,
        "mean": 2.78,
    },
    "PLD": {
        "mt_bench": 1.61, "humaneval": 1.82, "gsm8k": 1.82, "alpaca": 1.21, "cnn_dm": 2.53, "natural_questions": 1.23,
        "mean": 1.70,
    },
}  # fmt: skip
PAPER_SOURCE = "the paper's Table 1: Vicuna-7B, temperature 0, on its own GPUs"
TASKS = {"sum": "cnn_dm", "qa": "natural_questions"}  # our files' names -> the paper's, where they differ

BASE = "ar"  # the method that speed-ups are over: the line at 1
# Method -> its place in SERIES. The paper's methods look like ours of the same kind.
STYLES = {
    "eagle2-auto": 0, "eagle2": 1, "eagle2-paper": 2, "static": 3, "lookup": 4, "hf-lookup": 5, "hf": 6, "llamacpp": 7,
    "eagle2-auto-nolookup": 8,
}  # fmt: skip
PAPER_STYLES = {"EAGLE-2": 2, "EAGLE": 3, "PLD": 5}


class Bars(NamedTuple):
    """One method's bars, one a set; None: no figure for that set."""

    name: str
    style: int
    speedups: tuple[float | None, ...]
    quartiles: tuple[tuple[float, float] | None, ...]
    hovers: tuple[str, ...]


class BenchInfo(NamedTuple):
    sets: tuple[str, ...]
    measured: tuple[Bars, ...]
    paper_sets: tuple[str, ...]  # those of ours that the paper has, in its words; none: its mean
    paper: tuple[Bars, ...]
    about: str


def info(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> BenchInfo:
    """``rows`` and ``settings`` are those of the command's JSON."""
    sets = tuple(dict.fromkeys(row["set"] for row in rows))
    by_key = {(row["method"], row["set"]): row for row in rows}
    measured = []
    for method, style in STYLES.items():
        own = [by_key.get((method, name)) for name in sets]
        if not any(own):
            continue
        measured.append(
            Bars(
                method,
                style,
                tuple(row["speedup"] if row else None for row in own),
                tuple((row["quartiles"][0], row["quartiles"][1]) if row and row["quartiles"] else None for row in own),
                tuple(_hover(row) if row else "" for row in own),
            )
        )
    tasks = tuple(task for name in sets if (task := TASKS.get(name, name)) in PAPER["EAGLE-2"]) or ("mean",)
    paper = tuple(
        Bars(
            method,
            PAPER_STYLES[method],
            tuple(figures[task] for task in tasks),
            (None,) * len(tasks),
            tuple(f"{method}, {task}: {figures[task]:.2f}x" for task in tasks),
        )
        for method, figures in PAPER.items()
    )
    about = (
        f"{settings['target']}, {settings['dtype']} on {settings['device']}, {settings['threads']} threads, "
        f"{settings['max_new_tokens']} new tokens, greedy"
    )
    return BenchInfo(sets, tuple(measured), tasks, paper, about)


def _hover(row: Mapping[str, Any]) -> str:
    text = f"{row['method']} ({row['precision']}), {row['set']}: {row['speedup']:.2f}x"
    if row["quartiles"]:
        text += f" (quartiles {row['quartiles'][0]:.2f} to {row['quartiles'][1]:.2f})"
    text += f", {row['tokens_per_second']:.1f} tokens/s"
    if row["tau"] is not None:
        text += f", τ {row['tau']:.2f}"
    return f"{text}, {100 * row['equal_share']:.0f} % equal outputs"


def figure(bench: BenchInfo, palette: Palette = LIGHT) -> go.Figure:
    """Grouped bars, ours to the left and the paper's to the right; whiskers are quartiles, the line is plain decoding."""
    split = 0.62
    traces: list[dict[str, Any]] = []
    for panel, names, bars_of_panel in (("", bench.sets, bench.measured), ("2", bench.paper_sets, bench.paper)):
        sets = [escape(name) for name in names]
        for bars in bars_of_panel:
            color, pattern = SERIES[bars.style]
            trace: dict[str, Any] = {
                "type": "bar", "name": escape(bars.name), "x": sets, "y": list(bars.speedups),
                "xaxis": f"x{panel}", "yaxis": f"y{panel}", "hovertext": [escape(text) for text in bars.hovers],
                "hoverinfo": "text", "legend": f"legend{panel}",
                "marker": {"color": color, "pattern": {"shape": pattern, "fgcolor": palette.paper, "solidity": 0.15}},
                "text": ["" if value is None else f"{value:.2f}" for value in bars.speedups],
                "textposition": "inside", "textangle": -90, "insidetextanchor": "start", "constraintext": "none",
            }  # fmt: skip
            if any(bars.quartiles):
                above, below = _whiskers(bars)
                trace["error_y"] = {
                    "type": "data", "symmetric": False, "color": palette.ink, "thickness": 1, "width": 3, "array": above,
                    "arrayminus": below,
                }  # fmt: skip
            traces.append(trace)
    axis = {"gridcolor": palette.rule, "linecolor": palette.edge, "zeroline": False, "rangemode": "tozero"}
    layout: dict[str, Any] = {
        "barmode": "group", "paper_bgcolor": palette.paper, "plot_bgcolor": palette.paper, "height": 520,
        "font": {"family": SANS, "color": palette.ink, "size": 12},
        "title": {"text": f"Speed-up over our own plain decoding<br><sub>{escape(bench.about)}</sub>", "x": 0.01},
        "margin": {"l": 60, "r": 20, "t": 90, "b": 120},
        "xaxis": {"domain": [0, split - 0.04], "linecolor": palette.edge, "type": "category"},
        "yaxis": axis | {"title": {"text": "times the tokens/s of plain decoding"}},
        "legend": {"orientation": "h", "x": 0, "y": -0.12, "yanchor": "top"},
        "shapes": [
            {"type": "line", "xref": f"x{panel} domain", "x0": 0, "x1": 1, "yref": f"y{panel}", "y0": 1, "y1": 1,
             "line": {"color": palette.ink, "width": 1, "dash": "dash"}}
            for panel in ("", "2")
        ],
        "xaxis2": {"domain": [split + 0.04, 1], "linecolor": palette.edge, "type": "category", "anchor": "y2"},
        "yaxis2": axis | {"anchor": "x2"},
        "legend2": {"orientation": "h", "x": split + 0.04, "y": -0.12, "yanchor": "top"},
        "annotations": [
            {"text": escape(PAPER_SOURCE), "xref": "paper", "yref": "paper", "x": split + 0.04, "y": 1.02,
             "xanchor": "left", "yanchor": "bottom", "showarrow": False, "font": {"size": 11, "color": palette.dim}},
        ],
    }  # fmt: skip
    return go.Figure({"data": traces, "layout": layout})


def _whiskers(bars: Bars) -> tuple[list[float], list[float]]:
    """From the bars' ends up and down to the quartiles; 0 where there are none."""
    above, below = [], []
    for value, span in zip(bars.speedups, bars.quartiles):
        low, high = (0.0, 0.0) if value is None or span is None else (value - span[0], span[1] - value)
        above.append(high)
        below.append(low)
    return above, below


def write(path: str | Path, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """The chart as one HTML page with plotly.js inside."""
    figure(info(rows, settings)).write_html(str(path), include_plotlyjs=True)
