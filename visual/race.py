"""The race of both lanes: `info` reads the trace, `figure` draws tokens against each lane's own time."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import plotly.graph_objects as go

from eagle2.trace import STOPPED, Trace
from visual.theme import LIGHT, SANS, Palette


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
    sampling = trace.metadata["sampling"]
    if isinstance(sampling, dict) and sampling.get("temperature"):
        return "sampled, may differ"
    if trace.difference is None:
        return "no"
    gap = trace.difference.logit_gap
    where = f"no, from token {trace.difference.index + 1}"
    return where if gap is None else f"{where} (logit gap {gap:.2g})"


def figure(race: RaceInfo, palette: Palette = LIGHT) -> go.Figure:
    """Tokens against own time, one stepped line per lane; told apart by dash and label besides colour."""
    drawn = go.Figure()
    lanes = (
        ("EAGLE-2", race.eagle2, palette.accepted, "solid"),
        ("Autoregressive", race.autoregressive, palette.dim, "dot"),
    )
    for name, lane, color, dash in lanes:
        if lane is None:
            continue
        drawn.add_scatter(
            x=lane.seconds,
            y=lane.tokens,
            name=f"{name}, {lane.tokens_per_second:.1f} tokens/s",
            mode="lines",
            line={"color": color, "width": 2.5, "dash": dash, "shape": "hv"},
            hovertemplate="%{x:.2f} s, %{y} tokens<extra></extra>",
        )
    axis = {"gridcolor": palette.rule, "zeroline": False, "rangemode": "tozero", "linecolor": palette.rule}
    drawn.update_layout(
        height=260,
        margin={"l": 52, "r": 16, "t": 12, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": SANS, "size": 12, "color": palette.ink},
        xaxis={**axis, "title": {"text": f"own time in seconds ({race.clock})"}},
        yaxis={**axis, "title": {"text": "tokens"}},
        legend={"x": 0.02, "y": 0.98, "bgcolor": "rgba(0,0,0,0)"},
        dragmode=False,
    )
    return drawn
