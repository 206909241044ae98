"""The race of both lanes: `info` reads the trace, `figure` draws tokens against each lane's own time.

`ledger` tells what each step cost and saved, `split` where the EAGLE-2 lane's time went, `difference` whether the lanes
gave the same tokens.  The browser shows the words and the numbers that `data` holds and works none of them out itself.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from statistics import median
from typing import Any, Literal, NamedTuple

import plotly.graph_objects as go

from eagle2.trace import STOPPED, LaneTrace, Trace, arithmetic
from visual.theme import LIGHT, PALETTES, SANS, Palette, count, glyphs, isolate, plain

LAYERS = ("autoregressive", "eagle2", "clock", "now-autoregressive", "now-eagle2")
NAMES = {"eagle2": "EAGLE-2", "autoregressive": "Autoregressive"}
SPEEDS = ((0.125, "1/8×"), (0.25, "1/4×"), (0.5, "1/2×"), (1.0, "1×, true speed"), (2.0, "2×"))
WIDTH, HEIGHT = 700.0, 200.0
# Above and on the right: room for the labels at the lines' ends.
MARGIN = {"l": 44, "r": 100, "t": 26, "b": 40, "pad": 0}
HEADS = (
    "step", "draft ms", "verify ms", "commit ms", "total ms", "tokens", "plain ms", "saved or lost ms", "speed-up so far",
)  # fmt: skip
DASH = "–"


class LaneInfo(NamedTuple):
    """One lane on its own clock: after ``seconds[i]`` it had ``tokens[i]`` tokens."""

    seconds: tuple[float, ...]
    tokens: tuple[int, ...]
    tokens_per_second: float


class RaceInfo(NamedTuple):
    """What both lanes did, in plain values."""

    eagle2: LaneInfo
    autoregressive: LaneInfo | None
    speedup: float | None
    tau: float
    equal: bool | None
    same: str  # the badge's words
    clock: str


class NowInfo(NamedTuple):
    """Where both lanes are at one moment of the EAGLE-2 lane's clock: own seconds and tokens."""

    eagle2: tuple[float, int]
    autoregressive: tuple[float, int] | None


class EndInfo(NamedTuple):
    """The label at the end of a lane's line."""

    lane: str
    text: str
    seconds: float
    tokens: int
    place: Literal["right", "above", "below"]


class LedgerRow(NamedTuple):
    """One EAGLE-2 step beside what the autoregressive lane took; None where that lane has no such tokens.

    ``plain_ms`` is the sum of the autoregressive lane's own times for the output positions that this step filled, and
    ``saved_ms`` that sum less ``total_ms``.  ``speedup`` is the ratio of both lanes' tokens per second at the number of
    tokens reached after this step: the time in which the autoregressive lane reached as many tokens, divided by the EAGLE-2
    lane's own time, the prefill included in both.
    """

    step: int  # from 1
    draft_ms: float
    verify_ms: float
    commit_ms: float
    total_ms: float
    tokens: int
    plain_ms: float | None
    saved_ms: float | None
    speedup: float | None


class PartInfo(NamedTuple):
    """One kind of work in the EAGLE-2 lane's time."""

    name: str
    seconds: float
    share: float
    median_ms: float | None  # of one step; None for the prefill, which comes once


class DifferenceInfo(NamedTuple):
    """Whether both lanes gave the same tokens, how that was checked, and where the first difference is."""

    state: Literal["equal", "differs", "sampled", "ended", "none"]
    at: int | None  # output position from 0
    eagle2: str | None  # the token there, with visible glyphs
    autoregressive: str | None
    gap: float | None
    said: str


