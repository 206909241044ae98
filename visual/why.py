"""Why this tree: what the cost model expects of keeping n nodes of a step, for every n, and what was kept.

As in the other views `info` works it out and `figure` draws it; `why.js` does both from the columns of a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import plotly.graph_objects as go

from eagle2.cost import CostError, CostModel
from eagle2.trace import StepTrace, Trace
from visual import tree
from visual.theme import LIGHT, PALETTES, Palette, count, digits
from visual.tree import PHASES, Phase
from visual.views import ordinal, values_info

LAYERS = ("grid", "plain", "pass", "curves", "measured", "cut-line", "best", "cut", "came", "ticks", "words")
AUTO_DEPTH = 8  # `eagle2.eagle.AUTO_DEPTH`, which cannot be imported without torch
NOTHING = "Nothing was drafted in this step: 1 token for the time of 1 plain step."
TITLES = ("expected tokens", "÷ time in plain steps of {ms} ms", "= expected speed-up, ×")
X_TITLE = "n, nodes kept (the target's pass has n + 1 rows)"
LINES = ("whole step", "target's pass")


class Sizes(NamedTuple):
    """Pixels of the figure: three panels, one below the other."""

    width: int = 344
    left: int = 34
    right: int = 14
    title: int = 22  # above each panel
    panels: tuple[int, ...] = (84, 84, 104)
    inset: int = 6  # between a panel's end and its lowest value
    head: int = 14  # between its highest value and its top, for a number
    foot: int = 34  # below the last one: ticks and the title of the axis
    letter: float = 5.7  # about the width of one letter


SIZES = Sizes()
HEIGHT = sum(SIZES.panels) + SIZES.title * len(SIZES.panels) + SIZES.foot


class WhyInfo(NamedTuple):
    """A step's drafted nodes in the order of their values, and what keeping the first n of them is expected to give.

    ``tokens [N + 1]`` are 1, the target's own, + the sum of the n highest values; ``steps [N + 1]`` is what the step takes,
    in plain steps (target passes over one row), its draft included.
    """

    nodes: tuple[int, ...]
    tokens: tuple[float, ...]
    steps: tuple[float, ...]
    best: int  # the n of the highest expected speed-up
    kept: int
    kept_tokens: float  # expected of what was kept, which need not be the highest values
    came: int  # accepted + 1
    passes: int  # of the draft head so far

    @property
    def speedups(self) -> tuple[float, ...]:
        """Expected tokens per plain step's time ``[N + 1]``: over plain decoding, which has 1."""
        return tuple(tokens / steps for tokens, steps in zip(self.tokens, self.steps))

    @property
    def speedup(self) -> float:
        """The same of what was kept."""
        return self.kept_tokens / self.steps[self.kept]


class Span(NamedTuple):
    """Ends of the axes for several steps, so that they can be compared: n, tokens, steps, lowest and highest speed-up."""

    nodes: int
    tokens: float
    steps: float
    low: float
    high: float


def costs_of(trace: Trace) -> CostModel | None:
    """The cost model recorded with a run; None where there is none that can be read."""
    try:
        return CostModel.from_dict(trace.metadata["costs"])
    except (KeyError, CostError, OverflowError):
        return None


def catch_up_limit(trace: Trace) -> int:
    """The most rows that a step's first draft pass counts as: what one step of this run can commit at most."""
    shape = trace.metadata["tree"]
    depth = shape.get("depth") if isinstance(shape, dict) else None
    return (depth if isinstance(depth, int) else AUTO_DEPTH) + 1


