"""The draft tree of one step: `info` reads the trace and lays the tree out, `figure` draws it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import plotly.graph_objects as go

from eagle2.trace import StepTrace, Trace
from visual.theme import (
    LIGHT,
    MONO,
    SANS,
    SIZES,
    Palette,
    digits,
    escape,
    glyphs,
    ink_on,
    isolate,
    label,
    probability,
    short,
)

Verdict = Literal["root", "accepted", "rejected", "not reached", "cut"]
Phase = Literal["draft", "rerank", "flatten", "verify", "accept"]
PHASES: tuple[Phase, ...] = ("draft", "rerank", "flatten", "verify", "accept")
LAYERS = (
    "cut-edges", "stub-lines", "edges", "accepted", "own", "rings", "nodes", "labels", "confidences", "marks", "stubs",
)  # fmt: skip


class NodeInfo(NamedTuple):
    """One node of the expanded tree, the root included."""

    node: int
    parent: int  # -1 for the root
    depth: int
    token: str  # all of its text, with visible glyphs
    label: str  # the part that fits
    confidence: float
    value: float
    log_value: float
    drafted_in: int  # number of the draft pass that proposed it, from 0; -1 for the root
    kept: bool  # False for the root, which is no draft
    target_prob: float | None  # None unless kept
    target_rank: int | None
    choice: str | None  # the target's most probable token after this node; None unless verified
    choice_prob: float | None
    draw: float | None  # what the verifier drew against it, when sampling
    verdict: Verdict
    x: float
    y: float | None  # None where it is folded into a stub
    copied: bool = False  # its confidence is prompt lookup's


class StubInfo(NamedTuple):
    """Cut children folded away at one node."""

    node: int
    children: int
    nodes: int  # children and all below them
    x: float
    y: float
    hanging: bool  # below the last child's line; otherwise straight ahead of a leaf


class NextInfo(NamedTuple):
    """The target's own token, drawn as one more child of the path's end."""

    token: str
    label: str
    kind: str  # bonus or correction
    parent: int
    counted: bool  # False where a stop or the cap cut it off
    x: float
    y: float


class TreeInfo(NamedTuple):
    """All that is drawn of one step, in plain values; coordinates are pixels, y downwards."""

    number: int
    nodes: tuple[NodeInfo, ...]
    order: tuple[int, ...]  # drawing order, the target's own token as number ``len(nodes)``
    next: NextInfo
    stubs: tuple[StubInfo, ...]
    passes: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]  # nodes in the row order of the target's pass, the root first
    root_position: int | None  # position id of the root; None where the text before it is not known
    accepted: tuple[int, ...]
    lowest_kept: float | None  # value at the cut
    highest_cut: float | None
    emitted: int
    width: float
    height: float


class Placement(NamedTuple):
    """Where things stand for one choice of unfolded nodes."""

    y: tuple[float | None, ...]  # per node, then the target's own token
    stubs: tuple[tuple[int, float, bool], ...]  # node, y, hanging
    height: float


def drawing_order(step: StepTrace) -> tuple[int, ...]:
    """Depth first, best child first: kept children, the target's own token (number N), then the cut children."""
    n, kept = len(step.token_ids), set(step.kept)
    end = step.accepted[-1] if step.accepted else 0
    children: list[list[int]] = [[] for _ in range(n)]
    for node in range(1, n):
        children[step.parents[node]].append(node)
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        if node == n:
            continue
        ranked = sorted(children[node], key=lambda i: (i not in kept, -step.log_value[i], i))
        if node == end:
            ranked.insert(sum(i in kept for i in ranked), n)
        stack += reversed(ranked)
    return tuple(order)