def info(trace: Trace) -> RaceInfo:
    """Both lanes' progress and the figures of the run."""
    first = 1 if trace.output_ids else 0
    lane = trace.autoregressive
    return RaceInfo(
        eagle2=LaneInfo(
            tuple(accumulate((step.seconds for step in trace.steps), initial=trace.prefill_seconds)),
            tuple(accumulate((step.emitted for step in trace.steps), initial=first)),
            trace.tokens_per_second,
        ),
        autoregressive=None
        if lane is None
        else LaneInfo(
            tuple(accumulate(lane.step_seconds, initial=lane.prefill_seconds)),
            tuple(range(1, len(lane.token_ids) + 1)) or (0,),
            lane.tokens_per_second,
        ),
        speedup=trace.speedup,
        tau=trace.tau,
        equal=trace.equal,
        same=badge(trace),
        clock=str(trace.metadata["clock"]),
    )


def badge(trace: Trace) -> str:
    """Whether both lanes gave the same tokens, in words; with sampling a difference is expected, not a fault."""
    if trace.equal is None:
        return "no plain lane"
    if trace.equal:
        assert trace.autoregressive is not None
        both = min(len(trace.output_ids), len(trace.autoregressive.token_ids))
        return f"yes, all {both}" if trace.finish_reason != STOPPED else f"yes, the {both} that both reached"
    if _temperature(trace):
        return "sampled, may differ"
    if trace.difference is None:
        return "no"
    gap = trace.difference.logit_gap
    where = f"no, from token {trace.difference.index + 1}"
    return where if gap is None else f"{where} (logit gap {gap:.2g})"


def position(race: RaceInfo, step: int, *, done: bool) -> NowInfo:
    """Both lanes before step ``step`` (from 0) or, ``done``, after it; after the last step both stand at their ends."""
    at = step + done
    seconds, tokens = race.eagle2.seconds[at], race.eagle2.tokens[at]
    lane = race.autoregressive
    other = None
    if lane is not None and lane.tokens[-1]:
        if at == len(race.eagle2.seconds) - 1:
            other = (lane.seconds[-1], lane.tokens[-1])
        else:
            other = (min(seconds, lane.seconds[-1]), bisect_right(lane.seconds, seconds + 1e-9))
    return NowInfo((seconds, tokens), other)


def ends(race: RaceInfo) -> tuple[EndInfo, ...]:
    """Labels at the lines' ends, placed so that neither covers the other or its own line.

    Right of the line that ends last everything is free, and so it is above the upper line.
    """
    lanes = {name: lane for name, lane in (("eagle2", race.eagle2), ("autoregressive", race.autoregressive)) if lane}
    lanes = {name: lane for name, lane in lanes.items() if lane.tokens[-1]}
    place: dict[str, Literal["right", "above", "below"]] = dict.fromkeys(lanes, "right")
    if len(lanes) == 2:
        early, late = sorted(lanes, key=lambda name: lanes[name].seconds[-1])
        reached = bisect_right(lanes[late].seconds, lanes[early].seconds[-1])
        if lanes[early].tokens[-1] >= (lanes[late].tokens[reached - 1] if reached else 0):
            place[early] = "above"
        else:
            place[late] = "above"
            if 4 * lanes[early].tokens[-1] >= lanes[late].tokens[-1]:  # else it would cover the numbers of the axis
                place[early] = "below"
    return tuple(
        EndInfo(name, f"{NAMES[name]}, {lane.seconds[-1]:.2f} s", lane.seconds[-1], lane.tokens[-1], place[name])
        for name, lane in lanes.items()
    )


def end_label(end: EndInfo, span: float) -> dict[str, Any]:
    """A label as a Plotly annotation, but for its colour; it keeps clear of a marker at the line's end."""
    where: dict[str, Any]
    if end.place == "above":
        side = "right" if end.seconds >= 0.45 * span else "left"  # a short line has no room on its left
        where = {"xanchor": side, "yanchor": "bottom", "xshift": 0, "yshift": 7}
    else:
        below = end.place == "below"
        where = {"xanchor": "left", "yanchor": "top" if below else "middle", "xshift": 9, "yshift": -2 if below else 0}
    text = end.text if end.place == "above" else end.text.replace(", ", "<br>")
    return {"x": end.seconds, "y": end.tokens, "text": text, "showarrow": False, "align": "left", **where}


