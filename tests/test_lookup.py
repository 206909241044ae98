"""Prompt lookup: what is copied, and that the output does not depend on it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from eagle2.cost import CostModel
from eagle2.eagle import UNSEEN, EagleDrafter, TreeSettings, graft
from eagle2.engine import Settings
from eagle2.generate import Prefill, Stops, generate
from eagle2.lookup import CONFIDENCE, MAX_DRAFT, MIN_VALUE, PromptLookup
from eagle2.target import Target
from eagle2.verify import SamplingParams
from tests.tiny import reference, tiny_head, tiny_model

LONGEST = len(CONFIDENCE)


def draft(text: list[int], root: int, depth: int = 64, nodes: int = 64, **more: Any) -> list[int]:
    drafter = PromptLookup(**more)
    drafter.observe(text, None)
    return drafter.propose(root, depth, nodes).verified.token_ids.tolist()[1:]


def by_search(text: list[int]) -> list[int]:
    """The definition, without an index: longest match first, its latest place, copied on into itself."""
    for size in range(LONGEST, 0, -1):
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                longer, value = list(text), 1.0
                for count in range(MAX_DRAFT):
                    value *= CONFIDENCE[min(size + count, LONGEST) - 1]
                    if value < MIN_VALUE:
                        break
                    longer.append(longer[start + size + count])
                return longer[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "root", "expected"),
    [
        ([1, 2, 3, 4], 9, []),  # nothing like it before
        ([], 9, []),
        ([7, 1, 2, 3, 4, 5, 6, 8, 1, 2], 3, [4, 5, 6, 8, 1, 2, 3, 4, 5, 6]),  # three tokens match: a long copy
        ([5, 1, 2, 6, 9, 2, 7, 8, 1], 2, [6, 9, 2, 7, 8, 1, 2, 6, 9]),  # two tokens win over the later match of one
        ([1, 5, 1, 6, 8], 1, [6, 8]),  # of two places the latest, and little of it: one token matches
        ([4, 4, 4, 4], 4, [4] * 10),  # a copy of itself
    ],
)
def test_what_is_copied(text: list[int], root: int, expected: list[int]) -> None:
    assert draft(text, root) == expected
    assert by_search([*text, root]) == expected


def test_the_index_finds_what_a_search_finds() -> None:
    rng = random.Random(3)
    found = 0
    for _ in range(60):
        drafter = PromptLookup()
        text: list[int] = []
        for _ in range(12):  # the text comes in portions, as steps commit it
            new = [rng.randrange(6) for _ in range(rng.randrange(1, 5))]
            drafter.observe(new, None)
            text += new
            root = rng.randrange(6)
            got = drafter.propose(root, 64, 64).verified.token_ids.tolist()[1:]
            assert got == by_search([*text, root])
            found += bool(got)
    assert found > 600


def test_limits_and_values() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    assert draft(text, 3, depth=0) == draft(text, 3, nodes=0) == []
    assert draft(text, 3, depth=2) == draft(text, 3, nodes=2) == draft(text, 3, draft_tokens=2) == [4, 5]
    drafter = PromptLookup()
    drafter.observe(text, None)
    proposal = drafter.propose(3, 3, 10)
    tree = proposal.expanded
    assert tree.parents == (-1, 0, 1, 2)
    assert proposal.kept == (1, 2, 3)
    assert tree.draft_probs is None
    torch.testing.assert_close(tree.confidence, torch.tensor([1.0, CONFIDENCE[2], CONFIDENCE[3], CONFIDENCE[3]]))
    torch.testing.assert_close(tree.log_value, tree.confidence.log().cumsum(0))
    drafter.reset(0)
    assert len(drafter.propose(3, 3, 10).expanded) == 1
    with pytest.raises(ValueError, match="draft_tokens must be at least 1"):
        PromptLookup(draft_tokens=0)


@pytest.mark.parametrize("eos", [False, True])
def test_greedy_ids_equal_hugging_faces(eos: bool) -> None:
    # A random model with few tokens comes back to what it has said, so copies are right now and then.
    model = tiny_model(vocab_size=14, eos_token_id=None)
    accepted = 0
    for prompt in ([5, 9, 4, 3, 8, 2, 5, 9], [1, 7], [6] * 9, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]):
        expected = reference(model, prompt, 40, eos_token_id=None)
        stops = Stops(40)
        if eos:
            stops = Stops(40, frozenset([expected[17]]))
            expected = expected[: expected.index(expected[17]) + 1]
        items = list(generate(Target(model), PromptLookup(), prompt, sampling=SamplingParams(), stops=stops))
        assert [t for item in items for t in ((item.token,) if isinstance(item, Prefill) else item.emitted)] == expected
        accepted += sum(len(item.verdict.accepted) for item in items if not isinstance(item, Prefill))
    assert accepted > 8


def test_sampled_text_has_the_targets_distribution() -> None:
    """The second token of many runs against the exact distribution, as with the other drafters."""
    model = tiny_model(vocab_size=12)
    prompt = [5, 9, 4, 5, 1, 9, 2, 4, 7, 3, 8, 0, 6, 11, 10, 9]  # each token has a follower, so each root gets a draft
    with torch.inference_mode():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
        exact = sum(first[t] * model(torch.tensor([[*prompt, t]])).logits[0, -1].softmax(-1) for t in range(12))
    generator = torch.Generator().manual_seed(11)
    counts, accepted, runs = torch.zeros(12), 0, 1000
    target = Target(model)
    for _ in range(runs):
        prefill, step, *_ = generate(
            target, PromptLookup(), prompt, sampling=SamplingParams(1.0), stops=Stops(3), generator=generator
        )
        assert isinstance(prefill, Prefill)
        assert not isinstance(step, Prefill)
        assert step.proposal.kept
        counts[step.emitted[0]] += 1
        accepted += bool(step.verdict.accepted)
    assert accepted > 20
    big = exact * runs > 5
    assert float((((counts - exact * runs) ** 2) / (exact * runs))[big].sum()) < 35  # 0.1 % point at 11 degrees: 31.3


# --- copies in EAGLE's tree -------------------------------------------------------------------------------------------


def pool() -> tuple[list[int], list[int], list[float], list[float]]:
    """Root 1 with children 5 and 6; 5 with children 7 and 8: values .6, .3, .3, .12."""
    confidence = [1.0, 0.6, 0.3, 0.5, 0.2]
    logs = [0.0, math.log(0.6), math.log(0.3), math.log(0.3), math.log(0.12)]
    return [1, 5, 6, 7, 8], [-1, 0, 0, 1, 1], confidence, logs


def grafted(copy: list[tuple[int, float]]) -> tuple[tuple[int, ...], list[int], list[int], list[float], list[float]]:
    tokens, parents, confidence, logs = pool()
    copied = graft(copy, tokens, parents, confidence, logs)
    assert all(logs[node] <= logs[parent] for node, parent in enumerate(parents) if node), "no child above its parent"
    return copied, tokens, parents, confidence, [math.exp(value) for value in logs]


def test_a_copy_that_agrees_with_the_head_raises_its_subtree() -> None:
    copied, tokens, parents, confidence, values = grafted([(5, 0.8), (7, 0.9), (9, 0.9)])
    assert (copied, tokens, parents) == ((1, 3, 5), [1, 5, 6, 7, 8, 9], [-1, 0, 0, 1, 1, 3])
    assert confidence == [1.0, 0.8, 0.3, 0.9, 0.2, 0.9]
    assert values == pytest.approx([1, 0.8, 0.3, 0.72, 0.16, 0.648])


def test_where_the_head_is_surer_nothing_changes_but_the_copy_goes_on_there() -> None:
    copied, tokens, parents, confidence, values = grafted([(5, 0.4), (9, 0.6)])
    assert (copied, tokens[5], parents[5]) == ((5,), 9, 1)
    assert confidence[:5] == pool()[2]
    assert values[5] == pytest.approx(0.6 * 0.6 * UNSEEN)  # the head has other children there


def test_a_copy_that_the_head_does_not_have_counts_less_where_the_head_has_spoken() -> None:
    copied, tokens, parents, confidence, values = grafted([(4, 0.8), (3, 0.9)])
    assert (copied, tokens[5:], parents[5:]) == ((5, 6), [4, 3], [0, 5])
    assert confidence[5:] == [0.8 * UNSEEN, 0.9]
    assert values[6] == pytest.approx(0.8 * UNSEEN * 0.9)
    assert grafted([])[0] == ()


REPEATING = [5, 9, 12, 30, 7, 44] * 4


@pytest.mark.parametrize(
    "settings", [TreeSettings("dynamic", 2, 2, 4, True), TreeSettings("dynamic", "auto", 2, "auto", True)]
)
def test_copies_are_verified_and_the_output_stays_the_targets_own(settings: TreeSettings) -> None:
    model = tiny_model()
    target = Target(model)
    costs = CostModel((1, 64), (1.0, 1.5), (1, 64), (0.1, 0.2))
    drafter = EagleDrafter(tiny_head(model), target, settings, costs=costs)
    steps = list(generate(target, drafter, REPEATING, sampling=SamplingParams(), stops=Stops(24), max_nodes=64))
    drafted = [item for item in steps if not isinstance(item, Prefill)]
    assert any(set(step.proposal.kept) & set(step.proposal.copied) for step in drafted)
    assert any(max(step.proposal.expanded.depths) > 2 for step in drafted), "a copy may be deeper than the head drafts"
    ids = [token for item in steps for token in ((item.token,) if isinstance(item, Prefill) else item.emitted)]
    assert ids == reference(model, REPEATING, 24)


def test_where_the_head_does_not_pay_copies_still_may() -> None:
    model = tiny_model()
    target = Target(model)
    dear = CostModel((1, 64), (1.0, 1.5), (1,), (100.0,))
    drafter = EagleDrafter(tiny_head(model), target, TreeSettings("dynamic", "auto", 2, "auto", True), costs=dear)
    drafter.reset(64)
    hidden = target.prefill(REPEATING, 64).hidden
    drafter.observe(REPEATING, hidden)
    proposal = drafter.propose(5, 20, 20)
    assert proposal.selected == ()
    assert proposal.verified.token_ids.tolist()[:5] == [5, 9, 12, 30, 7]
    assert proposal.kept == proposal.copied[: len(proposal.kept)]
    assert len(drafter.propose(77, 20, 20).expanded) == 1  # nothing to copy


def test_settings_copy_in_automatic_trees_unless_told_otherwise() -> None:
    assert not Settings().tree_settings.lookup
    assert Settings(lookup=True).tree_settings.lookup
    assert Settings(depth="auto").tree_settings.lookup
    assert not Settings(depth="auto", lookup=False).tree_settings.lookup
    assert Settings(depth="auto").describe()["tree"]["lookup"] is True