def place(step: StepTrace, order: tuple[int, ...], unfolded: Collection[int]) -> Placement:
    """One row per leaf, the first child on its parent's row; `player.js` does the same when a stub is opened."""
    n, kept = len(step.token_ids), set(step.kept)
    end = step.accepted[-1] if step.accepted else 0
    row: dict[int, int] = {}
    last_row: dict[int, int] = {}  # per parent, of its direct children
    heights: list[int] = []
    for node in order:
        parent = end if node == n else step.parents[node]
        cut = 0 < node < n and node not in kept
        if cut and (parent not in row or parent not in unfolded):
            continue
        if parent >= 0 and parent not in last_row:
            row[node] = row[parent]
        else:
            row[node] = len(heights)
            heights.append(SIZES.cut_row if cut else SIZES.row)
        if parent >= 0:
            last_row[parent] = row[node]
    folded = [
        parent
        for parent in dict.fromkeys(step.parents[i] for i in range(1, n) if i not in kept)
        if parent in row and parent not in unfolded
    ]
    hangs = {last_row[node] for node in folded if node in last_row}
    tops: list[float] = []
    y = SIZES.top - heights[0]
    for number, height in enumerate(heights):
        y += height + (SIZES.stub if number - 1 in hangs else 0)
        tops.append(float(y))
    stubs = tuple((node, tops[last_row.get(node, row[node])], node in last_row) for node in sorted(folded))
    placed = tuple(tops[row[i]] if i in row else None for i in range(n + 1))
    return Placement(placed, stubs, tops[-1] + SIZES.bottom + SIZES.stub)


def unfolded_nodes(step: StepTrace, unfold: bool | Collection[int] | None = None) -> Collection[int]:
    """Nodes whose cut children are drawn: all, none, those given, or (None) all in a small tree and none in a large."""
    if unfold is None:
        unfold = len(step.token_ids) - 1 <= SIZES.unfold_limit
    if isinstance(unfold, bool):
        return range(len(step.token_ids)) if unfold else ()
    return unfold


COPIED = "⧉"  # beside the confidence of a copied node
COPIED_HOVER = " (prompt lookup's: copied from earlier text)"


def passes(step: StepTrace) -> tuple[tuple[int, ...], ...]:
    """Nodes fed to the head, pass by pass.  A trace leaves the first pass out, in which the head catches up with the
    committed text and reads the root; here it counts, since it proposes the first layer."""
    if len(step.copied) == len(step.token_ids) - 1 or any(0 in nodes for nodes in step.selected[:1]):
        return step.selected  # nothing was drafted, or copies alone
    return ((0,), *step.selected)


def drafted_in(step: StepTrace) -> tuple[int, ...]:
    """Number of the draft pass that proposed each node: the one in which its parent was fed.

    Copies below nodes that were not fed appear no later than the last pass.
    """
    fed = {node: number for number, nodes in enumerate(passes(step)) for node in nodes}
    last = max(len(passes(step)) - 1, 0) if step.copied else len(step.parents)
    return tuple(
        -1 if parent < 0 else fed.get(parent, min(depth - 1, last)) for parent, depth in zip(step.parents, step.depths)
    )


def verdicts(step: StepTrace) -> tuple[Verdict, ...]:
    """What became of each node."""
    kept, accepted = set(step.kept), set(step.accepted)
    path = {0, *accepted}
    refused = {decision.node for decision in step.decisions if not decision.accepted}

    def verdict(node: int) -> Verdict:
        if node == 0:
            return "root"
        if node in accepted:
            return "accepted"
        if node not in kept:
            return "cut"
        return "rejected" if node in refused or step.parents[node] in path else "not reached"

    return tuple(verdict(node) for node in range(len(step.token_ids)))


def info(trace: Trace, number: int, *, unfold: bool | Collection[int] | None = None) -> TreeInfo:
    """The tree of one recorded step, laid out; ``unfold`` as in `unfolded_nodes`."""
    position = root_positions(trace)[number]
    return step_info(trace.steps[number], trace.vocabulary, number, unfold=unfold, root_position=position)


def root_positions(trace: Trace) -> tuple[int, ...]:
    """Position id of each step's root token, ``[len(steps)]``: the number of tokens before it."""
    ends = accumulate((step.emitted for step in trace.steps), initial=len(trace.prompt_ids))
    return tuple(ends)[: len(trace.steps)]


