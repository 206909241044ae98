"""Side views of one step: the sorted values with the cut, and the rows of the target's pass with their mask.

Each is info -> figure, as the tree is; `views.js` draws the same from the columns of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import plotly.graph_objects as go

from eagle2.trace import StepTrace
from visual import tree
from visual.theme import LIGHT, MONO, PALETTES, Palette, digits, escape, glyphs, isolate, label, short
from visual.tree import PHASES, Phase, Verdict

VALUES_LAYERS = ("line", "cut", "drafted", "kept", "accepted", "checks", "words")
MASK_LAYERS = ("cells", "self", "labels", "columns", "checks", "words")
NOTHING_DRAFTED = "Nothing was drafted in this step."
AXES = "value (log axis), by rank"
NO_ROWS_YET = "No rows yet: the phase Flatten makes them."


class ViewSizes(NamedTuple):
    """Pixels of both views."""

    width: int = 344
    # values
    values_height: int = 190
    left: int = 36
    right: int = 10
    top: int = 22  # room for the label of the cut
    bottom: int = 22
    # With more drafted nodes the ranks have a log axis too, or the kept ones would be a hair's breadth, and the cut ones are
    # a dotted line: so many hollow marks would run into each other.
    crowd: int = 100
    lowest_decade: int = -12  # lower values are drawn there
    letter: float = 5.7  # about the width of one letter of the label
    # mask
    head: int = 30  # above the first row
    foot: int = 4
    body: int = 620  # height of all rows, where they are many
    most_high: int = 18  # a row's height
    least_high: int = 5
    most_wide: int = 26  # a cell's width
    least_wide: int = 4
    prefix: int = 16  # least width of the column of the text so far
    most_prefix: int = 110
    check: int = 12
    cell: float = 6.1  # one character of the row labels, at 10 px
    token_cells: int = 12
    gap: int = 6


SIZES = ViewSizes()


# ---- values and the cut ----


class ValueMark(NamedTuple):
    """One drafted node."""

    node: int
    token: str  # with visible glyphs
    value: float
    drafted_in: int  # number of its draft pass, from 0
    kept: bool
    verdict: Verdict


class ValuesInfo(NamedTuple):
    """All drafted nodes of a step, highest value first."""

    marks: tuple[ValueMark, ...]
    kept: int
    lowest_kept: float | None  # value at the cut
    highest_cut: float | None
    by_value: bool  # the kept ones are those of the highest values


def values_info(step: StepTrace, vocabulary: Mapping[int, str]) -> ValuesInfo:
    """Sorted as the reranking phase sorts: value descending, depth ascending, index ascending; what is kept comes before
    what is cut at the same value, so that a cut between equals is drawn as it was made."""
    kept, depths = set(step.kept), step.depths
    born, verdicts = tree.drafted_in(step), tree.verdicts(step)
    order = sorted(range(1, len(depths)), key=lambda i: (-step.log_value[i], i not in kept, depths[i], i))
    marks = tuple(
        ValueMark(
            node=i,
            token=glyphs(vocabulary.get(step.token_ids[i], f"⟨{step.token_ids[i]}⟩")),
            value=math.exp(min(step.log_value[i], 0.0)),
            drafted_in=born[i],
            kept=i in kept,
            verdict=verdicts[i],
        )
        for i in order
    )
    high = [mark.value for mark in marks if mark.kept]
    low = [mark.value for mark in marks if not mark.kept]
    return ValuesInfo(
        marks=marks,
        kept=len(high),
        lowest_kept=high[-1] if high else None,
        highest_cut=low[0] if low else None,
        by_value=all(mark.kept for mark in marks[: len(high)]),
    )


def ordinal(number: int) -> str:
    """
    >>> [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 22, 101)]
    ['1st', '2nd', '3rd', '4th', '11th', '12th', '22nd', '101st']
    """
    tail = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{tail}"


def values_label(info: ValuesInfo, phase: Phase, shown: int) -> str:
    """What stands at the line, in words."""
    drafted = len(info.marks)
    if not drafted:
        return ""
    if phase == "draft":
        return f"{shown} value{'s' * (shown != 1)} so far"
    if info.kept == drafted:
        return "nothing is cut: 1 value, kept" if drafted == 1 else f"nothing is cut: all {drafted} values kept"
    if not info.kept:
        return f"nothing is kept of {drafted} value{'s' * (drafted != 1)}"
    if not info.by_value:
        return f"{info.kept} of {drafted} kept, not by value"
    assert info.lowest_kept is not None
    return f"cut: the {ordinal(info.kept)} of {drafted} values, {short(info.lowest_kept)}"


def values_words(info: ValuesInfo, phase: Phase, drafted_in: int | None = None) -> str:
    """The figure's text equivalent."""
    shown = _drafted(info, phase, drafted_in)
    if not info.marks or not shown:
        return NOTHING_DRAFTED if not info.marks else "No values yet."
    many = f"{len(shown)} drafted node{'s' * (len(shown) != 1)}"
    ends = f"highest {short(shown[0].value)}, lowest {short(shown[-1].value)}"
    if phase == "draft":
        return f"Values of the {many} so far, {ends}."
    said = f"Values of {many}, {ends}, "
    if info.kept == len(shown):
        said += "all kept, nothing cut"
    elif not info.by_value or info.lowest_kept is None or info.highest_cut is None:
        said += f"{info.kept} kept"
    else:
        said += f"the {info.kept} highest kept, cut between {short(info.lowest_kept)} and {short(info.highest_cut)}"
    if phase == "accept":
        said += f", {sum(mark.verdict == 'accepted' for mark in shown)} accepted"
    return said + "."