def fed_rows(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Rows of every pass of the draft head, step by step; none where nothing was drafted.

    The first pass catches up with what was committed since the last draft.  More than one step commits is owed once,
    whatever this step's tree, and not counted, as `eagle2.cost.TreePlanner` does not.  Then come each layer's selected
    nodes.
    """
    limit, pending = catch_up_limit(trace), len(trace.prompt_ids)
    if pending > limit:  # such a prompt is fed with the prefill, but for its last token
        pending = 1
    rows: list[tuple[int, ...]] = []
    for step in trace.steps:
        if not tree.passes(step):  # no draft, or copies alone
            rows.append(())
        else:
            rows.append((min(pending, limit), *map(len, tree.passes(step)[1:])))
            pending = 0
        pending += len(step.accepted) + 1
    return tuple(rows)


def step_seconds(costs: CostModel, rows: Sequence[int], nodes: int) -> float:
    """Seconds of a step that fed the draft head ``rows``, pass by pass, and keeps ``nodes``.

    Without any rows: of the target's pass alone, over copies or none.
    """
    return costs.step(sum(map(costs.draft, rows)), nodes) if rows else costs.verify(1 + nodes)


def info(step: StepTrace, rows: Sequence[int], costs: CostModel, drafted_in: int | None = None) -> WhyInfo:
    """One step; ``rows``: its entry of `fed_rows`; ``drafted_in``: as after this draft pass, when nothing was kept yet."""
    marks = values_info(step, {}).marks
    if drafted_in is not None:
        marks, rows = tuple(mark for mark in marks if mark.drafted_in <= drafted_in), rows[: drafted_in + 1]
    tokens = tuple(accumulate((mark.value for mark in marks), initial=1.0))
    steps = tuple(step_seconds(costs, rows, n) / costs.verify(1) for n in range(len(tokens)))
    best = max(range(len(tokens)), key=lambda n: (tokens[n] / steps[n], -n))
    kept = [mark.value for mark in marks if mark.kept] if drafted_in is None else []
    return WhyInfo(
        tuple(mark.node for mark in marks), tokens, steps, best, len(kept), 1 + sum(kept), len(step.accepted) + 1,
        len(rows),
    )  # fmt: skip


def infos(trace: Trace, costs: CostModel) -> tuple[tuple[WhyInfo, ...], ...]:
    """Of every step: after each draft pass, then with what was kept."""
    return tuple(
        (*(info(step, rows, costs, number) for number in range(len(rows))), info(step, rows, costs))
        for step, rows in zip(trace.steps, fed_rows(trace))
    )


def words(why: WhyInfo, phase: Phase) -> str:
    """What the figure says, in one or two sentences."""

    def expected(tokens: float, n: int) -> str:
        return f"{tokens:.2f} tokens for the time of {why.steps[n]:.2f} plain steps, {tokens / why.steps[n]:.2f}×"

    drafted, best = len(why.nodes), why.speedups[why.best]
    if not drafted:
        return NOTHING
    if phase == "draft":
        said = f"After draft pass {why.passes}: {count(drafted, 'node')}. Keeping {why.best} would be best so far: expected "
        return said + expected(why.tokens[why.best], why.best) + "."
    said = f"Keeping {why.kept} of {count(drafted, 'node')}: expected {expected(why.kept_tokens, why.kept)}."
    lost = round(100 * (1 - why.speedup / best))
    if lost:
        said += f" Keeping the {why.best} of highest value" if why.best else " Keeping none"
        said += f" would be best, {best:.2f}×: this cut loses {lost}\u00a0%."
    else:
        said += " No other cut is faster."
    if why.speedup < 1:
        said += " Slower than plain steps" + ("." if lost else ", but the draft is paid for by then.")
    if phase == "accept":
        said += f" What came of it: {count(why.came, 'token')}."
    return said


def span(steps: Iterable[Sequence[WhyInfo]]) -> Span:
    """Axes that hold the cuts of all steps and a half more; ``steps`` as `infos` gives them."""
    every = tuple(steps)
    most = max((len(of[-1].nodes) for of in every), default=0)
    cuts = max((max(of[-1].kept, of[-1].best) for of in every), default=0)
    nodes = max(min(most, max(8, math.ceil(1.5 * cuts))), 1)
    seen = [why for of in every for why in of]
    speedups = [x for why in seen for x in (*why.speedups[: nodes + 1], why.speedup)]
    return Span(
        nodes,
        max(1.5, *(max(*why.tokens[: nodes + 1], why.came) for why in seen)) if seen else 1.5,
        max(1.5, *(why.steps[: nodes + 1][-1] for why in seen)) if seen else 1.5,
        math.floor(2 * min(1.0, *speedups)) / 2 if seen else 0.5,
        max(1.25, *speedups) if seen else 1.25,
    )


def axis_ticks(low: float, high: float, most: int) -> list[float]:
    """At most ``most`` + 1 round numbers.

    >>> axis_ticks(1, 2.7, 4)
    [1.0, 1.5, 2.0, 2.5]
    """
    step = next(10.0**power * n for power in range(-1, 9) for n in (1, 2, 5) if high - low <= 10.0**power * n * most)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def template(palette: Palette) -> list[dict[str, Any]]:
    """The traces of `figure` without data."""
    skip = {"hoverinfo": "skip"}

    def line(color: str, width: float, dash: str = "solid") -> dict[str, Any]:
        return {"mode": "lines", "line": {"color": color, "width": width, "dash": dash}, **skip}

    def marks(symbol: str, size: int, color: str, edge: str, width: float) -> dict[str, Any]:
        style = {"symbol": symbol, "size": size, "color": color, "opacity": 1, "line": {"color": edge, "width": width}}
        return {"mode": "markers", "marker": style, **skip}

    def text(size: int, color: str) -> dict[str, Any]:
        return {"mode": "text", "textfont": {"size": size, "color": color}, **skip}

    traces = {
        "grid": line(palette.rule, 1),
        "plain": line(palette.dim, 1, "2px,3px"),
        "pass": line(palette.outline, 1.25, "6px,3px"),
        "curves": {**line(palette.value_high, 2), "hoverinfo": "text"},
        "measured": {**marks("circle", 6, palette.paper, palette.outline, 1.25), "hoverinfo": "text"},
        "cut-line": line(palette.ink, 1.25, "5px,3px"),
        "best": marks("diamond", 11, palette.paper, palette.ink, 1.5),
        "cut": marks("circle", 8, palette.ink, palette.paper, 1),
        "came": {**marks("square", 10, palette.accepted, palette.paper, 1), "hoverinfo": "text"},
        "ticks": text(10, palette.dim),
        "words": text(11, palette.ink),
    }
    return [
        {"type": "scatter", "name": name, "uid": f"e2why-{name}", "cliponaxis": False, **traces[name]}
        for name in LAYERS
    ]


def figure(
    why: WhyInfo, costs: CostModel, phase: Phase = "accept", palette: Palette = LIGHT, *, within: Span | None = None,
    width: int = SIZES.width,
) -> go.Figure:  # fmt: skip
    """Expected tokens, time and their ratio against the number of nodes kept; ``within``: `span`.

    All in pixels, as the tree is: one drawing instead of three with axes of their own.
    """
    ends = within or span([[why]])
    s, late = SIZES, PHASES.index(phase) >= 1
    data: dict[str, dict[str, list[Any]]] = {name: {"x": [], "y": []} for name in LAYERS}
    lows, highs = (1.0, 1.0, ends.low), (ends.tokens, ends.steps, ends.high)
    right = width - s.right
    bottoms = [s.title * (i + 1) + sum(s.panels[: i + 1]) for i in range(3)]

    def x(n: float) -> float:
        return s.left + n / ends.nodes * (right - s.left)

    def y(panel: int, value: float) -> float:
        share = (value - lows[panel]) / (highs[panel] - lows[panel])
        return bottoms[panel] - s.inset - share * (s.panels[panel] - s.inset - s.head)

    def add(layer: str, px: float | None, py: float | None, **values: Any) -> None:
        for key, value in {"x": px, "y": py, **values}.items():
            data[layer].setdefault(key, []).append(value)

    def line(layer: str, x0: float, y0: float, x1: float, y1: float) -> None:
        for point in ((x0, y0), (x1, y1), (None, None)):
            add(layer, *point)

    ms = digits(1000 * costs.verify(1))
    for panel, title in enumerate(TITLES):
        add(
            "words",
            0,
            bottoms[panel] - s.panels[panel] - s.title / 2,
            text=title.replace("{ms}", ms),
            textposition="middle right",
        )
        for tick in axis_ticks(lows[panel], highs[panel], 4):
            line("grid", s.left, y(panel, tick), right, y(panel, tick))
            add("ticks", s.left - 7, y(panel, tick), text=f"{tick:g}", textposition="middle left")
    if ends.low < 1:
        line("plain", s.left, y(2, 1), right, y(2, 1))
    for tick in axis_ticks(0, ends.nodes, 8):
        if tick == int(tick):
            add("ticks", x(tick), bottoms[2] + 9, text=f"{tick:g}", textposition="middle center")
    add("ticks", s.left, bottoms[2] + 25, text=X_TITLE, textposition="middle right")

    drafted = min(len(why.nodes), ends.nodes)
    for panel, column in enumerate((why.tokens, why.steps, why.speedups)):
        for n in range(drafted + 1):
            node = why.nodes[n - 1] if n else None
            add("curves", x(n), y(panel, column[n]), hovertext=_hover(why, costs, n), customdata=node)
        add("curves", None, None, hovertext="", customdata=None)
    for n in range(ends.nodes + 1):
        relative = costs.verify(n + 1) / costs.verify(1)
        if relative <= ends.steps:
            add("pass", x(n), y(1, relative))
    for rows, seconds in zip(costs.verify_rows, costs.verify_seconds):
        if rows - 1 <= ends.nodes and seconds / costs.verify(1) <= ends.steps:
            said = f"measured: {count(rows, 'row')} in {digits(1000 * seconds)} ms"
            add("measured", x(rows - 1), y(1, seconds / costs.verify(1)), hovertext=said)
    if drafted:
        add("words", x(drafted), y(1, why.steps[drafted]) - 10, text=LINES[0], textposition="middle left")
        # Under the dashed line, which rises: as low as it is at the label's beginning.
        begins = int((len(data["pass"]["x"]) - 1) - s.letter * len(LINES[1]) / (x(1) - x(0)))
        under = y(1, costs.verify(1 + max(begins, 0)) / costs.verify(1)) + 11
        add("words", data["pass"]["x"][-1], under, text=LINES[1], textposition="middle left")
        add("best", x(why.best), y(2, why.speedups[why.best]))
    if late and why.kept <= ends.nodes:
        at = x(why.kept)
        line("cut-line", at, bottoms[0] - s.panels[0], at, bottoms[2])
        numbers = (why.kept_tokens, why.steps[why.kept], why.speedup)
        for panel, number in enumerate(numbers):
            add("cut", at, y(panel, number))
            # Beside its mark where the curve is not: below the first one, which rises, above the others.
            rises = panel == 1 or why.kept <= why.best
            left = (panel > 0 and rises and why.kept > 0) or at + 6 + s.letter * 5 > width
            add("words", at - 7 if left else at + 7, y(panel, number) + (-10 if panel else 11),
                text=f"<b>{number:.2f}{'×' * (panel == 2)}</b>", textposition="middle left" if left else "middle right")  # fmt: skip
        if phase == "accept":
            add("came", at, y(0, why.came), hovertext=f"{count(why.came, 'token')} came of this step")
    traces = [{**base, **data[base["name"]]} for base in template(palette)]
    return go.Figure({"data": traces, "layout": tree.layout(palette, width, HEIGHT)})


def _hover(why: WhyInfo, costs: CostModel, n: int) -> str:
    said = f"<b>n = {n}</b>" + (f": with the {ordinal(n)} value" if n else "")
    ms = digits(1000 * why.steps[n] * costs.verify(1))
    return (
        f"{said}<br>expected tokens {why.tokens[n]:.2f}<br>time {why.steps[n]:.2f} plain steps ({ms} ms)<br>"
        f"expected speed-up {why.speedups[n]:.2f}×"
    )


def data(trace: Trace) -> dict[str, Any] | None:
    """What the browser needs of a run besides its steps; None where no costs were measured."""
    costs = costs_of(trace)
    return None if costs is None else {**costs.to_dict(), "catch_up": catch_up_limit(trace)}


def setup() -> dict[str, Any]:
    """What the browser needs once."""
    return {
        "sizes": {**SIZES._asdict(), "height": HEIGHT},
        "words": {"nothing": NOTHING, "titles": TITLES, "x_title": X_TITLE, "lines": LINES},
        "traces": {name: template(palette) for name, palette in PALETTES.items()},
    }