def step_info(
    step: StepTrace, vocabulary: Mapping[int, str], number: int = 0, *, unfold: bool | Collection[int] | None = None,
    root_position: int | None = None,
) -> TreeInfo:  # fmt: skip
    """`info` for a step that is not part of a trace yet."""
    n, depths, order = len(step.token_ids), step.depths, drawing_order(step)
    placed = place(step, order, unfolded_nodes(step, unfold))
    row = {node: i for i, node in enumerate(step.kept)}
    verified = {0: 0} | {node: i + 1 for node, i in row.items()}
    draws = {decision.node: decision.draw for decision in step.decisions}
    below = [0] * n  # cut nodes under each node
    for node in range(n - 1, 0, -1):
        below[step.parents[node]] += below[node] + (node not in row)
    born, verdict, copied = drafted_in(step), verdicts(step), set(step.copied)

    def text(token_id: int) -> str:
        return vocabulary.get(token_id, f"⟨{token_id}⟩")

    nodes = tuple(
        NodeInfo(
            node=i,
            parent=step.parents[i],
            depth=depths[i],
            token=glyphs(text(step.token_ids[i])),
            label=label(text(step.token_ids[i])),
            confidence=step.confidence[i],
            value=math.exp(min(step.log_value[i], 0.0)),
            log_value=step.log_value[i],
            drafted_in=born[i],
            kept=i in row,
            target_prob=step.target_probs[row[i]] if i in row else None,
            target_rank=step.target_ranks[row[i]] if i in row else None,
            choice=glyphs(text(step.choice_ids[verified[i]])) if i in verified else None,
            choice_prob=step.choice_probs[verified[i]] if i in verified else None,
            draw=draws.get(i),
            verdict=verdict[i],
            x=_x(depths[i]),
            y=placed.y[i],
            copied=i in copied,
        )
        for i in range(n)
    )
    end = step.accepted[-1] if step.accepted else 0
    next_y = placed.y[n]
    assert next_y is not None
    cut_children = [0] * n
    for i in range(1, n):
        cut_children[step.parents[i]] += i not in row
    cut = [step.log_value[i] for i in range(1, n) if i not in row]
    return TreeInfo(
        number=number,
        nodes=nodes,
        order=order,
        next=NextInfo(
            token=glyphs(text(step.next_id)),
            label=label(text(step.next_id)),
            kind=step.next_kind,
            parent=end,
            counted=step.emitted > len(step.accepted),
            x=_x(depths[end] + 1),
            y=next_y,
        ),
        stubs=tuple(
            StubInfo(node, cut_children[node], _hidden(step, row, node, below), _x(depths[node]), y, hanging)
            for node, y, hanging in placed.stubs
        ),
        passes=passes(step),
        rows=(0, *step.kept),
        root_position=root_position,
        accepted=step.accepted,
        lowest_kept=math.exp(min(step.log_value[i] for i in step.kept)) if step.kept else None,
        highest_cut=math.exp(max(cut)) if cut else None,
        emitted=step.emitted,
        width=float(_x(max(max(depths), depths[end] + 1)) + SIZES.right),
        height=placed.height,
    )


def _hidden(step: StepTrace, row: Mapping[int, int], node: int, below: list[int]) -> int:
    return sum(1 + below[i] for i in range(1, len(step.token_ids)) if step.parents[i] == node and i not in row)


def _x(depth: int) -> float:
    return float(SIZES.left + depth * SIZES.column)


def hover(node: NodeInfo) -> str:
    """What the pointer shows at a node, escaped for Plotly; `player.js` writes the same lines."""
    token = node.token if len(node.token) <= 60 else node.token[:59] + "…"
    lines = [f"<b>{escape(isolate(token))}</b>"]
    if node.node:
        lines.append(f"confidence {probability(node.confidence)}{COPIED_HOVER * node.copied}")
        lines.append(f"value {digits(node.value)}")
    if node.target_prob is not None and node.target_rank is not None:
        lines.append(f"target probability {probability(node.target_prob)} (rank {node.target_rank + 1})")
    if node.draw is not None:
        lines.append(f"draw {node.draw:.4f}")
    lines.append(node.verdict)
    if node.choice is not None and node.choice_prob is not None:
        choice = node.choice if len(node.choice) <= 30 else node.choice[:29] + "…"
        lines.append(f"target's choice after it: {escape(isolate(choice))} ({node.choice_prob:.2f})")
    return "<br>".join(lines)


