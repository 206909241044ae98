"""Verification: tables, exactness by chi-square, and a broken verifier that fails the same test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from eagle2.tree import DraftTree
from eagle2.verify import NonFiniteLogitsError, SamplingParams, Verdict, check_finite, target_probs, verify

VOCAB = 6


def tree(tokens: list[int], parents: tuple[int, ...], values: list[float] | None = None, **more: Any) -> DraftTree:
    n = len(tokens)
    log_value = torch.tensor(values).log() if values else -torch.arange(n).float()
    return DraftTree(torch.tensor(tokens), parents, torch.full((n,), 0.5), log_value, **more)


def choose(*best: int) -> Tensor:
    """Logits whose argmax after row i is ``best[i]``."""
    logits = torch.zeros(len(best), VOCAB)
    logits[torch.arange(len(best)), torch.tensor(best)] = 5
    return logits


# draft tokens (root first), parents, target's choice after each row -> accepted rows, next token, kind
TABLE = [
    ([0], (-1,), [4], (), 4, "bonus"),
    ([0, 1], (-1, 0), [1, 2], (1,), 2, "bonus"),
    ([0, 1], (-1, 0), [3, 2], (), 3, "correction"),
    ([0, 1, 2, 3], (-1, 0, 1, 2), [1, 2, 5, 4], (1, 2), 5, "correction"),
    ([0, 1, 2, 3], (-1, 0, 1, 2), [1, 2, 3, 4], (1, 2, 3), 4, "bonus"),
    ([0, 1, 2, 3, 4], (-1, 0, 0, 1, 2), [2, 5, 4, 0, 1], (2, 4), 1, "bonus"),
    # The target's path is in the tree, but under the other parent.
    ([0, 1, 2, 3], (-1, 0, 0, 1), [2, 0, 3, 0], (2,), 3, "bonus"),
]


@pytest.mark.parametrize(("tokens", "parents", "best", "accepted", "following", "kind"), TABLE)
def test_greedy_table(
    tokens: list[int], parents: tuple[int, ...], best: list[int], accepted: tuple[int, ...], following: int, kind: str
) -> None:
    verdict = verify(tree(tokens, parents), choose(*best), SamplingParams())
    assert (verdict.accepted, verdict.next_token, verdict.kind) == (accepted, following, kind)
    assert verdict.rows == (0, *accepted)
    taken = [d.node for d in verdict.decisions if d.accepted]
    assert taken == list(accepted)


@pytest.mark.parametrize("temperature", [0.05, 0.1])
def test_low_temperature_sampling_accepts_the_whole_path(temperature: float) -> None:
    """Full acceptance, and a rejected token whose probability is 1 up to rounding (EAGLE #50)."""
    chain = tree([0, 1, 2, 3], (-1, 0, 1, 2))
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        verdict = verify(chain, choose(1, 2, 3, 4) * 10, SamplingParams(temperature), generator)
        assert (verdict.accepted, verdict.next_token, verdict.kind) == ((1, 2, 3), 4, "bonus")


def test_certain_token_is_never_rejected_even_by_the_largest_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor(1 - 2**-24))
    logits = torch.full((2, VOCAB), -1e4)
    logits[0, 1] = logits[1, 2] = 1e4
    verdict = verify(tree([0, 1], (-1, 0)), logits, SamplingParams(1.0), torch.Generator().manual_seed(0))
    assert verdict.accepted == (1,)


def test_children_are_tried_in_order_of_value() -> None:
    flat = tree([0, 1, 2, 3], (-1, 0, 0, 0), [1, 0.2, 0.5, 0.3])
    verdict = verify(flat, torch.full((4, VOCAB), -1e4).index_fill(1, torch.tensor([5]), 0.0), SamplingParams(1.0))
    assert [d.node for d in verdict.decisions] == [2, 3, 1]
    assert (verdict.next_token, verdict.kind) == (5, "correction")


def test_processing_order_is_hugging_faces() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)])
    expected = theirs(None, logits.clone()).softmax(-1)
    assert torch.equal(target_probs(logits, SamplingParams(0.7, 12, 0.8)), expected)


def test_probabilities_are_float32_in_half_precision() -> None:
    probs = target_probs(torch.randn(3, 5000, dtype=torch.float16), SamplingParams(0.5, top_p=0.9))
    assert probs.dtype == torch.float32
    assert torch.allclose(probs.sum(-1), torch.ones(3))


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}]
)
def test_bad_sampling_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        SamplingParams(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_logits_name_the_step(value: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = value
    with pytest.raises(NonFiniteLogitsError, match="step 17"):
        check_finite(logits, "target", 17)
    check_finite(torch.zeros(2, VOCAB).index_fill(1, torch.tensor([0]), -float("inf")), "target", 1)


# --- exactness: the first two tokens that come out must have the target's distribution -------------------------------

LOGITS = {
    path: torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash_)) * 1.5
    for hash_, path in enumerate(
        [(), *((t,) for t in range(VOCAB)), *((t, u) for t in range(VOCAB) for u in range(VOCAB))]
    )
}
Verifier = Callable[[DraftTree, Tensor, SamplingParams, torch.Generator], Verdict]


