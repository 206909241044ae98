"""The view "Why this tree": literally on the golden trace, and against what the planner decided by."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from visual_helpers import GOLDEN, synthetic, with_copies

from eagle2 import eagle
from eagle2.cost import CostModel, TreePlanner
from eagle2.engine import Engine, Settings
from eagle2.trace import Trace
from tests.tiny import byte_tokenizer, tiny_head, tiny_model
from visual import player, theme, tree, why

# Seconds; a plain step takes 10 ms.
COSTS = CostModel((1, 2, 4, 8), (0.010, 0.011, 0.013, 0.017), (1, 3), (0.001, 0.002), 0.0005)


def with_costs(trace: Trace, costs: Any) -> Trace:
    return dataclasses.replace(trace, metadata={**trace.metadata, "costs": costs})


@pytest.fixture(scope="module")
def golden() -> Trace:
    return with_costs(Trace.load(GOLDEN), COSTS.to_dict())


def rounded(info: why.WhyInfo) -> why.WhyInfo:
    return info._replace(
        tokens=tuple(round(value, 4) for value in info.tokens), steps=tuple(round(value, 4) for value in info.steps),
        kept_tokens=round(info.kept_tokens, 4),
    )  # fmt: skip


def test_info_of_the_golden_tree(golden: Trace) -> None:
    # The prompt's 3 tokens and the layer's 2 nodes; then the root and the 2 accepted tokens.
    assert why.fed_rows(golden) == ((3, 2), (3, 2))
    first, second, whole = why.infos(golden, COSTS)[0]
    assert rounded(whole) == why.WhyInfo(
        nodes=(1, 3, 2, 5, 4, 6), tokens=(1.0, 1.6, 2.08, 2.38, 2.53, 2.59, 2.65),
        # 2 ms and 1.5 ms of drafting, .5 ms of all else, and the pass over n + 1 rows
        steps=(1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0), best=4, kept=4, kept_tokens=2.53, came=3, passes=2,
    )  # fmt: skip
    assert whole.speedup == pytest.approx(2.53 / 1.8)
    assert rounded(first) == why.WhyInfo((1, 2), (1.0, 1.6, 1.9), (1.25, 1.35, 1.45), 2, 0, 1.0, 3, 1)
    assert (second.best, second.kept, second.nodes) == (4, 0, whole.nodes)


def test_copies_alone_cost_the_pass_and_no_draft() -> None:
    trace = with_costs(with_copies(), COSTS.to_dict())
    assert why.fed_rows(trace) == ((3, 2), ())
    info = why.infos(trace, COSTS)[1][-1]
    assert info.steps[0] == 1
    assert info.steps[info.kept] == pytest.approx(COSTS.verify(1 + info.kept) / COSTS.verify(1))
    assert info.passes == 0


def test_the_sentences(golden: Trace) -> None:
    first, _, whole = why.infos(golden, COSTS)[0]
    assert why.words(first, "draft") == (
        "After draft pass 1: 2 nodes. Keeping 2 would be best so far: expected 1.90 tokens for the time of 1.45 plain"
        " steps, 1.31×."
    )
    said = "Keeping 4 of 6 nodes: expected 2.53 tokens for the time of 1.80 plain steps, 1.41×. No other cut is faster."
    assert why.words(whole, "rerank") == said
    assert why.words(whole, "accept") == said + " What came of it: 3 tokens."
    hand = whole._replace(kept=6, kept_tokens=2.65)
    assert why.words(hand, "verify").endswith(
        "1.32×. Keeping the 4 of highest value would be best, 1.41×: this cut loses 6\u00a0%."
    )
    slow = whole._replace(steps=tuple(3 * value for value in whole.steps))
    assert why.words(slow, "verify").endswith(" Slower than plain steps, but the draft is paid for by then.")
    useless = slow._replace(tokens=(1.0,) + (1.01,) * 6, kept_tokens=1.01, best=0)
    assert why.words(useless, "verify").endswith(
        "would be best, 0.24×: this cut loses 21\u00a0%. Slower than plain steps."
    )


def test_a_cut_that_values_do_not_explain_is_weighed_by_its_own(golden: Trace) -> None:
    odd = dataclasses.replace(golden.steps[0], kept=(1, 2, 3, 6), target_probs=(0.55, 0.25, 0.9, 0.05))
    info = why.info(odd, (3, 2), COSTS)
    assert (info.kept, info.best) == (4, 4)
    assert info.kept_tokens == pytest.approx(1 + 0.6 + 0.3 + 0.48 + 0.06, abs=1e-5)
    assert "Keeping the 4 of highest value would be best" in why.words(info, "verify")


def test_a_step_without_drafts_is_a_plain_step(golden: Trace) -> None:
    step = dataclasses.replace(
        golden.steps[0], token_ids=golden.steps[0].token_ids[:1], parents=(-1,), confidence=(1.0,), log_value=(0.0,),
        selected=(), kept=(), target_probs=(), target_ranks=(), accepted=(), decisions=(), emitted=1,
        choice_ids=golden.steps[0].choice_ids[:1], choice_probs=(0.5,),
    )  # fmt: skip
    info = why.info(step, (), COSTS)
    assert info == why.WhyInfo((), (1.0,), (1.0,), 0, 0, 1.0, 1, 0)
    for phase in tree.PHASES:
        assert why.words(info, phase) == why.NOTHING
        why.figure(info, COSTS, phase).to_json()


@pytest.mark.parametrize(
    "costs",
    [None, 3, [], {}, {"format": "eagle2-costs", "version": 99}, COSTS.to_dict() | {"verify": [[1, -1]]},
     COSTS.to_dict() | {"overhead": 10**400}],
)  # fmt: skip
def test_runs_without_usable_costs_have_no_view(golden: Trace, costs: Any) -> None:
    assert why.costs_of(golden) == COSTS
    assert player.payload(golden)["costs"] == {**COSTS.to_dict(), "catch_up": 3}
    assert player.payload(with_costs(golden, costs))["costs"] is None
    assert player.payload(Trace.load(GOLDEN))["costs"] is None


def test_marks_of_each_phase(golden: Trace) -> None:
    info = why.infos(golden, COSTS)[0][-1]

    def drawn(phase: tree.Phase, of: why.WhyInfo = info) -> dict[str, Any]:
        return {trace.name: trace for trace in why.figure(of, COSTS, phase).data}

    draft, rerank, accept = drawn("draft", why.infos(golden, COSTS)[0][0]), drawn("rerank"), drawn("accept")
    assert not draft["cut"].x
    assert len(set(rerank["cut"].x)) == 1
    assert len(rerank["cut"].y) == 3
    assert rerank["best"].x[0] == rerank["cut"].x[0]
    assert rerank["best"].y[0] == rerank["cut"].y[2]
    assert [text for text in rerank["words"].text if text.startswith("<b>")] == [
        "<b>2.53</b>",
        "<b>1.80</b>",
        "<b>1.41×</b>",
    ]
    assert not rerank["came"].x
    assert accept["came"].x[0] == accept["cut"].x[0]
    assert accept["came"].y[0] < accept["cut"].y[0]  # 3 tokens, more than expected
    # Rows 1, 2 and 4 of the four measured points: the view holds 6 nodes.
    assert [text.split(" in ")[0] for text in accept["measured"].hovertext] == [
        "measured: 1 row", "measured: 2 rows", "measured: 4 rows",
    ]  # fmt: skip
    assert accept["curves"].hovertext[4] == (
        "<b>n = 4</b>: with the 4th value<br>expected tokens 2.53<br>time 1.80 plain steps (18 ms)<br>"
        "expected speed-up 1.41×"
    )
    assert list(accept["curves"].customdata[:8]) == [None, 1, 3, 2, 5, 4, 6, None]


@pytest.mark.parametrize("palette", theme.PALETTES.values(), ids=list(theme.PALETTES))
def test_all_is_drawn_inside_the_figure(golden: Trace, palette: theme.Palette) -> None:
    for trace in (golden, synthetic(4), synthetic(6, depth=3, top_k=4, total=5, seed=4)):
        infos = why.infos(trace, COSTS)
        ends = why.span(infos)
        for of in infos:
            for info, phase in [(item, "draft") for item in of[:-1]] + [(of[-1], "accept")]:
                for width in (300, 344):
                    figure = why.figure(info, COSTS, phase, palette, within=ends, width=width)  # type: ignore[arg-type]
                    json.loads(figure.to_json())
                    assert [item.name for item in figure.data] == list(why.LAYERS)
                    for item in figure.data:
                        assert all(0 <= x <= width for x in item.x if x is not None), item.name
                        assert all(0 <= y <= why.HEIGHT for y in item.y if y is not None), item.name


def test_the_view_counts_as_the_planner_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catch-up after the prompt, after a step, and after skipped steps; the planner's cut is the view's best."""
    assert why.AUTO_DEPTH == eagle.AUTO_DEPTH
    spent: list[float] = []
    cut = TreePlanner.cut

    def watched(self: TreePlanner, values: Any) -> int:
        spent.append(self._spent)
        return cut(self, values)

    monkeypatch.setattr(TreePlanner, "cut", watched)
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # surer of itself, so that drafting seems to pay
    costs = CostModel(
        (1, 2, 4, 8, 16, 32, 64), (1.0, 1.01, 1.03, 1.08, 1.2, 1.5, 2.23), (1, 4, 8), (0.02, 0.03, 0.05), 0.02
    )
    engine = Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head", costs=costs)
    trace = engine.trace("hello", Settings(max_new_tokens=30, depth="auto", total_tokens="auto", lookup=False))
    rows = [of for of in why.fed_rows(trace) if of]
    assert [sum(map(costs.draft, of)) for of in rows] == pytest.approx(spent)
    assert {of[0] for of in rows} >= {
        1,
        5,
    }  # 1: after the prompt; 5: four skipped steps and one drafted before the probe
    kept = [of[-1].kept for of in why.infos(trace, costs)]
    assert kept == [of[-1].best for of in why.infos(trace, costs)]
    assert len(set(kept)) > 2