def _drafted(info: ValuesInfo, phase: Phase, drafted_in: int | None) -> list[ValueMark]:
    if phase != "draft" or drafted_in is None:
        return list(info.marks)
    return [mark for mark in info.marks if mark.drafted_in <= drafted_in]


def values_span(infos: Iterable[ValuesInfo]) -> tuple[int, int]:
    """(most drafted nodes, decade of the lowest value): the axes of several steps, so that they can be compared."""
    most, low = 1, -1
    for info in infos:
        most = max(most, len(info.marks))
        if info.marks:
            value = max(info.marks[-1].value, 10.0**SIZES.lowest_decade)
            low = min(low, math.floor(math.log10(value) + 1e-4))
    return most, low


def values_template(palette: Palette) -> list[dict[str, Any]]:
    """The traces of `values_figure` without data."""
    skip = {"hoverinfo": "skip"}

    def marks(size: int, color: str, line: str, width: float) -> dict[str, Any]:
        return {
            "mode": "markers",
            "hoverinfo": "text",
            "marker": {"size": size, "color": color, "opacity": 1, "line": {"color": line, "width": width}},
        }

    traces = {
        "line": {"mode": "lines", "line": {"color": palette.ink, "width": 1.25, "dash": "5px,3px"}, **skip},
        "cut": marks(6, palette.paper, palette.outline, 1),
        "drafted": marks(6, palette.edge, palette.outline, 1),
        "kept": marks(8, palette.value_high, palette.outline, 1),
        "accepted": marks(13, palette.accepted, palette.paper, 1),
        "checks": {"mode": "text", "textfont": {"size": 10, "color": palette.accepted_ink}, **skip},
        "words": {"mode": "text", "textfont": {"size": 11}, **skip},
    }
    return [
        {"type": "scatter", "name": name, "uid": f"e2values-{name}", "cliponaxis": False, **traces[name]}
        for name in VALUES_LAYERS
    ]


def values_layout(palette: Palette) -> dict[str, Any]:
    """Layout of `values_figure` without ranges, ticks and labels."""
    base = tree.layout(palette, SIZES.width, SIZES.values_height)
    axis: dict[str, Any] = {
        "visible": True, "fixedrange": True, "autorange": False, "zeroline": False, "showline": False, "ticks": "",
        "gridcolor": palette.rule, "tickfont": {"size": 10, "color": palette.dim},
    }  # fmt: skip
    base |= {
        "margin": {"l": SIZES.left, "r": SIZES.right, "t": SIZES.top, "b": SIZES.bottom, "pad": 0},
        "xaxis": axis | {"showgrid": False},
        "yaxis": axis | {"type": "log"},
        "hoverdistance": 20,
    }
    return base


