"""Draft trees and the reranking phase."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle2.tree import DraftTree, rerank

#        0
#      /   \
#     1     2
#    / \     \
#   3   4     5
#       |
#       6
SEVEN = DraftTree(
    token_ids=torch.tensor([7, 1, 2, 3, 4, 5, 6]),
    parents=(-1, 0, 0, 1, 1, 2, 4),
    confidence=torch.tensor([1, 0.6, 0.3, 0.5, 0.4, 0.9, 0.8]),
    log_value=torch.tensor([1, 0.6, 0.3, 0.3, 0.24, 0.27, 0.192]).log(),
)


def test_seven_node_tree() -> None:
    assert SEVEN.depths == (0, 1, 1, 2, 2, 2, 3)
    assert SEVEN.children() == [[1, 2], [3, 4], [5], [], [6], [], []]
    assert SEVEN.ancestor_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 0, 1],
    ]  # fmt: skip


def test_select_keeps_order_and_renumbers_parents() -> None:
    kept = SEVEN.select([1, 2, 4, 6])
    assert kept.token_ids.tolist() == [7, 1, 2, 4, 6]
    assert kept.parents == (-1, 0, 0, 1, 3)
    assert kept.depths == (0, 1, 1, 2, 3)


@pytest.mark.parametrize("kept", [[3], [1, 3, 3], [6, 4, 1], [1, 6]])
def test_select_refuses_nodes_without_their_parent(kept: list[int]) -> None:
    with pytest.raises(ValueError, match="without its parent"):
        SEVEN.select(kept)


@pytest.mark.parametrize(
    ("parents", "length"), [((), 0), ((0,), 1), ((-1, 1), 2), ((-1, -1), 2), ((-1, 0, 5), 3), ((-1, 0), 3)]
)
def test_a_malformed_tree_is_refused(parents: tuple[int, ...], length: int) -> None:
    with pytest.raises(ValueError, match=r"root|parent|shape"):
        DraftTree(torch.zeros(length, dtype=torch.long), parents, torch.ones(length), torch.zeros(length))


def test_rerank_takes_the_highest_values_and_breaks_ties_towards_the_root() -> None:
    # Nodes 2 and 3 tie at 0.3 (in float32 as well): the shallower one wins.
    assert rerank(SEVEN.log_value, SEVEN.depths, 2) == (1, 2)
    assert rerank(SEVEN.log_value, SEVEN.depths, 4) == (1, 2, 3, 5)
    assert rerank(SEVEN.log_value, SEVEN.depths, 100) == (1, 2, 3, 4, 5, 6)
    assert rerank(SEVEN.log_value, SEVEN.depths, 0) == ()


def test_rerank_refuses_half_precision() -> None:
    with pytest.raises(ValueError, match="float32"):
        rerank(SEVEN.log_value.half(), SEVEN.depths, 3)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    peak=st.sampled_from([0.1, 1.0, 10.0, 100.0, 1000.0]),
    top_k=st.integers(1, 6),
    depth=st.integers(1, 5),
    count=st.integers(0, 80),
)
def test_kept_nodes_are_always_connected(
    seed: int, dtype: torch.dtype, peak: float, top_k: int, depth: int, count: int
) -> None:
    """Peaked logits in half precision give confidences of exactly 1 and ties everywhere (SGLang #7477)."""
    generator = torch.Generator().manual_seed(seed)
    tokens, parents, confidence, log_value = [0], [-1], [1.0], [0.0]
    layer = [0]
    for _ in range(depth):
        grown = []
        for node in layer:
            logits = (torch.randn(12, generator=generator) * peak).to(dtype)
            top = logits.float().log_softmax(-1).topk(top_k)
            for token, log_prob in zip(top.indices.tolist(), top.values.tolist()):
                grown.append(len(tokens))
                tokens.append(token)
                parents.append(node)
                confidence.append(min(float(torch.tensor(log_prob).exp()), 1.0))
                log_value.append(log_value[node] + min(log_prob, 0.0))
        layer = sorted(grown, key=lambda node: -log_value[node])[:top_k]
    tree = DraftTree(torch.tensor(tokens), tuple(parents), torch.tensor(confidence), torch.tensor(log_value))
    kept = rerank(tree.log_value, tree.depths, count)
    assert len(kept) == min(count, len(tree) - 1)
    chosen = tree.select(kept)  # raises where a parent is missing
    assert sorted(set(range(1, len(tree))) - set(kept)) == [n for n in range(1, len(tree)) if n not in kept]
    if kept and len(kept) < len(tree) - 1:
        cut = max(float(tree.log_value[n]) for n in range(1, len(tree)) if n not in kept)
        assert float(chosen.log_value.min()) >= cut