def path_of(draft: DraftTree, node: int) -> tuple[int, ...]:
    tokens: list[int] = []
    while node:
        tokens.insert(0, int(draft.token_ids[node]))
        node = draft.parents[node]
    return tuple(tokens)


def deterministic_tree(_: torch.Generator) -> DraftTree:
    return tree([0, 3, 1, 2, 5, 4], (-1, 0, 0, 1, 1, 2), [1, 0.5, 0.3, 0.2, 0.1, 0.05])


def shallow_tree(_: torch.Generator) -> DraftTree:
    """One layer: the second token is the bonus token whenever a draft was accepted."""
    return tree([0, 3, 1, 2], (-1, 0, 0, 0), [1, 0.5, 0.3, 0.2])


def drawn_tree(generator: torch.Generator) -> DraftTree:
    """Two children of the root and one of each, drawn with replacement from a draft distribution of its own."""
    draft_probs = torch.tensor([[0.3, 0.3, 0.1, 0.1, 0.1, 0.1]]).repeat(5, 1)
    draw = torch.multinomial(draft_probs[0], 4, replacement=True, generator=generator).tolist()
    return tree([0, *draw], (-1, 0, 0, 1, 2), draft_probs=draft_probs)


def two_tokens(
    make: Callable[[torch.Generator], DraftTree], check: Verifier, n: int, sampling: SamplingParams
) -> Tensor:
    """Counts ``[V * V]`` of the first two output tokens over ``n`` runs."""
    generator = torch.Generator().manual_seed(20240624)
    counts = torch.zeros(VOCAB * VOCAB)
    for _ in range(n):
        made: tuple[int, ...] = ()
        while len(made) < 2:
            draft = make(generator)
            rows = [(*made, *path_of(draft, node))[:2] for node in range(len(draft))]
            verdict = check(draft, torch.stack([LOGITS[row] for row in rows]), sampling, generator)
            made += (*(int(draft.token_ids[node]) for node in verdict.accepted), verdict.next_token)
        counts[made[0] * VOCAB + made[1]] += 1
    return counts


def chi_square(counts: Tensor, sampling: SamplingParams, least: float = 0) -> tuple[float, int]:
    """Statistic against the exact distribution of two tokens, and its degrees of freedom.

    Pairs that are expected fewer than ``least`` times count as one.
    """
    first = target_probs(LOGITS[()], sampling)
    expected = (
        torch.cat([first[t] * target_probs(LOGITS[(t,)], sampling) for t in range(VOCAB)]).double() * counts.sum()
    )
    assert float(counts[expected == 0].sum()) == 0, "a token came out that the filters exclude"
    rare = expected < least
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    possible = expected > 0
    return float(((counts - expected) ** 2 / expected)[possible].sum()), int(possible.sum()) - 1


def limit(degrees: int) -> float:
    """Upper 0.1 % point of chi-square (Wilson-Hilferty)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.0902 * spread**0.5) ** 3)


SAMPLINGS = [SamplingParams(1.0), SamplingParams(0.6, top_k=4), SamplingParams(1.3, top_p=0.85)]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("make", [deterministic_tree, shallow_tree, drawn_tree])
def test_sampling_leaves_the_targets_distribution(make: Any, sampling: SamplingParams) -> None:
    statistic, degrees = chi_square(two_tokens(make, verify, 2500, sampling), sampling)
    assert statistic < limit(degrees)


def no_residual(draft: DraftTree, logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> Verdict:
    """Broken on purpose: after a rejection it draws from the full distribution, not from what is left."""
    verdict = verify(draft, logits, sampling, generator)
    if verdict.kind == "correction":
        at = verdict.accepted[-1] if verdict.accepted else 0
        token = int(torch.multinomial(target_probs(logits[at], sampling), 1, generator=generator))
        return Verdict(verdict.accepted, token, verdict.kind, verdict.decisions)
    return verdict


def cold_bonus(draft: DraftTree, logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> Verdict:
    """Broken on purpose: the bonus token forgets the temperature (EAGLE PR 215)."""
    verdict = verify(draft, logits, sampling, generator)
    if verdict.kind == "bonus":
        token = int(logits[verdict.accepted[-1] if verdict.accepted else 0].argmax())
        return Verdict(verdict.accepted, token, verdict.kind, verdict.decisions)
    return verdict


@pytest.mark.parametrize("broken", [no_residual, cold_bonus])
def test_a_broken_verifier_fails_the_same_test(broken: Verifier) -> None:
    statistic, degrees = chi_square(two_tokens(shallow_tree, broken, 2500, SAMPLINGS[0]), SAMPLINGS[0])
    assert statistic > 2 * limit(degrees)