def values_figure(
    info: ValuesInfo,
    phase: Phase = "accept",
    palette: Palette = LIGHT,
    *,
    drafted_in: int | None = None,
    span: tuple[int, int] | None = None,
    width: int = SIZES.width,
) -> go.Figure:
    """The values at the end of a phase; ``drafted_in``: of the draft phase only up to this pass; ``span``: `values_span`."""
    late = PHASES.index(phase)
    shown = _drafted(info, phase, drafted_in)
    most, low = span or values_span([info])
    data: dict[str, dict[str, Any]] = {name: {"x": [], "y": []} for name in VALUES_LAYERS}
    for rank, mark in enumerate(shown, start=1):
        layer = "drafted" if late < 1 else "kept" if mark.kept else "cut"
        if phase == "accept" and mark.verdict == "accepted":
            layer = "accepted"
        column = data[layer]
        y = max(mark.value, 10.0**low)
        column["x"].append(rank)
        column["y"].append(y)
        column.setdefault("customdata", []).append(mark.node)
        column.setdefault("hovertext", []).append(_values_hover(mark, phase, rank, len(shown)))
        if layer == "accepted":
            data["checks"]["x"].append(rank)
            data["checks"]["y"].append(y)
            data["checks"].setdefault("text", []).append("✓")
    x_axis, y_axis = _values_axes(most, low)
    # Words are texts at the data, since an axis title or an annotation costs the browser ten times as much.
    said, at = values_label(info, phase, len(shown)), 0.0
    inner = width - SIZES.left - SIZES.right
    bottom, top = (10**end for end in y_axis["range"])
    if late >= 1 and info.by_value and 0 < info.kept < len(info.marks):
        data["line"] = {"x": [info.kept + 0.5] * 2, "y": [bottom, top]}
        at = _share(info.kept + 0.5, x_axis)
    if said:
        # At its line, but never over the figure's edge.
        left = max(0.0, min(SIZES.left + at * inner, width - 4 - SIZES.letter * len(said)))
        # The name of the axes stands low, where no value is, and beside the line.
        name = 0 if at * inner > SIZES.letter * len(AXES) else at + 4 / inner
        places = [(_rank((left - SIZES.left) / inner, x_axis), top), (_rank(name, x_axis), 10.0**low)]
        texts, colors, where = [said, AXES], [palette.ink, palette.dim], ["top right"] * 2
    else:
        places = [(_rank(0.5, x_axis), 10 ** (sum(y_axis["range"]) / 2))]
        texts, colors, where = [NOTHING_DRAFTED], [palette.dim], ["middle center"]
    data["words"] = {"x": [x for x, _ in places], "y": [y for _, y in places], "text": texts, "textposition": where}
    layout = values_layout(palette)
    layout["width"] = width
    layout["xaxis"] = layout["xaxis"] | x_axis
    layout["yaxis"] = layout["yaxis"] | y_axis
    traces = [{**base, **data[base["name"]]} for base in values_template(palette)]
    traces[-1]["textfont"] = traces[-1]["textfont"] | {"color": colors}
    if most > SIZES.crowd:
        traces[VALUES_LAYERS.index("cut")] |= {
            "mode": "lines",
            "line": {"color": palette.outline, "width": 2, "dash": "2px,2px"},
        }
    return go.Figure({"data": traces, "layout": layout})


def _values_hover(mark: ValueMark, phase: Phase, rank: int, of: int) -> str:
    token = mark.token if len(mark.token) <= 60 else mark.token[:59] + "…"
    said = f"<b>{escape(isolate(token))}</b><br>value {digits(mark.value)}, {ordinal(rank)} of {of}"
    if phase == "draft":
        return said + " so far"
    return f"{said}<br>{mark.verdict if phase == 'accept' else 'kept' if mark.kept else 'cut'}"


