"""The side views: infos literally on the golden trace, and against the definitions on trees of the paper's size."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re

import pytest
from test_visual import HOSTILE
from visual_helpers import GOLDEN, synthetic

from eagle2.trace import StepTrace, Trace
from visual import theme, tree, views
from visual.views import MaskRow, ValueMark


@pytest.fixture(scope="module")
def golden() -> Trace:
    return Trace.load(GOLDEN)


@pytest.fixture(scope="module")
def paper() -> Trace:
    """60 kept of 510."""
    return synthetic(4)


@pytest.fixture(scope="module")
def bare() -> StepTrace:
    """A step in which nothing was drafted."""
    return StepTrace(
        token_ids=(1,), parents=(-1,), confidence=(1.0,), log_value=(0.0,), selected=(), kept=(), target_probs=(),
        target_ranks=(), choice_ids=(2,), choice_probs=(0.5,), accepted=(), next_id=2, next_kind="bonus", decisions=(),
        emitted=1, draft_seconds=0.0, verify_seconds=0.02, commit_seconds=0.0,
    )  # fmt: skip


def layers(figure: object) -> dict[str, object]:
    return {trace.name: trace for trace in figure.data}  # type: ignore[attr-defined]


# ---- values ----


def test_values_of_the_golden_tree(golden: Trace) -> None:
    info = views.values_info(golden.steps[0], golden.vocabulary)
    assert [mark._replace(value=round(mark.value, 6)) for mark in info.marks] == [
        ValueMark(1, "␣light", 0.6, 0, True, "accepted"),
        ValueMark(3, "house", 0.48, 1, True, "accepted"),
        ValueMark(2, "␣old", 0.3, 0, True, "rejected"),
        ValueMark(5, "␣man", 0.15, 1, True, "not reached"),
        ValueMark(4, "er", 0.06, 1, False, "cut"),
        ValueMark(6, "␣lamp", 0.06, 1, False, "cut"),
    ]
    assert (info.kept, info.by_value) == (4, True)
    assert (info.lowest_kept, info.highest_cut) == pytest.approx((0.15, 0.06), abs=1e-6)
    assert views.values_label(info, "rerank", 6) == "cut: the 4th of 6 values, .15"
    assert views.values_words(info, "verify") == (
        "Values of 6 drafted nodes, highest .60, lowest .060, the 4 highest kept, cut between .15 and .060."
    )
    assert views.values_words(info, "accept").endswith("cut between .15 and .060, 2 accepted.")
    assert views.values_words(info, "draft", 0) == "Values of the 2 drafted nodes so far, highest .60, lowest .30."


def test_where_all_is_kept_nothing_is_called_cut(golden: Trace) -> None:
    info = views.values_info(golden.steps[1], golden.vocabulary)
    assert [mark.node for mark in info.marks] == [1, 2, 3, 5, 4, 6]
    assert info.highest_cut is None
    assert views.values_label(info, "rerank", 6) == "nothing is cut: all 6 values kept"
    assert "all kept, nothing cut" in views.values_words(info, "rerank")
    assert layers(views.values_figure(info))["line"].x == ()  # type: ignore[attr-defined]


def test_the_order_is_the_reranking_phases(paper: Trace) -> None:
    for step in paper.steps:
        info = views.values_info(step, paper.vocabulary)
        order = [mark.node for mark in info.marks]
        assert sorted(order[: info.kept]) == list(step.kept)
        assert order == sorted(range(1, 511), key=lambda i: (-step.log_value[i], step.depths[i], i))
        assert info.by_value
        line = layers(views.values_figure(info))["line"]
        assert line.x == (60.5, 60.5)  # type: ignore[attr-defined]


def test_at_a_tie_kept_comes_before_cut(golden: Trace) -> None:
    step = golden.steps[0]
    # Nodes 4 and 6 have the same value; the rule would keep 4, a trace from elsewhere may have kept 6.
    for kept in ((1, 2, 3, 5, 4), (1, 2, 3, 5, 6)):
        tied = dataclasses.replace(
            step, kept=kept, target_probs=(*step.target_probs, 0.01), target_ranks=(*step.target_ranks, 9),
            choice_ids=(*step.choice_ids, 25), choice_probs=(*step.choice_probs, 0.5),
        )  # fmt: skip
        info = views.values_info(tied, golden.vocabulary)
        assert [mark.node for mark in info.marks[:5]] == [1, 3, 2, 5, kept[-1]]
        assert [mark.kept for mark in info.marks] == [True] * 5 + [False]
        assert info.by_value
        assert views.values_label(info, "rerank", 6) == "cut: the 5th of 6 values, .060"


def test_a_cut_that_values_do_not_explain_gets_no_line(golden: Trace) -> None:
    step = golden.steps[0]
    odd = dataclasses.replace(
        step, kept=(1, 2, 3, 6), target_probs=(0.55, 0.25, 0.9, 0.05)
    )  # 6 (.06) is kept, 5 (.15) cut
    info = views.values_info(odd, golden.vocabulary)
    assert not info.by_value
    assert layers(views.values_figure(info))["line"].x == ()  # type: ignore[attr-defined]
    assert views.values_label(info, "rerank", 6) == "4 of 6 kept, not by value"


def test_marks_of_each_phase(golden: Trace) -> None:
    info = views.values_info(golden.steps[0], golden.vocabulary)

    def nodes(phase: tree.Phase, drafted_in: int | None = None) -> dict[str, list[int]]:
        drawn = layers(views.values_figure(info, phase, drafted_in=drafted_in))
        return {name: list(drawn[name].customdata or ()) for name in ("drafted", "kept", "cut", "accepted")}  # type: ignore[attr-defined]

    assert nodes("draft", 0) == {"drafted": [1, 2], "kept": [], "cut": [], "accepted": []}
    assert nodes("draft", 1)["drafted"] == [1, 3, 2, 5, 4, 6]
    for phase in ("rerank", "flatten", "verify"):
        assert nodes(phase) == {"drafted": [], "kept": [1, 3, 2, 5], "cut": [4, 6], "accepted": []}  # type: ignore[arg-type]
    assert nodes("accept") == {"drafted": [], "kept": [2, 5], "cut": [4, 6], "accepted": [1, 3]}
    drawn = layers(views.values_figure(info, "accept"))
    assert drawn["checks"].text == ("✓", "✓")  # type: ignore[attr-defined]
    assert drawn["cut"].marker.color == theme.LIGHT.paper  # type: ignore[attr-defined]
    assert layers(views.values_figure(info, "draft", drafted_in=1))["line"].x == ()  # type: ignore[attr-defined]


def test_axes_hold_all_values_and_the_label_stays_inside(paper: Trace, golden: Trace) -> None:
    for trace, width in itertools.product((paper, golden), (300, 344, 700)):
        infos = [views.values_info(step, trace.vocabulary) for step in trace.steps]
        most, low = views.values_span(infos)
        assert most == max(len(info.marks) for info in infos)
        for info, phase in itertools.product(infos, tree.PHASES):
            figure = views.values_figure(info, phase, span=(most, low), width=width)
            bottom, top = figure.layout.yaxis.range
            for mark in info.marks:
                assert bottom < math.log10(mark.value) < top
            words = layers(figure)["words"]
            at = math.log10(words.x[0]) if figure.layout.xaxis.type == "log" else words.x[0]  # type: ignore[attr-defined]
            start, end = figure.layout.xaxis.range
            inner = width - views.SIZES.left - views.SIZES.right
            left = views.SIZES.left + inner * (at - start) / (end - start) + 1e-6
            assert left >= 0
            assert left + views.SIZES.letter * len(words.text[0]) <= width  # type: ignore[attr-defined]


def test_tiny_values_are_drawn_at_the_floor(golden: Trace) -> None:
    step = dataclasses.replace(golden.steps[0], log_value=(0.0, -0.5, -1.2, -0.7, -2.8, -1.9, -900.0))
    figure = views.values_figure(views.values_info(step, golden.vocabulary), "draft")
    assert min(layers(figure)["drafted"].y) == 1e-12  # type: ignore[attr-defined]
    json.loads(figure.to_json())


# ---- mask ----


def test_mask_of_the_golden_tree(golden: Trace) -> None:
    info = views.mask_info(golden.steps[0], golden.vocabulary, 3)
    assert info == views.MaskInfo(
        rows=(
            MaskRow(0, 0, "The", 3, (0,), True),
            MaskRow(1, 1, "␣light", 4, (0, 1), True),
            MaskRow(2, 2, "␣old", 4, (0, 2), False),
            MaskRow(3, 3, "house", 5, (0, 1, 3), True),
            MaskRow(4, 5, "␣man", 5, (0, 2, 4), False),
        ),
        prefix=3,
    )
    assert views.mask_words(info, "rerank") == "Tree mask. No rows yet: the phase Flatten makes them."
    assert views.mask_words(info, "flatten") == (
        "Tree mask of 5 rows: the root and 4 kept nodes. Each row attends to the text so far (3 tokens), its ancestors and"
        " itself. The deepest row has 2 ancestors. Position ids 3 to 5."
    )
    assert views.mask_words(info, "accept").endswith("Accepted: the root and rows 1, 3.")
    cells = layers(views.mask_figure(info, "flatten"))["cells"]
    assert [list(row) for row in cells.z] == [  # type: ignore[attr-defined]
        [1, 2, 0, 0, 0, 0],
        [1, 2, 2, 0, 0, 0],
        [1, 2, 0, 2, 0, 0],
        [1, 2, 2, 0, 2, 0],
        [1, 2, 0, 2, 0, 2],
    ]
    drawn = layers(views.mask_figure(info, "accept"))
    assert [max(row[1:]) for row in drawn["cells"].z] == [3, 3, 2, 3, 2]  # type: ignore[attr-defined]
    assert len(drawn["checks"].text) == 3  # type: ignore[attr-defined]
    assert [text.replace("\u00a0", " ") for text in drawn["labels"].text] == [  # type: ignore[attr-defined]
        "0 @3 The", "1 @4 ␣light", "2 @4 ␣old", "3 @5 house", "4 @5 ␣man",
    ]  # fmt: skip
    assert drawn["cells"].hovertext[3][2] == "<b>row 3 house</b> @5<br>attends to row 1 ␣light"  # type: ignore[attr-defined]
    assert drawn["cells"].hovertext[3][3] == "<b>row 3 house</b> @5<br>does not attend to row 2 ␣old"  # type: ignore[attr-defined]


def test_mask_is_the_ancestors_and_the_row_itself(paper: Trace) -> None:
    for step in paper.steps:
        rows = [0, *step.kept]
        info = views.mask_info(step, paper.vocabulary, 40)
        assert [row.node for row in info.rows] == rows
        z = layers(views.mask_figure(info, "verify"))["cells"].z  # type: ignore[attr-defined]
        for i, node in enumerate(rows):
            line = {node}
            while step.parents[node] >= 0:
                node = step.parents[node]
                line.add(node)
            assert {rows[j] for j, cell in enumerate(z[i][1:]) if cell} == line
            assert info.rows[i].position == 40 + len(line) - 1
            assert z[i][0] == 1


@pytest.mark.parametrize("phase", ["draft", "rerank"])
def test_before_flatten_an_empty_frame_of_the_same_size(paper: Trace, phase: tree.Phase) -> None:
    info = views.mask_info(paper.steps[0], paper.vocabulary, 40)
    empty, full = views.mask_figure(info, phase), views.mask_figure(info, "flatten")
    assert (empty.layout.width, empty.layout.height) == (full.layout.width, full.layout.height)
    assert [trace.name for trace in empty.data if trace.x] == ["words"]
    assert layers(empty)["words"].text == (views.NO_ROWS_YET,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [1, 2, 6, 26, 61, 129])
@pytest.mark.parametrize("width", [300, 340, 344, 660])
@pytest.mark.parametrize("position", [None, 12345])
def test_cells_and_labels_have_room(rows: int, width: int, position: int | None) -> None:
    frame = views.mask_frame(rows, position, width)
    assert frame.wide >= 4
    assert frame.high >= 5
    assert frame.left + rows * frame.wide <= frame.width
    assert frame.width == width or frame.wide == 4  # it scrolls only where the cells are as small as may be
    assert frame.every_row * frame.high >= 9
    assert frame.every_column * frame.wide >= 6 * len(str(rows - 1)) + 4
    chars = len(str(rows - 1)) + (0 if position is None else 1 + len(f"@{position}"))
    chars += 1 + theme.LABEL_CELLS if frame.with_tokens else 0
    assert views.SIZES.check + views.SIZES.cell * chars <= frame.prefix
    assert frame.left - frame.prefix >= views.SIZES.prefix


# ---- both ----


def test_a_step_without_drafts(bare: StepTrace) -> None:
    info, mask = views.values_info(bare, {1: "a"}), views.mask_info(bare, {1: "a"}, 9)
    assert info == views.ValuesInfo((), 0, None, None, True)
    assert mask == views.MaskInfo((MaskRow(0, 0, "a", 9, (0,), True),), 9)
    assert views.mask_words(mask, "verify") == (
        "Tree mask of 1 row: the root. Each row attends to the text so far (9 tokens), its ancestors and itself."
        " Position id 9."
    )
    for phase in tree.PHASES:
        assert views.values_words(info, phase) == views.NOTHING_DRAFTED
        assert layers(views.values_figure(info, phase))["words"].text == (views.NOTHING_DRAFTED,)  # type: ignore[attr-defined]
    assert layers(views.mask_figure(mask, "flatten"))["cells"].z == ([1, 2],)  # type: ignore[attr-defined]


@pytest.mark.parametrize("palette", theme.PALETTES.values(), ids=list(theme.PALETTES))
@pytest.mark.parametrize("phase", tree.PHASES)
def test_figures_render(
    golden: Trace, paper: Trace, bare: StepTrace, phase: tree.Phase, palette: theme.Palette
) -> None:
    for step, words in ((golden.steps[0], golden.vocabulary), (paper.steps[1], paper.vocabulary), (bare, {})):
        values = views.values_figure(views.values_info(step, words), phase, palette, drafted_in=0)
        mask = views.mask_figure(views.mask_info(step, words), phase, palette)
        json.loads(values.to_json()), json.loads(mask.to_json())
        assert [trace.name for trace in values.data] == list(views.VALUES_LAYERS)
        assert [trace.name for trace in mask.data] == list(views.MASK_LAYERS)


def test_hostile_tokens_are_text() -> None:
    trace = synthetic(3, depth=2, top_k=3, total=6, words=HOSTILE)
    seen = ""
    for step, phase in itertools.product(trace.steps, tree.PHASES):
        texts: list[str] = []
        for drawn in views.values_figure(views.values_info(step, trace.vocabulary), phase).data:
            texts += drawn.hovertext or ()
        for drawn in views.mask_figure(views.mask_info(step, trace.vocabulary, 5), phase).data:
            if drawn.type == "heatmap":
                texts += itertools.chain.from_iterable(drawn.hovertext if drawn.hovertext is not None else ())
            else:
                texts += drawn.text or ()
        for text in texts:
            assert (text.count("<b>"), text.count("</b>")) in ((0, 0), (1, 1))  # ours; the token's own are escaped
            bare = text.replace("<b>", "").replace("</b>", "").replace("<br>", " ")
            assert "<" not in bare
            assert "\u202e" not in bare
            assert "\ud800" not in bare
            seen += bare
    assert "&lt;b&gt;bold&lt;/b&gt;" in seen
    assert "%{x}&amp;lt;" in seen


def test_style_has_no_colours_of_its_own() -> None:
    for name in ("views.css", "views.js"):
        text = (GOLDEN.parents[2] / "visual" / name).read_text(encoding="utf-8")
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl", text), name
