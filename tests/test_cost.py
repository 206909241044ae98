"""The cost model and its decisions, against brute force and on made-up costs."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from eagle2.cost import CostError, CostModel, Pace, TreePlanner, another_layer_pays, best_cut

# About the embedded model's on two cores, in plain steps (reference/performance.md, bfloat16).
CPU = CostModel(
    (1, 2, 4, 8, 16, 32, 64), (1.0, 1.05, 1.1, 1.22, 1.67, 2.55, 4.23), (1, 4, 8), (0.035, 0.046, 0.056), 0.02
)
FREE = CostModel((1, 64), (1.0, 1.0), (1,), (0.0,))
DEAR = CostModel((1, 64), (1.0, 1.0), (1,), (1e9,))


def random_costs(rng: random.Random) -> CostModel:
    """Any valid curves, steps and plateaus among them."""

    def curve(low: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
        rows = sorted({1, *rng.sample(range(2, 70), rng.randint(0, 6))})
        rises = [low, *(rng.choice([0.0, rng.random(), 3.0]) for _ in rows[1:])]
        return tuple(rows), tuple(itertools.accumulate(rises))

    return CostModel(*curve(1.0), *curve(0.05), rng.random() * 0.1)


def test_seconds_between_and_beyond_the_measured_points() -> None:
    costs = CostModel((1, 2, 6), (10.0, 12.0, 20.0), (1, 3), (1.0, 2.0), 0.5)
    assert [costs.verify(n) for n in (1, 2, 3, 4, 6, 8, 300)] == [10, 12, 14, 16, 20, 24, 20 + 2 * 294]
    assert [costs.draft(n) for n in (1, 2, 3, 5)] == [1, 1.5, 2, 3]
    assert costs.step(3.0, 5) == 3 + 20 + 0.5
    assert costs.rate(2.0, 3.0, 5) == 2 / 23.5
    assert costs.plain_rate == 0.1
    assert FREE.draft(9) == 0  # one point: the same for all rows


def test_seconds_never_fall_with_more_rows() -> None:
    rng = random.Random(1)
    for _ in range(50):
        costs = random_costs(rng)
        for curve in (costs.verify, costs.draft):
            seconds = [curve(n) for n in range(1, 200)]
            assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verify_rows": (2, 4)}, "begin with 1"),
        ({"verify_rows": (1, 1)}, "increase"),
        ({"verify_rows": (1,)}, "as many"),
        ({"verify_seconds": (2.0, 1.0)}, "must not fall"),
        ({"verify_seconds": (0.0, 1.0)}, "more than 0"),
        ({"verify_seconds": (1.0, float("nan"))}, "finite"),
        ({"draft_rows": (), "draft_seconds": ()}, "at least one"),
        ({"draft_seconds": (-1.0,)}, "not negative"),
        ({"overhead": float("inf")}, "overhead"),
        ({"overhead": -0.1}, "overhead"),
    ],
)
def test_impossible_costs_are_refused(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "verify_rows": (1, 2), "verify_seconds": (1.0, 2.0), "draft_rows": (1,), "draft_seconds": (1.0,),
    }  # fmt: skip
    CostModel(**fields)
    with pytest.raises(CostError, match=message):
        CostModel(**fields | change)


def test_json_round_trip() -> None:
    text = json.dumps(CPU.to_dict())
    assert CostModel.from_dict(json.loads(text)) == CPU
    assert CPU.to_dict()["verify"][:2] == [[1, 1.0], [2, 1.05]]


@pytest.mark.parametrize(
    "change",
    [
        {"format": "eagle2-trace"}, {"version": 2}, {"version": None}, {"verify": None}, {"verify": "12"}, {"verify": []},
        {"verify": [[1]]}, {"verify": [[1, "x"]]}, {"verify": [[True, 1.0]]}, {"verify": [[2, 1.0]]}, {"draft": [3]},
        {"overhead": None}, {"overhead": True},
    ],
)  # fmt: skip
def test_damaged_json_is_one_sentence(change: dict[str, Any]) -> None:
    with pytest.raises(CostError, match=r"^[^\n]+$"):
        CostModel.from_dict(CPU.to_dict() | change)
    for data in (None, [], 3, {}):
        with pytest.raises(CostError):
            CostModel.from_dict(data)


def test_the_best_cut_equals_brute_force() -> None:
    rng = random.Random(0)
    for _ in range(300):
        costs = random_costs(rng)
        values = sorted((rng.random() ** 3 for _ in range(rng.randint(0, 40))), reverse=True)
        spent, limit = rng.random(), rng.choice([None, 0, 1, 7, 99])
        rates = [
            (1 + sum(values[:n])) / (spent + costs.verify(1 + n) + costs.overhead)
            for n in range(min(len(values), 99 if limit is None else limit) + 1)
        ]
        n = best_cut(values, spent, costs, limit)
        assert rates[n] == pytest.approx(max(rates), rel=1e-12)
        assert all(rate < rates[n] for rate in rates[:n])


def test_ties_go_to_the_smaller_tree() -> None:
    flat = CostModel((1, 2), (1.0, 1.0), (1,), (0.0,))
    assert best_cut([0.0, 0.0], 0.0, flat) == 0
    assert best_cut([0.5, 0.0], 0.0, flat) == 1
    line = CostModel((1, 2), (1.0, 2.0), (1,), (0.0,))  # a node of value 1 pays for itself exactly
    assert best_cut([1.0, 1.0], 0.0, line) == 0


def test_extreme_costs_keep_everything_or_nothing() -> None:
    values = [0.5**n for n in range(1, 20)]
    assert best_cut(values, 0.0, FREE) == len(values)
    steep = CostModel((1, 2), (1.0, 1e6), (1,), (0.0,))
    assert best_cut(values, 0.0, steep) == 0
    plateau = CostModel((1, 8, 9, 64), (1.0, 1.0, 50.0, 50.0), (1,), (0.0,))
    assert best_cut(values, 0.0, plateau) == 7  # eight rows with the root cost as much as one


def test_another_layer_pays_where_the_predicted_tree_is_faster() -> None:
    rng = random.Random(2)
    for _ in range(200):
        costs = random_costs(rng)
        values = sorted((rng.random() ** 2 for _ in range(rng.randint(1, 12))), reverse=True)
        fed, shares = values[:3], sorted((rng.random() for _ in range(3)), reverse=True)
        spent, fixed = rng.random(), rng.choice([None, 4])
        grown = sorted([*values, *(v * s for v in fed for s in shares)], reverse=True)

        def best(ordered: list[float], seconds: float, costs: CostModel = costs, fixed: int | None = fixed) -> float:
            counts = range(len(ordered) + 1) if fixed is None else [min(fixed, len(ordered))]
            return max((1 + sum(ordered[:n])) / (seconds + costs.verify(1 + n) + costs.overhead) for n in counts)

        expected = best(grown, spent + costs.draft(len(fed))) > best(values, spent)
        assert another_layer_pays(values, fed, shares, spent, costs, fixed=fixed) is expected
    assert another_layer_pays([0.1], [0.1], [0.1], 0.0, FREE)
    assert not another_layer_pays([0.9], [0.9], [1.0], 0.0, DEAR)


# --- whether to draft at all ------------------------------------------------------------------------------------------


def paced(gives: Any, steps: int) -> str:
    """A run in which drafted step i gives ``gives(i)`` tokens in 2 seconds, a plain one 1 token in 1: D and ``.``."""
    pace, marks = Pace(1.0), ""
    for number in range(steps):
        if pace.drafts():
            pace.drafted(gives(number), 2.0)
            marks += "D"
        else:
            marks += "."
    return marks


WARM = "D" * Pace.WARM_UP


def test_drafting_that_pays_never_pauses() -> None:
    assert paced(lambda _: 3, 100) == "D" * 100
    assert paced(lambda _: 2, 100) == "D" * 100  # no loss is no reason


def test_drafting_that_loses_is_probed_after_4_8_16_and_then_every_32_steps() -> None:
    pauses = [len(pause) for pause in paced(lambda _: 1, 215).strip(".").split("D") if pause]
    assert pauses[:7] == [4, 8, 16, 32, 32, 32, 32]
    assert paced(lambda _: 1, 40).startswith(WARM + "....D........D")


def test_a_few_bad_steps_are_no_reason_to_pause() -> None:
    assert paced(lambda number: 1 if number < 8 else 4, 80) == "D" * 80
    assert paced(lambda number: 1 if number % 7 > 3 else 3, 70) == "D" * 70


def test_drafting_comes_back_where_it_begins_to_pay() -> None:
    marks = paced(lambda number: 1 if number < 60 else 9, 200)
    assert marks[:60].count("D") < 22
    assert marks[-60:].endswith("D" * 40)


def test_a_win_makes_the_next_pause_short_again() -> None:
    pace, pauses = Pace(1.0), [0]
    gives = [*[1] * 22, *[9] * 10, *[1] * 200]  # tokens of the drafted steps, one after the other
    for _ in range(400):
        if pace.drafts():
            pace.drafted(gives.pop(0), 2.0)
            pauses.append(0)
        else:
            pauses[-1] += 1
    long = [pause for pause in pauses if pause]
    assert long[:6] == [4, 8, 16, 32, 32, 32]
    assert 4 in long[6:]
    assert long[long.index(4, 6) :][:3] == [4, 8, 16]


# --- the planner ------------------------------------------------------------------------------------------------------


def planner(costs: CostModel, depth: Any = "auto", nodes: Any = "auto", width: int = 3) -> TreePlanner:
    limits = {"depth_limit": 8 if depth == "auto" else depth, "node_limit": 64 if nodes == "auto" else nodes}
    return TreePlanner(costs, width=width, depth=depth, nodes=nodes, **limits)


def grow(plan: TreePlanner, confidences: list[float], depth: int = 8) -> tuple[int, int]:
    """Draft one step in which every node's children have ``confidences``; returns layers and kept nodes."""
    assert plan.begin(1, 64)
    layer, values = [1.0], []
    for number in range(1, depth + 1):
        plan.saw(layer, [confidences] * len(layer))
        newest = sorted((value * share for value in layer for share in confidences), reverse=True)
        values += newest
        layer = newest[: plan.width]
        if number == depth or not plan.goes_on(values, layer):
            return number, plan.cut(values)
    raise AssertionError