def _values_axes(most: int, low: int) -> tuple[dict[str, Any], dict[str, Any]]:
    if most > SIZES.crowd:
        ticks = [n for n in (1, 3, 10, 30, 100, 300, 1000, 3000, 10000) if n <= most]
        x: dict[str, Any] = {"type": "log", "range": [math.log10(0.8), math.log10(most * 1.15)]}
    else:
        step = next(n for n in (1, 2, 5, 10, 20) if most <= 8 * n)
        ticks = sorted({1, *range(step, most + 1, step)})
        if step > 1 and len(ticks) > 1 and ticks[1] == 2:
            ticks = ticks[1:]
        x = {"type": "linear", "range": [0.2, most + 0.8]}
    x |= {"tickvals": ticks, "ticktext": [str(n) for n in ticks]}
    powers = range(0, -low + 1, max(1, math.ceil(-low / 5)))
    y = {
        "range": [low - 0.15, 0.12],
        "tickvals": [10.0**-n for n in powers],
        "ticktext": ["1" if n == 0 else "." + "0" * (n - 1) + "1" if n <= 3 else f"1e-{n}" for n in powers],
    }
    return x, y


def _share(rank: float, axis: Mapping[str, Any]) -> float:
    low, high = axis["range"]
    return float(((math.log10(rank) if axis["type"] == "log" else rank) - low) / (high - low))


def _rank(share: float, axis: Mapping[str, Any]) -> float:
    """The inverse of `_share`."""
    low, high = axis["range"]
    at = low + share * (high - low)
    return float(10**at if axis["type"] == "log" else at)


# ---- rows of the target's pass ----


class MaskRow(NamedTuple):
    """One verified row."""

    row: int
    node: int
    label: str
    position: int | None  # position id; None where the text before the step is not known
    attends: tuple[int, ...]  # rows, itself last; all rows attend to the text so far as well
    accepted: bool  # on the accepted path, the root included


class MaskInfo(NamedTuple):
    """The rows of the target's pass: the root and the kept nodes."""

    rows: tuple[MaskRow, ...]
    prefix: int | None  # tokens of the text so far


def mask_info(step: StepTrace, vocabulary: Mapping[int, str], root_position: int | None = None) -> MaskInfo:
    """Who attends to whom; ``root_position`` as in `tree.root_positions`."""
    depths, row = step.depths, {0: 0} | {node: i + 1 for i, node in enumerate(step.kept)}
    attends: list[tuple[int, ...]] = []
    for node in row:
        above = attends[row[step.parents[node]]] if node else ()
        attends.append((*above, row[node]))
    path = {0, *step.accepted}
    rows = tuple(
        MaskRow(
            row=i,
            node=node,
            label=label(vocabulary.get(step.token_ids[node], f"⟨{step.token_ids[node]}⟩")),
            position=None if root_position is None else root_position + depths[node],
            attends=attends[i],
            accepted=node in path,
        )
        for node, i in row.items()
    )
    return MaskInfo(rows, root_position)


def mask_words(info: MaskInfo, phase: Phase) -> str:
    """The figure's text equivalent."""
    if PHASES.index(phase) < PHASES.index("flatten"):
        return "Tree mask. " + NO_ROWS_YET
    kept = len(info.rows) - 1
    deepest = max(len(row.attends) for row in info.rows) - 1
    said = f"Tree mask of {kept + 1} row{'s' * (kept != 0)}: the root"
    said += f" and {kept} kept node{'s' * (kept != 1)}." if kept else "."
    said += " Each row attends to the text so far"
    said += "" if info.prefix is None else f" ({info.prefix} token{'s' * (info.prefix != 1)})"
    said += ", its ancestors and itself."
    if deepest:
        said += f" The deepest row has {deepest} ancestor{'s' * (deepest != 1)}."
    if info.prefix is not None:
        said += (
            f" Position ids {info.prefix} to {info.prefix + deepest}." if deepest else f" Position id {info.prefix}."
        )
    if phase == "accept":
        rows = [str(row.row) for row in info.rows if row.accepted][1:]
        said += (
            f" Accepted: the root and row{'s' * (len(rows) != 1)} {', '.join(rows)}."
            if rows
            else " Accepted: the root."
        )
    return said


class MaskFrame(NamedTuple):
    """Where the mask's columns and rows stand, in pixels."""

    width: int  # of the figure; more than the room there is where the cells would be too small
    height: int
    wide: int  # a cell
    high: int
    with_tokens: bool  # whether there is room for the rows' tokens
    prefix: int  # left end of the column of the text so far
    left: int  # left end of the first row's column
    every_row: int  # each so many rows have a label
    every_column: int
    font: int