def template(palette: Palette = LIGHT) -> list[dict[str, Any]]:
    """The figure's traces without data, in `LAYERS` order: style only, shared by `figure` and the browser."""

    def line(color: str, width: float, dash: str) -> dict[str, Any]:
        return {"mode": "lines", "line": {"color": color, "width": width, "dash": dash, "shape": "hv"}}

    def marker(symbol: str, color: str) -> dict[str, Any]:
        style = {"size": 12, "opacity": 1, "symbol": symbol, "color": color, "line": {"color": palette.ink, "width": 2}}
        return {"mode": "markers", "hoverinfo": "skip", "marker": style}

    parts: dict[str, dict[str, Any]] = {
        "autoregressive": {**line(palette.dim, 2, "2px,3px"), "hoverinfo": "text"},
        "eagle2": {
            **line(palette.accepted, 2.5, "solid"), "mode": "lines+markers", "hoverinfo": "text",
            "marker": {"color": palette.accepted, "opacity": 1, "line": {"width": 0}},
        },
        "clock": {**line(palette.dim, 1, "solid"), "hoverinfo": "skip"},
        "now-autoregressive": marker("square", palette.paper),
        "now-eagle2": marker("circle", palette.accepted),
    }  # fmt: skip
    common = {"type": "scatter", "showlegend": False, "cliponaxis": False}
    return [{**common, "name": name, "uid": f"e2race-{name}", **parts[name]} for name in LAYERS]


def layout(palette: Palette = LIGHT) -> dict[str, Any]:
    """The figure's layout but for its width, the axes' ranges and the time axis' title."""
    axis = {
        "fixedrange": True, "gridcolor": palette.rule, "zeroline": False, "linecolor": palette.edge, "showline": True,
        "tickfont": {"size": 11, "color": palette.dim}, "automargin": False,
    }  # fmt: skip
    return {
        "height": HEIGHT,
        "margin": MARGIN,
        "xaxis": {**axis, "showgrid": False, "title": _title("")},
        "yaxis": {**axis, "title": _title("tokens"), "nticks": 5, "tickformat": "d"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": SANS, "size": 12, "color": palette.ink},
        "hovermode": "closest",
        "hoverdistance": 24,
        "hoverlabel": {
            "align": "left",
            "bgcolor": palette.panel,
            "bordercolor": palette.rule,
            "font": {"family": SANS, "size": 12, "color": palette.ink},
        },
        "dragmode": False,
        "showlegend": False,
    }


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 11}, "standoff": 6}


def time_axis(clock: str) -> str:
    """What the figure's time is, in words."""
    return f"own time in seconds ({clock})"


def ranges(race: RaceInfo) -> tuple[float, float]:
    """Ends of both axes, which start at 0."""
    lanes = [lane for lane in (race.eagle2, race.autoregressive) if lane and lane.tokens[-1]]
    seconds = max((lane.seconds[-1] for lane in lanes), default=0.0)
    return 1.02 * seconds or 1.0, 1.04 * max((lane.tokens[-1] for lane in lanes), default=1)