def test_free_passes_give_the_largest_tree_and_dear_ones_none() -> None:
    assert grow(planner(FREE), [0.6, 0.2, 0.1]) == (8, 64)
    assert not planner(DEAR).begin(1, 64)
    steep = CostModel((1, 2), (1.0, 9.0), (1,), (0.0,))
    assert not planner(steep).begin(1, 64)  # a pass over two rows costs nine plain ones, and gives two tokens at best


def test_surer_heads_and_cheaper_rows_give_larger_trees() -> None:
    unsure, sure = grow(planner(CPU), [0.3, 0.1, 0.05]), grow(planner(CPU), [0.8, 0.1, 0.05])
    assert unsure[0] < sure[0]
    assert unsure[1] < sure[1]
    steeper = CostModel(CPU.verify_rows, tuple(s**2 for s in CPU.verify_seconds), CPU.draft_rows, CPU.draft_seconds)
    assert grow(planner(steeper), [0.8, 0.1, 0.05])[1] < sure[1]


def test_fixed_sizes_are_kept() -> None:
    assert grow(planner(CPU, depth=5), [0.3, 0.1, 0.05], depth=5)[0] == 5
    assert grow(planner(CPU, nodes=11), [0.8, 0.1, 0.05])[1] == 11
    assert planner(DEAR, depth=2).begin(1, 64)  # a fixed depth is always drafted


