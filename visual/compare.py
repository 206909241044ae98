"""A static and a dynamic tree for the same context and node budget, side by side.

`info` finds the contexts that two runs of one prompt share and sums both runs up; `message` makes of such pairs what
`compare.js` shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from eagle2.trace import StepTrace, Trace
from visual.theme import count, plain

HTML_TEMPLATE = '<div class="e2-compare-host"></div>'  # no data in it: a template is evaluated
JS_ON_LOAD = """
const compare = window.Eagle2Compare.mount(element.querySelector(".e2-compare-host"), window.Eagle2Setup);
const show = () => { if (props.value) compare.show(JSON.parse(props.value)); };
watch("value", show);
show();
"""


class Pair(NamedTuple):
    """Two runs of one prompt, and what to call them."""

    title: str
    dynamic: Trace
    static: Trace
    look: str = ""  # what to look at there


class SideInfo(NamedTuple):
    """One of the two trees of a context."""

    step: int  # number in its run, from 0
    layers: tuple[int, ...]  # nodes for the target in each layer, from the one after the root
    accepted: int  # drafted tokens on the accepted path
    emitted: int  # tokens gained; at most `accepted` where the output ended inside the path or right after it
    expected: float  # sum of the values of the nodes for the target

    @property
    def nodes(self) -> int:
        return sum(self.layers)


class ContextInfo(NamedTuple):
    """A context that both runs met at the start of a step."""

    position: int  # output tokens so far, the root token included
    dynamic: SideInfo
    static: SideInfo
    same: bool  # both trees hold the same tokens at the same places


class RunInfo(NamedTuple):
    """A whole run.  Draft tokens after the one that ended it do not count as accepted."""

    tokens: int
    steps: int
    tau: float
    acceptance_rate: float | None  # accepted / nodes for the target; None where there were none
    accepted: float  # mean per step, as the next two
    kept: float
    drafted: float
    after_root: tuple[int, int]  # fewest and most nodes for the target right after the root
    shapes: int  # different shapes of the nodes for the target


class CompareInfo(NamedTuple):
    """Two runs of one prompt, in plain values."""

    contexts: tuple[ContextInfo, ...]
    dynamic: RunInfo
    static: RunInfo


def info(dynamic: Trace, static: Trace) -> CompareInfo:
    """What the two runs share and what each of them did; `ValueError` where they are not of one prompt."""
    if dynamic.prompt_ids != static.prompt_ids:
        raise ValueError("The two runs have different prompts, so their trees cannot be compared.")
    ours, theirs = dynamic.output_ids, static.output_ids
    shortest = min(len(ours), len(theirs))
    alike = next((i for i in range(shortest) if ours[i] != theirs[i]), shortest)
    starts = _starts(static)
    return CompareInfo(
        contexts=tuple(
            _context(position, dynamic.steps[number], number, static.steps[starts[position]], starts[position])
            for position, number in _starts(dynamic).items()
            if position <= alike and position in starts
        ),
        dynamic=_run(dynamic),
        static=_run(static),
    )


def _starts(trace: Trace) -> dict[int, int]:
    """Output tokens before each step, the root included -> the step's number."""
    ends = accumulate((step.emitted for step in trace.steps), initial=1)
    return {position: number for number, position in zip(range(len(trace.steps)), ends)}


def _context(position: int, dynamic: StepTrace, number: int, static: StepTrace, other: int) -> ContextInfo:
    return ContextInfo(position, _side(dynamic, number), _side(static, other), _tokens(dynamic) == _tokens(static))


def _side(step: StepTrace, number: int) -> SideInfo:
    every = step.depths
    depths = [every[node] for node in step.kept]
    return SideInfo(
        step=number,
        layers=tuple(depths.count(depth) for depth in range(1, max(depths, default=0) + 1)),
        accepted=len(step.accepted),
        emitted=step.emitted,
        expected=sum(math.exp(min(step.log_value[node], 0.0)) for node in step.kept),
    )


def _tokens(step: StepTrace) -> set[tuple[int, ...]]:
    """The kept nodes as paths of tokens."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in sorted(step.kept):
        paths[node] = (*paths[step.parents[node]], step.token_ids[node])
    return set(paths.values())


def _shape(step: StepTrace) -> str:
    """The kept nodes' shape, brackets in brackets, the same whatever the order of the children."""
    kept = sorted(step.kept)
    below: dict[int, list[str]] = {node: [] for node in (0, *kept)}
    for node in reversed(kept):
        below[step.parents[node]].append(f"({''.join(sorted(below[node]))})")
    return "".join(sorted(below[0]))


