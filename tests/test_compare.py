"""Static against dynamic: what two runs share and did, compared literally on a pair made by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle2.trace import Decision, StepTrace, Trace
from visual import compare, player

ROOT = Path(__file__).parents[1]
WORDS = [
    "The",
    " old",
    " lamp",
    " <b>lit</b>",
    " the",
    "\n",
    " sea",
    "${1+1}",
    ".",
    " fog",
    '<img src=x onerror="alert(1)">',
]
Node = tuple[int, int, float]  # parent, token, confidence


def step(
    root: int,
    nodes: Sequence[Node],
    accepted: Sequence[int],
    own: int,
    cut: Sequence[int] = (),
    emitted: int | None = None,
) -> StepTrace:
    """One step from its drafted nodes, numbered from 1."""
    values = [0.0]
    for parent, _, confidence in nodes:
        values.append(values[parent] + math.log(confidence))
    kept = tuple(i for i in range(1, len(nodes) + 1) if i not in cut)
    path = [0, *accepted]
    leaf = not any(nodes[i - 1][0] == path[-1] for i in kept)
    return StepTrace(
        token_ids=(root, *(token for _, token, _ in nodes)), parents=(-1, *(parent for parent, _, _ in nodes)),
        confidence=(1.0, *(confidence for _, _, confidence in nodes)), log_value=tuple(values), selected=(), kept=kept,
        target_probs=tuple(0.9 if i in path else 0.05 for i in kept), target_ranks=tuple(int(i not in path) for i in kept),
        choice_ids=(own,) * (len(kept) + 1), choice_probs=(0.5,) * (len(kept) + 1), accepted=tuple(accepted), next_id=own,
        next_kind="bonus" if leaf else "correction",
        decisions=tuple(Decision(i, float(i in path), None, i in path) for i in kept if nodes[i - 1][0] in path),
        emitted=len(path) if emitted is None else emitted, draft_seconds=0.01, verify_seconds=0.03, commit_seconds=0.001,
    )  # fmt: skip


def run(kind: str, steps: Sequence[StepTrace], prompt: str = "10+2 <i>=</i> ${1+1}") -> Trace:
    output = (0, *itertools.chain.from_iterable(item.emitted_ids for item in steps))
    return Trace(
        metadata={
            "target": "made-up", "head": "made-up head", "dtype": "float32", "device": "cpu", "threads": 2, "seed": 0,
            "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
            "tree": {"kind": kind, "depth": 2, "top_k": 2, "total_tokens": 3}, "versions": {}, "clock": "measured",
            "created": "2026-11-30T12:00:00Z",
        },
        prompt_text=prompt, prompt_ids=(1, 2, 3), prompt_pieces=("…",) * 3, output_ids=output,
        output_pieces=tuple(WORDS[i] for i in output), finish_reason="length", prefill_seconds=0.1, steps=tuple(steps),
        vocabulary=dict(enumerate(WORDS)),
    )  # fmt: skip


SAME: list[Node] = [(0, 4, 0.8), (0, 9, 0.1), (1, 10, 0.5)]


def hand_made() -> tuple[Trace, Trace]:
    """A dynamic and a static run of the output 0 … 7; both start a step after 1, 4 and 6 tokens."""
    dynamic = run(
        "dynamic",
        [
            step(0, [(0, 1, 0.5), (0, 9, 0.25), (1, 2, 0.5), (1, 10, 0.2), (3, 4, 0.4)], [1, 3], 3, cut=(2, 4)),
            step(3, SAME, [1], 5),
            step(5, [(0, 6, 0.9), (1, 7, 0.9), (2, 8, 0.1)], [1, 2, 3], 9, emitted=2),
        ],
    )
    static = run(
        "static",
        [
            step(0, [(0, 1, 0.5), (0, 9, 0.25), (1, 10, 0.2)], [1], 2),
            step(2, [(0, 4, 0.4), (0, 9, 0.3), (1, 5, 0.5)], [], 3),
            step(3, [SAME[0], SAME[1], SAME[2]], [1], 5),
            step(5, [(0, 6, 0.9), (0, 9, 0.05), (1, 8, 0.1)], [1], 7),
        ],
    )
    return dynamic, static


def rounded(side: compare.SideInfo) -> compare.SideInfo:
    return side._replace(expected=round(side.expected, 6))


def test_info_of_a_pair_made_by_hand() -> None:
    info = compare.info(*hand_made())
    side = compare.SideInfo
    assert [c._replace(dynamic=rounded(c.dynamic), static=rounded(c.static)) for c in info.contexts] == [
        compare.ContextInfo(1, side(0, (1, 1, 1), 2, 3, 0.85), side(0, (2, 1), 1, 2, 0.85), False),
        compare.ContextInfo(4, side(1, (2, 1), 1, 2, 1.3), side(2, (2, 1), 1, 2, 1.3), True),
        compare.ContextInfo(6, side(2, (1, 1, 1), 3, 2, 1.791), side(3, (2, 1), 1, 2, 1.04), False),
    ]
    assert info.dynamic == compare.RunInfo(8, 3, 7 / 3, 5 / 9, 5 / 3, 3.0, 11 / 3, (1, 2), 2)
    assert info.static == compare.RunInfo(8, 4, 7 / 4, 3 / 12, 3 / 4, 3.0, 3.0, (2, 2), 1)
    assert [context.dynamic.nodes for context in info.contexts] == [3, 3, 3]


def test_what_is_said_of_it() -> None:
    info = compare.info(*hand_made())
    assert [compare.sentence(context) for context in info.contexts] == [
        "Same context, 3 nodes each: the static tree's path got 1 drafted token, the dynamic tree's 2."
        " Right after the root the static tree has 2 nodes, the dynamic tree 1.",
        "Same context, 3 nodes each: both trees are equal, and the path got 1 drafted token.",
        "Same context, 3 nodes each: the static tree's path got 1 drafted token, the dynamic tree's 3."
        " Right after the root the static tree has 2 nodes, the dynamic tree 1.",
    ]
    assert compare.line(info.contexts[0].static) == (
        "3 nodes for the target, 1 accepted, 2 tokens gained; sum of values 0.85 (what the head expects to be accepted)."
        " Nodes per layer, from the root on: 2, 1."
    )
    assert "3 accepted, 2 tokens gained (the output ends there); sum of values 1.79" in compare.line(
        info.contexts[2].dynamic
    )
    assert compare.rows(info) == (
        ("τ, tokens per target pass", "1.75", "2.33"),
        ("steps (target passes)", "4", "3"),
        ("tokens of the output", "8", "8"),
        ("drafted tokens accepted per step", "0.75", "1.67"),
        ("acceptance rate (accepted / nodes for the target)", "25.0 %", "55.6 %"),
        ("nodes for the target per step", "3.0", "3.0"),
        ("nodes drafted per step", "3.0", "3.7"),
        ("nodes right after the root", "2", "1 to 2"),
        ("different shapes of the tree", "1", "2"),
    )


def test_sentences_of_other_budgets_and_equal_paths() -> None:
    side = compare.SideInfo
    one = compare.ContextInfo(1, side(0, (2, 2), 1, 2, 1.0), side(0, (2, 1), 1, 2, 1.0), False)
    assert compare.sentence(one) == (
        "Same context, 3 nodes in the static tree and 4 in the dynamic tree: both trees' paths got 1 drafted token."
        " Right after the root both trees have 2 nodes."
    )
    bare = compare.ContextInfo(1, side(0, (), 0, 1, 0.0), side(0, (), 0, 1, 0.0), True)
    assert (
        compare.sentence(bare) == "Same context, 0 nodes each: both trees are equal, and the path got 0 drafted tokens."
    )
    assert compare.line(bare.static) == (
        "0 nodes for the target, 0 accepted, 1 token gained; sum of values 0.00 (what the head expects to be accepted)."
    )


def test_only_equal_outputs_make_a_shared_context() -> None:
    dynamic, static = hand_made()
    # A static run that goes another way at its third token shares the first context only.
    other = run("static", [static.steps[0], step(2, [(0, 4, 0.4)], [], 9), step(9, [(0, 4, 0.4)], [], 5)])
    assert [context.position for context in compare.info(dynamic, other).contexts] == [1]
    first = dataclasses.replace(other, output_ids=(), output_pieces=(), steps=())
    assert compare.info(dynamic, first).contexts == ()
    empty = compare.info(first, first)
    assert empty.static == compare.RunInfo(0, 0, 0.0, None, 0.0, 0.0, 0.0, (0, 0), 0)
    assert ("acceptance rate (accepted / nodes for the target)", "–", "–") in compare.rows(empty)


def test_shapes_do_not_depend_on_the_order_of_children() -> None:
    left = step(0, [(0, 1, 0.5), (0, 9, 0.4), (1, 2, 0.5)], [], 3)
    right = step(3, [(0, 1, 0.5), (0, 9, 0.4), (2, 2, 0.5)], [], 4)
    chain = step(4, [(0, 1, 0.5), (1, 9, 0.4), (2, 2, 0.5)], [], 5)
    assert compare.info(run("a", [left, right]), run("b", [left, right])).static.shapes == 1
    assert compare.info(run("a", [left, right, chain]), run("b", [left])).dynamic.shapes == 2


def test_runs_of_two_prompts_cannot_be_compared() -> None:
    dynamic, static = hand_made()
    with pytest.raises(ValueError, match=r"^The two runs have different prompts, so their trees cannot be compared\.$"):
        compare.info(dynamic, dataclasses.replace(static, prompt_ids=(1, 2, 4)))
    with pytest.raises(ValueError, match="different prompts"):
        compare.message(
            [compare.Pair("x", dynamic, dataclasses.replace(static, prompt_ids=(9,), prompt_pieces=("",)))],
            player.payload,
        )


def test_message_carries_both_runs_and_what_is_said_of_them() -> None:
    dynamic, static = hand_made()
    data = compare.message([compare.Pair("10+2\u202e", dynamic, static, "the root")], player.payload)
    assert (data["kind"], data["opened"]) == ("compare", 0)
    (pair,) = data["pairs"]
    assert (pair["title"], pair["look"]) == ("10+2⟨202E⟩", "the root")
    assert pair["prompt"] == "10+2 <i>=</i> ${1+1}"
    assert pair["dynamic"] == player.payload(dynamic)
    assert pair["static"] == player.payload(static)
    info = compare.info(dynamic, static)
    assert [(c["position"], c["dynamic"]["step"], c["static"]["step"]) for c in pair["contexts"]] == [
        (1, 0, 0), (4, 1, 2), (6, 2, 3),
    ]  # fmt: skip
    assert [c["say"] for c in pair["contexts"]] == [compare.sentence(c) for c in info.contexts]
    assert pair["contexts"][1]["static"]["say"] == compare.line(info.contexts[1].static)
    assert pair["rows"] == [list(row) for row in compare.rows(info)]
    assert json.loads(player.to_json(data)) == data
    assert compare.message([], player.payload, opened=3) == {"kind": "compare", "opened": 3, "pairs": []}


def test_the_recorded_pairs_share_their_first_context() -> None:
    for name in ("sum-open", "sum-asked"):
        dynamic, static = (Trace.load(ROOT / f"assets/traces/{name}{end}.json.gz") for end in ("", "-static"))
        info = compare.info(dynamic, static)
        assert info.contexts[0].position == 1
        assert info.static.shapes == 1
        assert info.dynamic.shapes > 1
        assert {c.static.nodes for c in info.contexts} == {c.dynamic.nodes for c in info.contexts} == {25}


def test_script_is_valid_and_writes_no_data_as_html() -> None:
    text = (ROOT / "visual" / "compare.js").read_text(encoding="utf-8")
    for line in text.splitlines():
        if "innerHTML" in line or "insertAdjacent" in line or "document.write" in line:
            assert "constant drawings below, no data" in line
    assert "${" not in compare.HTML_TEMPLATE + compare.JS_ON_LOAD
    node: Any = shutil.which("node")
    if node:
        subprocess.run([node, "--check", str(ROOT / "visual" / "compare.js")], check=True)