def test_child_confidences_are_what_the_values_weigh() -> None:
    plan = planner(CPU, width=2)
    for _ in range(400):
        plan.saw([1.0], [[0.6, 0.2]])
        plan.saw([0.3, 0.1], [[0.4, 0.1], [0.8, 0.5]])
    # The last two passes; all pairs of passes before them weigh alike.
    assert plan.child_confidences[0] == pytest.approx((0.6 * plan.FADE + 0.3 * 0.4 + 0.1 * 0.8) / (plan.FADE + 0.4))
    assert 0.2 < plan.child_confidences[1] < 0.5


def test_rows_left_over_from_skipped_steps_do_not_make_drafting_look_dear() -> None:
    costs = CostModel((1, 64), (1.0, 2.0), (1, 2), (0.1, 0.2))
    trees = []
    for pending in (9, 40, 4000):
        plan = planner(costs)
        plan.begin(pending, 64)
        plan.saw([1.0], [[0.5, 0.2, 0.1]])
        trees.append(plan.cut([0.5, 0.2, 0.1]))
    assert len(set(trees)) == 1


def test_a_run_of_losing_steps_is_paused_and_only_drafted_steps_count() -> None:
    plan = planner(CPU)
    marks = ""
    for _ in range(Pace.WARM_UP + 30):
        drafts = plan.begin(1, 64)
        marks += "D" if drafts else "."
        if drafts:
            plan.saw([1.0], [[0.6, 0.2, 0.1]])
            plan.cut([0.6, 0.2, 0.1])
        plan.observe(1)
    assert marks.startswith(WARM + "....D........D")