def sentences(tree: TreeInfo) -> dict[str, str]:
    """One sentence for each phase, ``draft 1`` … ``draft n`` for the passes: shown, and spoken by a screen reader."""
    drafted = len(tree.nodes) - 1
    kept = sum(node.kept for node in tree.nodes)
    said: dict[str, str] = {}
    total = len(tree.passes)
    for number, nodes in enumerate(tree.passes):
        new = sum(node.drafted_in == number for node in tree.nodes)
        fed = f"{len(nodes)} node{'s' * (len(nodes) != 1)}"
        source = "the root" if nodes == (0,) else f"the {fed} of highest value"
        copied = sum(node.drafted_in == number and node.copied for node in tree.nodes)
        said[f"draft {number + 1}"] = (
            f"Draft, pass {number + 1} of {total}: the head reads {source} and proposes {new} tokens."
        )
        if copied:
            said[f"draft {number + 1}"] = (
                f"Draft, pass {number + 1} of {total}: the head reads {source}; {new} tokens are proposed,"
                f" {copied} of them (⧉) copied from earlier text."
            )
    if not total:
        said["draft 1"] = "Draft: nothing is drafted."
        if drafted:
            said["draft 1"] = (
                f"Draft: the head is not asked; {drafted} token{'s are' if drafted > 1 else ' is'} copied from earlier text."
            )
    said["rerank"] = f"Rerank: all {drafted} drafted nodes are kept."
    if tree.highest_cut is not None:
        limit = "" if tree.lowest_kept is None else f" The lowest kept value is {short(tree.lowest_kept)}"
        limit += "." if not limit else f", the highest cut value {short(tree.highest_cut)}."
        said["rerank"] = f"Rerank: the {kept} nodes of highest value are kept, {drafted - kept} are cut.{limit}"
    if drafted and not kept:
        said["rerank"] = f"Rerank: no node is kept, {drafted} {'is' if drafted == 1 else 'are'} cut."
    said["flatten"] = _flatten_sentence(tree)
    firsts = sum(node.target_rank == 0 for node in tree.nodes)
    said["verify"] = (
        f"Verify: one pass of the target over the root and {kept} node{'s' * (kept != 1)}."
        f" A ring marks the target's first choice: {firsts} of {kept} drafted tokens."
        if kept
        else "Verify: one pass of the target over the root alone."
    )
    path, own = len(tree.accepted), f"the target's own token {tree.next.token}"
    if not tree.next.counted:
        own += " (after the end, not counted)"
    why = "a bonus after a whole path" if tree.next.kind == "bonus" else "the correction"
    said["accept"] = (
        f"Accept: {path or 'no'} drafted token{'s' * (path != 1)}, then {own}, {why}."
        f" This step gives {tree.emitted} token{'s' * (tree.emitted != 1)}."
    )
    return said


def _flatten_sentence(tree: TreeInfo) -> str:
    if len(tree.rows) == 1:
        return "Flatten: the root alone becomes the one row of the target's pass."
    text = (
        f"Flatten: the root and {len(tree.rows) - 1} node{'s' * (len(tree.rows) > 2)} become {len(tree.rows)} rows of one"
        " pass, parents first. Each row sees the text so far, its ancestors and itself, nothing else."
    )
    if tree.root_position is not None:
        last = tree.root_position + max(tree.nodes[node].depth for node in tree.rows)
        text += f" Position ids run from {tree.root_position} to {last}, one for each depth."
    return text


def template(palette: Palette = LIGHT) -> list[dict[str, Any]]:
    """The figure's traces without data, in `LAYERS` order: style only, shared by `figure` and the player."""
    mono = {"family": MONO, "size": SIZES.label_font, "color": palette.ink}
    small = {"family": MONO, "size": SIZES.number_font, "color": palette.dim}

    def line(color: str, width: float, dash: str = "solid") -> dict[str, Any]:
        return {"mode": "lines", "hoverinfo": "skip", "line": {"color": color, "width": width, "dash": dash}}

    parts: dict[str, dict[str, Any]] = {
        "cut-edges": line(palette.cut, 1, "2px,3px"),
        "stub-lines": line(palette.dim, 1, "2px,2px"),
        "edges": line(palette.edge, 1.25),
        "accepted": line(palette.accepted, 4),
        "own": line(palette.own, 2.5, "6px,4px"),
        "rings": {"mode": "markers", "hoverinfo": "skip", "marker": {"symbol": "circle-open", "color": palette.ink}},
        "nodes": {"mode": "markers", "hoverinfo": "text", "marker": {"opacity": 1}},
        "labels": {"mode": "text", "hoverinfo": "skip", "textposition": "middle right", "textfont": mono},
        "confidences": {"mode": "text", "hoverinfo": "skip", "textposition": "middle left", "textfont": small},
        "marks": {"mode": "text", "hoverinfo": "skip", "textposition": "middle center", "textfont": mono},
        "stubs": {"mode": "text", "hoverinfo": "text", "textposition": "middle right", "textfont": small},
    }
    common = {"type": "scatter", "showlegend": False, "cliponaxis": False}
    return [{**common, "name": name, "uid": f"e2{name}", **parts[name]} for name in LAYERS]