def figure(race: RaceInfo, palette: Palette = LIGHT, now: NowInfo | None = None, width: float = WIDTH) -> go.Figure:
    """Tokens against own time, one stepped line per lane; told apart by dash and label besides colour.

    ``now``: where both lanes stand, from `position`.
    """
    columns: dict[str, dict[str, Any]] = {name: {"x": [], "y": []} for name in LAYERS}
    for name, lane in (("autoregressive", race.autoregressive), ("eagle2", race.eagle2)):
        if lane is None or not lane.tokens[-1]:
            continue
        shown = [f"{_tokens(count)} at {seconds:.2f} s" for seconds, count in zip(lane.seconds, lane.tokens)]
        if name == "eagle2":
            shown = [f"{'step ' + str(i) if i else 'prefill'}: {text}" for i, text in enumerate(shown)]
            columns[name]["customdata"] = [None, None, *range(len(lane.seconds) - 1)]  # the step that ends there
            columns[name]["size"] = [0, 0] + [5] * (len(lane.seconds) - 1)  # a dot is a step
        columns[name].update(x=[0.0, *lane.seconds], y=[0, *lane.tokens], hovertext=["", *shown])
    span, top = ranges(race)
    if now is not None:
        columns["clock"].update(x=[now.eagle2[0]] * 2, y=[0.0, top])
        for name, place in now._asdict().items():
            if place is not None:
                columns[f"now-{name}"].update(x=[place[0]], y=[place[1]])
    traces = []
    for base in template(palette):
        data = columns[base["name"]]
        if size := data.pop("size", None):
            data["marker"] = {**base["marker"], "size": size}
        traces.append({**base, **data})
    drawn = {**layout(palette), "width": width}
    drawn["xaxis"] = {**drawn["xaxis"], "range": [0, span], "title": _title(time_axis(race.clock))}
    drawn["yaxis"] = {**drawn["yaxis"], "range": [0, top]}
    colors = {"eagle2": palette.accepted, "autoregressive": palette.dim}
    drawn["annotations"] = [
        {**end_label(end, span), "font": {"size": 11, "color": colors[end.lane]}} for end in ends(race)
    ]
    return go.Figure({"data": traces, "layout": drawn})


def ledger(trace: Trace) -> tuple[LedgerRow, ...]:
    """What each step cost and saved; see `LedgerRow` for what is compared with what."""
    lane, rows = trace.autoregressive, []
    reached: list[float] = []  # own time of the autoregressive lane at its first, second ... token
    if lane is not None and lane.token_ids:
        reached = list(accumulate(lane.step_seconds, initial=lane.prefill_seconds))
    own, end = trace.prefill_seconds, 1
    for number, step in enumerate(trace.steps):
        start, end = end, end + step.emitted
        own += step.seconds
        known = end <= len(reached)
        took = 1000 * (reached[end - 1] - reached[start - 1]) if known else None
        total = 1000 * step.seconds
        rows.append(
            LedgerRow(
                number + 1, 1000 * step.draft_seconds, 1000 * step.verify_seconds, 1000 * step.commit_seconds, total,
                step.emitted, took, None if took is None else took - total,
                reached[end - 1] / own if known and own else None,
            )
        )  # fmt: skip
    return tuple(rows)


def cells(row: LedgerRow) -> tuple[str, ...]:
    """A row as it is shown, in the order of `HEADS`; a sign and a word tell what was saved from what was lost."""
    saved = DASH
    if row.saved_ms is not None:
        word = _verdict(row.saved_ms)
        sign = {"saved": "+", "lost": "−", "even": ""}[word]
        saved = f"{sign}{abs(row.saved_ms):.1f} {word}"
    return (
        str(row.step), f"{row.draft_ms:.1f}", f"{row.verify_ms:.1f}", f"{row.commit_ms:.1f}", f"{row.total_ms:.1f}",
        str(row.tokens), DASH if row.plain_ms is None else f"{row.plain_ms:.1f}", saved,
        DASH if row.speedup is None else f"{row.speedup:.2f}×",
    )  # fmt: skip


def _verdict(saved_ms: float) -> str:
    """As the shown number says, so that no row reads "+0.0 saved"."""
    return "even" if f"{abs(saved_ms):.1f}" == "0.0" else "saved" if saved_ms > 0 else "lost"


def summary(trace: Trace, rows: tuple[LedgerRow, ...]) -> str:
    """What all steps saved or lost, from the same numbers as the rows; the prefill is told apart from them."""
    if not rows:
        return "This run has no steps."
    lane = trace.autoregressive
    told = [row.saved_ms for row in rows if row.saved_ms is not None]
    if lane is None:
        return "There is no autoregressive lane to compare the steps with."
    if not told:
        return "The autoregressive lane is too short to compare any step with."
    words = [_verdict(saved) for saved in told]
    text = f"{words.count('saved')} of {count(len(told), 'step')} saved time, {words.count('lost')} lost"
    if "even" in words:
        text += f", {words.count('even')} even"
    in_all = sum(told)
    text += f"; in all {_duration(abs(in_all) / 1000)} {'saved' if in_all >= 0 else 'lost'}."
    more = trace.prefill_seconds - lane.prefill_seconds
    longer = "longer" if more >= 0 else "shorter"
    return text + f" The prefill took {_duration(abs(more))} {longer} than the autoregressive lane's."