def mask_frame(rows: int, last_position: int | None, width: int = SIZES.width) -> MaskFrame:
    """Cells as large as the room allows; where it is short the tokens beside the rows go first, then the view scrolls."""
    s = SIZES
    many = len(str(rows - 1))
    high = max(s.least_high, min(s.most_high, s.body // rows))
    chars = many + (0 if last_position is None else 2 + len(str(last_position)))

    def room(labels: float) -> int:
        return int((width - labels - s.prefix - 2) // rows)

    bare = s.check + s.cell * chars + s.gap
    full = bare + s.cell * (s.token_cells + 1)
    with_tokens = room(full) >= s.least_wide
    labels = full if with_tokens else bare
    wide = max(s.least_wide, min(s.most_wide, room(labels)))
    prefix = math.ceil(labels)
    left = prefix + max(s.prefix, min(s.most_prefix, width - 2 - prefix - wide * rows))
    font = max(9, min(11, high))
    return MaskFrame(
        width=max(width, left + wide * rows + 2),
        height=s.head + high * rows + s.foot,
        wide=wide,
        high=high,
        with_tokens=with_tokens,
        prefix=prefix,
        left=left,
        every_row=math.ceil(font / high),
        every_column=next(n for n in (1, 2, 5, 10, 20, 50) if n * wide >= 6 * many + 4),
        font=font,
    )


def mask_template(palette: Palette) -> list[dict[str, Any]]:
    """The traces of `mask_figure` without data."""
    shades = (
        palette.panel,
        palette.edge,
        palette.value_high,
        palette.accepted,
    )  # none, text so far, ancestor, accepted
    scale = [[(i + end) / len(shades), shade] for i, shade in enumerate(shades) for end in (0, 1)]

    def text(color: str, where: str, size: int, mono: bool = False) -> dict[str, Any]:
        font = {"size": size, "color": color} | ({"family": MONO} if mono else {})
        return {"type": "scatter", "mode": "text", "textposition": where, "textfont": font, "hoverinfo": "skip"}

    traces: dict[str, dict[str, Any]] = {
        "cells": {
            "type": "heatmap", "colorscale": scale, "zmin": -0.5, "zmax": len(shades) - 0.5, "showscale": False,
            "hoverinfo": "text", "zsmooth": False,
        },
        # Short strokes, one path for all of them.
        "self": {"type": "scatter", "mode": "lines", "hoverinfo": "skip", "line": {"color": palette.paper}},
        "labels": text(palette.ink, "middle right", 10, mono=True),
        "columns": text(palette.dim, "middle center", 10),
        "checks": text(palette.accepted, "middle center", 11),
        "words": text(palette.dim, "middle right", 10),
    }  # fmt: skip
    return [{"name": name, "uid": f"e2mask-{name}", **traces[name]} for name in MASK_LAYERS]


def mask_figure(
    info: MaskInfo, phase: Phase = "accept", palette: Palette = LIGHT, *, width: int = SIZES.width
) -> go.Figure:
    """The mask from the phase flatten on; before it an empty frame of the same size."""
    deepest = max(len(row.attends) for row in info.rows) - 1
    frame = mask_frame(len(info.rows), None if info.prefix is None else info.prefix + deepest, width)
    n, right = len(info.rows), frame.left + frame.wide * len(info.rows)
    drawn, deciding = PHASES.index(phase) >= PHASES.index("flatten"), phase == "accept"
    dot = max(2, round(min(frame.wide, frame.high) * 0.3))
    data: dict[str, dict[str, Any]] = {name: {"x": [], "y": []} for name in MASK_LAYERS}

    def middle(row: int) -> float:
        return SIZES.head + (row + 0.5) * frame.high

    def add(layer: str, x: float | None, y: float | None, **values: Any) -> None:
        for key, value in {"x": x, "y": y, **values}.items():
            data[layer].setdefault(key, []).append(value)

    if drawn:
        data["cells"] = {
            "x": [frame.prefix, *(frame.left + i * frame.wide for i in range(n + 1))],
            "y": [SIZES.head + i * frame.high for i in range(n + 1)],
            "z": [_cells(row, n, deciding) for row in info.rows],
            "hovertext": [_mask_hover(row, info) for row in info.rows],
            "xgap": int(frame.wide >= 7),  # between cells too small for it a gap would hide more than it tells
            "ygap": int(frame.high >= 7),
        }
        for row in info.rows:
            y, center = middle(row.row), frame.left + (row.row + 0.5) * frame.wide
            accepted = deciding and row.accepted
            for x in (center - dot / 2, center + dot / 2, None):
                add("self", x, None if x is None else y)
            if row.row % frame.every_column == 0:
                add("columns", center, SIZES.head - 8, text=str(row.row))
            if accepted:
                add("checks", SIZES.check / 2, y, text="✓")
            if row.row % frame.every_row:
                continue
            color = palette.accepted if accepted else palette.ink
            add("labels", SIZES.check, y, text=_row_label(row, info, frame), color=color)
        said = "text so far" if info.prefix is None else f"text so far ({info.prefix} token{'s' * (info.prefix != 1)})"
        add("words", frame.prefix - 2, SIZES.head - 22, text=said, size=10)
    else:
        middle_y = (SIZES.head + frame.height - SIZES.foot) / 2
        add("words", frame.width / 2, middle_y, text=NO_ROWS_YET, size=12, textposition="middle center")
    traces = []
    for base in mask_template(palette):
        name, columns = base["name"], data[base["name"]]
        if name == "self":
            columns["line"] = base["line"] | {"width": dot}
        elif name in ("labels", "words"):
            sizes, colors = columns.pop("size", [frame.font - 1]), columns.pop("color", None)
            columns["textfont"] = base["textfont"] | {"size": sizes[0]} | ({"color": colors} if colors else {})
        traces.append({**base, **columns})
    layout = tree.layout(palette, frame.width, frame.height)
    edge = {"color": palette.rule, "width": 1} if drawn else {"color": palette.edge, "width": 1, "dash": "4px,3px"}
    layout |= {
        "shapes": [
            {"type": "rect", "x0": frame.prefix if drawn else 1, "x1": right if drawn else frame.width - 1, "y0": SIZES.head,
             "y1": frame.height - SIZES.foot, "line": edge, "layer": "below"}
        ],
    }  # fmt: skip
    return go.Figure({"data": traces, "layout": layout})


def _row_label(row: MaskRow, info: MaskInfo, frame: MaskFrame) -> str:
    """Row, position id and token in columns of a monospace font; one text, since each text costs the browser time."""
    blank = "\u00a0"
    parts = [str(row.row).rjust(len(str(len(info.rows) - 1)), blank)]
    if row.position is not None and info.prefix is not None:
        last = info.prefix + max(len(other.attends) for other in info.rows) - 1
        parts.append(f"@{row.position}".ljust(1 + len(str(last)), blank))
    if frame.with_tokens:
        parts.append(escape(row.label))
    return blank.join(parts)


def _cells(row: MaskRow, rows: int, deciding: bool) -> list[int]:
    """A row of the heat map: 0 where it does not attend, 1 the text so far, 2 its ancestors and itself, 3 where accepted."""
    shade = 3 if deciding and row.accepted else 2
    return [1, *(shade if i in row.attends else 0 for i in range(rows))]


def _mask_hover(row: MaskRow, info: MaskInfo) -> list[str]:
    position = "" if row.position is None else f" @{row.position}"
    said = f"<b>row {row.row} {escape(row.label)}</b>{position}<br>"
    other = (
        f"attends to {'itself' if i == row.row else f'row {i} {escape(info.rows[i].label)}'}"
        if i in row.attends
        else f"does not attend to row {i} {escape(info.rows[i].label)}"
        for i in range(len(info.rows))
    )
    return [said + "attends to the text so far", *(said + words for words in other)]


def setup() -> dict[str, Any]:
    """What the browser needs once."""
    return {
        "sizes": SIZES._asdict(),
        "words": {"nothing": NOTHING_DRAFTED, "axes": AXES, "no_rows": NO_ROWS_YET},
        "values": {
            name: {"traces": values_template(palette), "layout": values_layout(palette)}
            for name, palette in PALETTES.items()
        },
        "mask": {name: {"traces": mask_template(palette)} for name, palette in PALETTES.items()},
    }
