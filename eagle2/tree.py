"""Draft trees: tokens, parents and values, with the operations that drafting and verification share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of draft tokens under the root token (EAGLE-2 paper, section 4).

    Node 0 is the root token: already decided, always accepted.  A parent's index is smaller than its child's.
    """

    token_ids: Tensor  # [N], int64
    parents: tuple[int, ...]  # [N], root -1
    confidence: Tensor  # [N], float32, the drafter's probability of the token given its path; root 1
    log_value: Tensor  # [N], float32, sum of log confidences from the root; root 0
    # [N, V], float32: row i is the distribution that the children of i were drawn from, in index order and with
    # replacement.  None: the tree was built deterministically.
    draft_probs: Tensor | None = None

    def __post_init__(self) -> None:
        n = len(self.parents)
        if n < 1 or self.parents[0] != -1:
            raise ValueError("a draft tree starts with a root whose parent is -1")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("a node's parent must have a smaller index than the node")
        for name in ("token_ids", "confidence", "log_value"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"{name} must have shape [{n}], not {list(getattr(self, name).shape)}")
        if self.draft_probs is not None and (self.draft_probs.ndim != 2 or len(self.draft_probs) != n):
            raise ValueError(f"draft_probs must have shape [{n}, V], not {list(self.draft_probs.shape)}")

    @classmethod
    def root_only(cls, token_id: int, device: torch.device | str = "cpu") -> DraftTree:
        """The tree of plain autoregressive decoding: nothing is drafted."""
        return cls(
            torch.tensor([token_id], device=device),
            (-1,),
            torch.ones(1, device=device),
            torch.zeros(1, device=device),
        )

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node ``[N]``; the root has 0."""
        depths = [0] * len(self)
        for node, parent in enumerate(self.parents[1:], 1):
            depths[node] = depths[parent] + 1
        return tuple(depths)

    def depth_ids(self) -> Tensor:
        """`depths` as int64 ``[N]`` on the tree's device."""
        return torch.tensor(self.depths, device=self.token_ids.device)

    def children(self) -> list[list[int]]:
        """Children of each node, in index order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return children

    def ancestor_mask(self) -> Tensor:
        """Boolean ``[N, N]``: row i is True at i and at each ancestor of i (the tree mask; paper, Figure 7)."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], 1):
            mask[node] |= mask[parent]
        return mask.to(self.token_ids.device)

    def select(self, kept: Sequence[int]) -> DraftTree:
        """The tree of the root and ``kept`` nodes, in that order; row ``i + 1`` of the result is ``kept[i]``.

        Raises ValueError where a kept node's parent is not kept before it.
        """
        row = {0: 0}
        for node in kept:
            if node in row or self.parents[node] not in row:
                raise ValueError(f"node {node} is kept twice or without its parent before it")
            row[node] = len(row)
        index = torch.tensor([0, *kept], device=self.token_ids.device)
        return DraftTree(
            self.token_ids[index],
            (-1, *(row[self.parents[node]] for node in kept)),
            self.confidence[index],
            self.log_value[index],
            None if self.draft_probs is None else self.draft_probs[index],
        )


def rerank(log_value: Tensor, depths: Sequence[int], count: int) -> tuple[int, ...]:
    """Reranking phase (paper, section 4.2): the ``count`` drafted nodes with the highest value, in pool order.

    ``log_value [N]`` covers the whole pool, the root at 0 (never returned).  The key is (value descending, depth
    ascending, pool index ascending), in float32 and stable.  Since confidences are at most 1, a parent's value is never
    below its child's; with the depth key a parent therefore comes before its child even where the values tie, and the
    kept nodes are connected.  Half precision, or no depth key, would lose parents at ties.
    """
    if log_value.dtype != torch.float32:
        raise ValueError(f"values are compared in float32, not {log_value.dtype}")
    values = log_value.tolist()
    order = sorted(range(1, len(values)), key=lambda node: (-values[node], depths[node], node))
    return tuple(sorted(order[: max(count, 0)]))