def remarks(trace: Trace, rows: tuple[LedgerRow, ...]) -> str:
    """How the ledger was measured, and what it cannot tell."""
    clock = str(trace.metadata["clock"])
    text = f"Each lane's own clock, {clock}; drawing is outside of it."
    if (lane := trace.autoregressive) is None:
        return text
    text += (
        " Plain ms: what the autoregressive lane took for the same output positions."
        " Speed-up so far: the time in which that lane reached as many tokens, over EAGLE-2's, both with their prefill."
    )
    if any(row.plain_ms is None for row in rows):
        text += (
            f" The autoregressive lane has {_tokens(len(lane.token_ids))}: a dash stands where a step goes beyond them."
        )
    found = difference(trace)
    if found.state in ("sampled", "differs") and found.at is not None:
        text += (
            f" The texts differ from token {found.at + 1} on: from there the times are for as many tokens,"
            " not for the same ones."
        )
    return text


def split(trace: Trace) -> tuple[PartInfo, ...]:
    """Where the EAGLE-2 lane's own time went."""
    kinds = {
        "prefill": [trace.prefill_seconds],
        "draft": [step.draft_seconds for step in trace.steps],
        "verify": [step.verify_seconds for step in trace.steps],
        "commit": [step.commit_seconds for step in trace.steps],
    }
    whole = trace.seconds
    return tuple(
        PartInfo(
            name,
            sum(times),
            sum(times) / whole if whole else 0.0,
            1000 * median(times) if name != "prefill" and times else None,
        )
        for name, times in kinds.items()
    )


def split_words(part: PartInfo) -> str:
    """One part of the time: its share and what it takes, a median for what comes in every step."""
    percent = 100 * part.share
    share = "<1 %" if 0 < percent < 1 else f"{percent:.0f} %"
    if part.name == "prefill":
        return f"{share}, {1000 * part.seconds:.1f} ms"
    return share if part.median_ms is None else f"{share}, {part.median_ms:.1f} ms"


def difference(trace: Trace) -> DifferenceInfo:
    """Compare the token ids of both lanes and say what the outcome means."""
    lane = trace.autoregressive
    if lane is None:
        return DifferenceInfo("none", None, None, None, None, "There is no autoregressive lane to compare with.")
    ours, theirs = trace.output_ids, lane.token_ids
    both = min(len(ours), len(theirs))
    if trace.equal:
        if STOPPED in (trace.finish_reason, lane.finish_reason):
            said = (
                f"The run was stopped; the {count(both, 'token id')} that both lanes had reached, compared one by one"
            )
            said += ", are equal." if both != 1 else ", is equal."
        else:
            said = f"All {both} token ids of the two lanes, compared one by one, are equal."
        return DifferenceInfo("equal", None, None, None, None, said)
    index = next((i for i in range(both) if ours[i] != theirs[i]), both)

    def shown(ids: tuple[int, ...], pieces: tuple[str, ...]) -> str | None:
        if index >= len(ids):
            return None
        text = glyphs(trace.vocabulary.get(ids[index], pieces[index]))
        return isolate(text if len(text) <= 30 else text[:29] + "…")

    one, other = shown(ours, trace.output_pieces), shown(theirs, lane.pieces)
    gap = trace.difference.logit_gap if trace.difference and trace.difference.index == index else None
    state: Literal["differs", "sampled", "ended"] = "sampled" if _temperature(trace) else "differs"
    if one is None or other is None:
        names = ("EAGLE-2", "the autoregressive lane")
        shorter, longer = names if one is None else names[::-1]
        said = f"All {both} token ids up to there are equal, then {longer} goes on with “{one or other}” where {shorter} ended."
        state = "sampled" if state == "sampled" else "ended"
    else:
        said = f"The lanes differ from token {index + 1} on: EAGLE-2 has “{one}”, the autoregressive lane “{other}”."
    if state == "sampled":
        said += (
            f" That is expected: tokens were drawn at random (temperature {_temperature(trace):g}), each lane uses its"
            " random numbers in its own way, and both follow the target's distribution."
        )
    elif gap is not None:
        said += (
            f" The target's logits of these two are {gap:.2g} apart. Near 0 the rounding of {plain(arithmetic(trace.metadata))}"
            " decided, since a pass over a tree adds up in another order; a wide gap would be a fault."
        )
    elif state == "differs":
        said += " The gap of the target's logits there was not recorded."
    return DifferenceInfo(state, index, one, other, gap, said)