def layout(palette: Palette = LIGHT, width: float = 900, height: float = 400) -> dict[str, Any]:
    """The figure's layout: bare axes in pixels, transparent paper."""
    axis = {"visible": False, "fixedrange": True, "autorange": False}
    return {
        "width": width,
        "height": height,
        "margin": {"l": 0, "r": 0, "t": 0, "b": 0, "pad": 0},
        "xaxis": {**axis, "range": [0, width]},
        "yaxis": {**axis, "range": [height, 0]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": SANS, "color": palette.ink},
        "hovermode": "closest",
        "hoverdistance": 14,
        "hoverlabel": {
            "align": "left",
            "bgcolor": palette.panel,
            "bordercolor": palette.rule,
            "font": {"family": SANS, "size": 12, "color": palette.ink},
        },
        "dragmode": False,
        "showlegend": False,
    }


def elbow(x0: float, y0: float, x1: float, y1: float) -> tuple[list[float | None], list[float | None]]:
    """An edge: down beside the parent, then level to the child; as many points whether straight or not."""
    bus, r = x0 + SIZES.bus, min(6.0, abs(y1 - y0) / 2)
    return (
        [x0, bus - r, bus - r * 0.3, bus, bus, bus + r * 0.3, bus + r, x1, None],
        [y0, y0, y0 + r * 0.3, y0 + r, y1 - r, y1 - r * 0.3, y1, y1, None],
    )


def figure(tree: TreeInfo, phase: Phase = "accept", palette: Palette = LIGHT) -> go.Figure:
    """One step at the end of a phase, as the player draws it."""
    late = PHASES.index(phase)
    rank, deciding = PHASES.index("verify"), phase == "accept"
    row = {node: i for i, node in enumerate(tree.rows)}
    shown = [(node, node.y) for node in tree.nodes if node.y is not None]
    at = {node.node: (node.x, y) for node, y in shown}
    columns: dict[str, dict[str, Any]] = {name: {"x": [], "y": []} for name in LAYERS}
    lines = ("edges", "cut-edges", "accepted", "own", "stub-lines")

    def draw_edge(layer: str, x0: float, y0: float, x1: float, y1: float) -> None:
        assert layer in lines
        xs, ys = elbow(x0, y0, x1, y1)
        columns[layer]["x"] += xs
        columns[layer]["y"] += ys

    def add(layer: str, x: float, y: float, **values: Any) -> None:
        columns[layer]["x"].append(x)
        columns[layer]["y"].append(y)
        for key, value in values.items():
            columns[layer].setdefault(key, []).append(value)

    for node, y in shown:
        cut = node.verdict == "cut" and late >= 1
        accepted = deciding and node.verdict in ("root", "accepted")
        rejected = deciding and node.verdict == "rejected"
        if node.parent >= 0:
            layer = "accepted" if accepted else "cut-edges" if cut else "edges"
            draw_edge(layer, *at[node.parent], node.x, y)
        color: str | float = max(node.log_value, SIZES.floor)
        if accepted:
            color = palette.accepted
        elif rejected:
            color = palette.rejected
        elif cut:
            color = palette.paper
        size = SIZES.cut_node if node.verdict == "cut" else SIZES.node + (2 if accepted else 0)
        outline = palette.accepted if accepted else palette.cut if cut else palette.outline
        add(
            "nodes", node.x, y, ids=str(node.node), hovertext=hover(node), size=size, symbol="circle",
            color=_value_color(color, palette) if isinstance(color, float) else color, outline=outline,
        )  # fmt: skip
        if node.verdict == "cut":
            add("labels", node.x + 9, y - 6, text=escape(node.label), size=SIZES.cut_font, color=palette.dim)
        else:
            shown_number = "" if node.node == 0 else short(node.value if late < rank else node.target_prob or 0.0)
            if phase == "flatten":
                shown_number = "" if tree.root_position is None else f"@{tree.root_position + node.depth}"
            tail = f' <span style="font-size:{SIZES.number_font}px;color:{palette.dim}">{shown_number}</span>'
            text = escape(node.label) + (tail if shown_number else "")
            add("labels", node.x + 12, y - 10, text=text, size=SIZES.label_font, color=palette.ink)
            if node.node:
                add("confidences", node.x - 12, y - 6, text=COPIED * node.copied + short(node.confidence))
        if phase == "verify" and node.target_rank == 0:
            add("rings", node.x, y, size=SIZES.node + 8)
        if accepted or rejected:
            ink = palette.accepted_ink if accepted else palette.rejected_ink
            add("marks", node.x, y, text="✓" if accepted else "×", color=ink, size=SIZES.label_font)
        elif phase == "flatten" and node.node in row:
            ink = ink_on(_value_color(node.log_value, palette))
            add("marks", node.x, y, text=str(row[node.node]), color=ink, size=SIZES.number_font)
    for stub in tree.stubs:
        x, y = stub.x + (SIZES.bus if stub.hanging else SIZES.node / 2), stub.y
        x1, y1 = (x, y + 10) if stub.hanging else (x + 18, y)
        start = y
        if not deciding and stub.node == tree.next.parent:
            # The row of the target's own token is still empty: the stub hangs from the row above it.
            start = max((y_ for node, y_ in shown if node.parent == stub.node), default=at[stub.node][1])
        columns["stub-lines"]["x"] += [x, x1, None]
        columns["stub-lines"]["y"] += [start, y1, None]
        label_y = y1 - 3 if stub.hanging else y1 + 2
        add("stubs", x1 + 2, label_y, text=f"+{stub.children}", hovertext=_stub_hover(stub.children, stub.nodes))
    if deciding:
        x0, y0 = at[tree.next.parent]
        draw_edge("own", x0, y0, tree.next.x, tree.next.y)
        token = tree.next.token if len(tree.next.token) <= 60 else tree.next.token[:59] + "…"
        add(
            "nodes", tree.next.x, tree.next.y, ids="next", symbol="star", size=SIZES.node + 4, color=palette.own,
            outline=palette.own, hovertext=f"<b>{escape(isolate(token))}</b><br>{tree.next.kind}",
        )  # fmt: skip
        add(
            "labels", tree.next.x + 12, tree.next.y - 10, text=f"<b>{escape(tree.next.label)}</b>",
            size=SIZES.label_font, color=palette.own_ink,
        )  # fmt: skip
    traces = []
    for base in template(palette):
        data = columns[base["name"]]
        sizes, colors = data.pop("size", None), data.pop("color", None)
        outline, symbol = data.pop("outline", None), data.pop("symbol", None)
        if base["mode"] == "markers":
            marker = {"size": sizes or [], **({"color": colors, "symbol": symbol} if symbol else {})}
            marker["line"] = {"color": outline, "width": 1.25} if outline else {"width": 1.75}
            data["marker"] = {**base["marker"], **marker}
        elif base["mode"] == "text":
            font = {k: v for k, v in (("size", sizes), ("color", colors)) if v}
            data["textfont"] = {**base["textfont"], **font}
        traces.append({**base, **data})
    return go.Figure({"data": traces, "layout": layout(palette, tree.width, tree.height)})


def _stub_hover(children: int, nodes: int) -> str:
    more = f", {nodes} nodes with all below" if nodes > children else ""
    return f"{children} cut child{'ren' * (children != 1)}{more}"


def _value_color(log_value: float, palette: Palette) -> str:
    """The colour of a log value: a straight mix of the palette's two ends, done here since Plotly takes no mixed list."""
    share = 1 - max(SIZES.floor, min(0.0, log_value)) / SIZES.floor
    low, high = (bytes.fromhex(end[1:]) for end in (palette.value_low, palette.value_high))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(low, high))