def _run(trace: Trace) -> RunInfo:
    steps = trace.steps
    accepted = sum(min(len(step.accepted), step.emitted) for step in steps)
    kept = sum(len(step.kept) for step in steps)
    many = len(steps) or 1
    after_root = [sum(step.parents[node] == 0 for node in step.kept) for step in steps] or [0]
    return RunInfo(
        tokens=len(trace.output_ids),
        steps=len(steps),
        tau=trace.tau,
        acceptance_rate=accepted / kept if kept else None,
        accepted=accepted / many,
        kept=kept / many,
        drafted=sum(len(step.token_ids) - 1 for step in steps) / many,
        after_root=(min(after_root), max(after_root)),
        shapes=len({_shape(step) for step in steps}),
    )


def line(side: SideInfo) -> str:
    """What is said under one tree."""
    text = (
        f"{count(side.nodes, 'node')} for the target, {side.accepted} accepted, {count(side.emitted, 'token')} gained"
        f"{' (the output ends there)' if side.emitted <= side.accepted else ''}; sum of values {side.expected:.2f}"
        " (what the head expects to be accepted)."
    )
    if side.layers:
        text += f" Nodes per layer, from the root on: {', '.join(map(str, side.layers))}."
    return text


def sentence(context: ContextInfo) -> str:
    """The comparison of both trees in one context."""
    dynamic, static = context.dynamic, context.static
    if dynamic.nodes == static.nodes:
        budget = f"{count(static.nodes, 'node')} each"
    else:
        budget = f"{count(static.nodes, 'node')} in the static tree and {dynamic.nodes} in the dynamic tree"
    if context.same:
        got = f"both trees are equal, and the path got {count(static.accepted, 'drafted token')}"
    elif dynamic.accepted == static.accepted:
        got = f"both trees' paths got {count(static.accepted, 'drafted token')}"
    else:
        got = f"the static tree's path got {count(static.accepted, 'drafted token')}, the dynamic tree's {dynamic.accepted}"
    text = f"Same context, {budget}: {got}."
    if not context.same and static.layers and dynamic.layers:
        first, other = count(static.layers[0], "node"), dynamic.layers[0]
        if static.layers[0] == other:
            text += f" Right after the root both trees have {first}."
        else:
            text += f" Right after the root the static tree has {first}, the dynamic tree {other}."
    return text


def rows(compared: CompareInfo) -> tuple[tuple[str, str, str], ...]:
    """The table of totals: name, static tree, dynamic tree."""
    columns = [
        (
            f"{run.tau:.2f}",
            str(run.steps),
            str(run.tokens),
            f"{run.accepted:.2f}",
            "–" if run.acceptance_rate is None else f"{100 * run.acceptance_rate:.1f} %",
            f"{run.kept:.1f}",
            f"{run.drafted:.1f}",
            str(run.after_root[0]) if len(set(run.after_root)) == 1 else f"{run.after_root[0]} to {run.after_root[1]}",
            str(run.shapes),
        )
        for run in (compared.static, compared.dynamic)
    ]
    names = (
        "τ, tokens per target pass",
        "steps (target passes)",
        "tokens of the output",
        "drafted tokens accepted per step",
        "acceptance rate (accepted / nodes for the target)",
        "nodes for the target per step",
        "nodes drafted per step",
        "nodes right after the root",
        "different shapes of the tree",
    )
    return tuple(zip(names, *columns))


def message(pairs: Sequence[Pair], payload: Callable[[Trace], Mapping[str, Any]], *, opened: int = 0) -> dict[str, Any]:
    """Pairs for the browser; ``payload`` is `visual.player.payload`, ``opened`` the pair to show first."""
    return {"kind": "compare", "opened": opened, "pairs": [_pair(pair, payload) for pair in pairs]}


def _pair(pair: Pair, payload: Callable[[Trace], Mapping[str, Any]]) -> dict[str, Any]:
    compared = info(pair.dynamic, pair.static)
    return {
        "title": plain(pair.title),
        "look": plain(pair.look),
        "prompt": plain(pair.dynamic.prompt_text),
        "dynamic": payload(pair.dynamic),
        "static": payload(pair.static),
        "contexts": [
            {
                "position": context.position,
                "say": sentence(context),
                "dynamic": {"step": context.dynamic.step, "say": line(context.dynamic)},
                "static": {"step": context.static.step, "say": line(context.static)},
            }
            for context in compared.contexts
        ],
        "rows": [list(row) for row in rows(compared)],
    }


def setup() -> dict[str, Any]:
    """What the browser needs once."""
    return {
        "static": "Static tree (EAGLE-1): always the same shape",
        "dynamic": "Dynamic tree (EAGLE-2): grown by confidence",
        "about": "One head drafts both trees for the same context, with the same budget of nodes for the target. The static"
        " tree spends it on places that are fixed beforehand, in a shape like EAGLE-1's; the dynamic tree drafts more"
        " nodes and keeps those of the highest value, the product of the head's confidences from the root down.",
        "empty": "There is no pair of runs to compare yet.",
        "apart": "These two runs share no context: their outputs differ from the first token on.",
    }