def outcome(trace: Trace) -> str:
    """Who was faster, in words, for the end of a replay."""
    lane, told = trace.autoregressive, trace.speedup
    verb = "was stopped at" if trace.finish_reason == STOPPED else "finished in"
    ours = f"EAGLE-2 {verb} {trace.seconds:.2f} s"
    if lane is None or told is None:
        return f"{ours}; there is no autoregressive lane."
    counts = len(trace.output_ids), len(lane.token_ids)
    if counts[0] != counts[1]:
        ours += f" with {_tokens(counts[0])}"
    other = f"the autoregressive lane {_end(trace, lane)}{lane.seconds:.2f} s"
    if counts[0] != counts[1]:
        other += f" with {_tokens(counts[1])}"
    what = "" if counts[0] == counts[1] else " in tokens per second"
    words = f"{told:.2f}×"
    winner = "EAGLE-2 was faster" if told > 1 else "the autoregressive lane was faster"
    return f"{ours}, {other}: {words}{what}, {'both were as fast' if words == '1.00×' else winner}."


def _end(trace: Trace, lane: LaneTrace) -> str:
    if (trace.finish_reason == STOPPED) == (lane.finish_reason == STOPPED):
        return "at " if lane.finish_reason == STOPPED else "in "
    return "was stopped at " if lane.finish_reason == STOPPED else "finished in "


def spoken(trace: Trace) -> str:
    """The figure's text equivalent."""
    lanes = [f"EAGLE-2 reached {_tokens(len(trace.output_ids))} in {trace.seconds:.2f} s"]
    if (lane := trace.autoregressive) is not None:
        lanes.append(f"the autoregressive lane {_tokens(len(lane.token_ids))} in {lane.seconds:.2f} s")
    return f"Stepped lines of tokens against each lane's own time ({trace.metadata['clock']}): {', '.join(lanes)}."


def _temperature(trace: Trace) -> float:
    sampling = trace.metadata["sampling"]
    value = sampling.get("temperature") if isinstance(sampling, dict) else None
    return float(value) if isinstance(value, (int, float)) else 0.0  # an uploaded trace may hold anything


def _tokens(number: int) -> str:
    return count(number, "token")


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.1f} ms"


def setup() -> dict[str, Any]:
    """What the browser needs once."""
    return {
        "templates": {name: template(palette) for name, palette in PALETTES.items()},
        "layouts": {name: layout(palette) for name, palette in PALETTES.items()},
        "heads": HEADS,
        "speeds": SPEEDS,
    }


def data(trace: Trace) -> dict[str, Any]:
    """What the browser needs of one run, worded and rounded here."""
    told, rows, found = info(trace), ledger(trace), difference(trace)
    span, top = ranges(told)
    return {
        "axis": time_axis(told.clock),
        "ranges": [span, top],
        "ends": [{"lane": end.lane, "label": end_label(end, span)} for end in ends(told)],
        "spoken": spoken(trace),
        "outcome": outcome(trace),
        "ledger": [list(cells(row)) for row in rows],
        "summary": summary(trace, rows),
        "remarks": remarks(trace, rows),
        "split": [[part.name, round(part.share, 4), split_words(part)] for part in split(trace)],
        "difference": {"state": found.state, "at": found.at, "said": found.said},
    }
