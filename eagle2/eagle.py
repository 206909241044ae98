"""The EAGLE drafter: expansion phase and reranking phase of EAGLE-2, and the static tree of EAGLE-1.

Optionally the pool is joined by what prompt lookup proposes (``TreeSettings.lookup``), before the reranking phase: the
head is good at what comes next in any text, the lookup at what has been written before.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from accelerate.utils import align_module_device  # type: ignore[import-untyped]
from torch import Tensor, nn

from .cost import CostModel, Size, TreePlanner
from .draft import Proposal
from .head import DraftHead
from .lean import LeanHead, draft_linear, lean_linear
from .lookup import PromptLookup
from .native import top
from .target import Target
from .tree import DraftTree, rerank
from .verify import check_numbers

# Share of prompt lookup's confidence that is left where the head's children lack its token: of 0.25, 0.5 and 1 this gave the
# best modelled speed on prompts of six question sets (47 that the benchmarks do not use).
UNSEEN = 0.5
MAX_DEPTH, MAX_TOP_K, MAX_TOTAL = 16, 64, 512
AUTO_DEPTH, AUTO_TOTAL = 8, 64  # bounds of what the cost model chooses


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """Size and kind of the draft tree.

    ``depth`` counts layers of drafted tokens and ``total_tokens`` drafted nodes, the root not included (the paper's 7B
    setting: 6, 10, 59).  The official code counts otherwise, see `from_official`.  Either may be "auto": then a cost model
    chooses it at every step of a dynamic tree, up to ``depth_limit`` and ``total_limit``.  ``lookup``: copies of earlier
    text join the pool, which may make a tree deeper than ``depth``.
    """

    kind: Literal["dynamic", "static"] = "dynamic"
    depth: Size = 6
    top_k: int = 10
    total_tokens: Size = 59
    lookup: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("dynamic", "static"):
            raise ValueError(f"the tree is 'dynamic' or 'static', not {self.kind!r}")
        for name, most in (("depth", MAX_DEPTH), ("top_k", MAX_TOP_K), ("total_tokens", MAX_TOTAL)):
            value = getattr(self, name)
            if value == "auto" and name != "top_k":
                if self.kind == "static":
                    raise ValueError(f"the static tree has a fixed size, so its {name} cannot be 'auto'")
                continue
            if not isinstance(value, int):
                raise ValueError(f"{name} must be a whole number{' or auto' * (name != 'top_k')}, not {value!r}")
            if not 1 <= value <= most:
                raise ValueError(f"{name} must lie between 1 and {most}, not {value}")

    @classmethod
    def from_official(cls, *, total_token: int, depth: int, top_k: int) -> TreeSettings:
        """From the official code's arguments: its ``total_token`` counts the root, its ``depth=5`` means 6 layers."""
        return cls("dynamic", depth + 1, top_k, total_token - 1)

    @property
    def automatic(self) -> bool:
        """Whether a cost model is needed."""
        return "auto" in (self.depth, self.total_tokens)

    @property
    def depth_limit(self) -> int:
        """The most layers of any tree."""
        return AUTO_DEPTH if self.depth == "auto" else self.depth

    @property
    def total_limit(self) -> int:
        """The most drafted nodes of any tree."""
        return AUTO_TOTAL if self.total_tokens == "auto" else self.total_tokens

    @property
    def pool_size(self) -> int:
        """Drafted nodes of the (largest) expanded dynamic tree: ``top_k + (depth - 1) * top_k ** 2``."""
        return self.top_k + (self.depth_limit - 1) * self.top_k**2


# Prior chance that the k-th most confident child is the target's token, for the shape of the static tree; roughly the
# shares that EAGLE-1's hand-made tree (26 nodes with the root) implies. Only the order of their products matters.
_RANK_PRIOR = 0.6
_RANK_DECAY = 0.35


def static_shape(depth: int, top_k: int, total_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Paths of a fixed tree in breadth-first order; ``(0, 2)`` is the third child of the first child of the root.

    The ``total_tokens`` paths with the highest prior, at most ``depth`` long and ``top_k`` wide at each node.
    """
    prior = [_RANK_PRIOR * _RANK_DECAY**rank for rank in range(top_k)]
    paths: list[tuple[int, ...]] = []
    queue: list[tuple[float, int, tuple[int, ...]]] = [(-prior[0], 1, (0,))]
    while queue and len(paths) < total_tokens:
        value, length, path = heapq.heappop(queue)
        paths.append(path)
        if path[-1] + 1 < top_k:
            heapq.heappush(queue, (value * _RANK_DECAY, length, (*path[:-1], path[-1] + 1)))
        if length < depth:
            heapq.heappush(queue, (value * prior[0], length + 1, (*path, 0)))
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


class DraftVocabulary:
    """The tokens that are drafted, and their logits through the target's own LM head.

    With ``token_ids [v]`` (increasing, on any device) only these rows of the LM head are used (FR-Spec, arXiv
    2502.14856); they are gathered once, here.  Confidences are then relative to these tokens: a log-softmax over ``v``,
    not over all ``V``.  The output stays the target's, since it verifies whatever was drafted.  None, or all of the
    target's tokens: the LM head as it is.  ``size`` is ``v`` or ``V``.  ``rounded``: gathered rows by `draft_linear`.
    """

    def __init__(self, target: Target, token_ids: Tensor | None = None, *, rounded: bool = False) -> None:
        self.lm_head, self.dtype = target.lm_head, target.feature_dtype
        if token_ids is not None and len(token_ids) == target.vocab_size:
            token_ids = None
        self.token_ids = None if token_ids is None else token_ids.to(target.feature_device)
        self.size = target.vocab_size if token_ids is None else len(token_ids)
        self._linear = target.packed_lm_head if self.token_ids is None else None
        # Rows can be taken of a plain linear map only; another kind of LM head may do more, so it runs as it is.
        if self.token_ids is not None and type(self.lm_head) is nn.Linear:
            with align_module_device(self.lm_head):  # brings a weight that is offloaded
                weight, bias = self.lm_head.weight.detach(), self.lm_head.bias
                self._linear = (draft_linear if rounded else lean_linear)(
                    weight[self.token_ids], None if bias is None else bias.detach()[self.token_ids]
                )

    def logits(self, features: Tensor) -> Tensor:
        """Float32 ``[n, size]`` for the head's outputs ``[n, H]``; column j is the token ``target_ids(j)``."""
        features = features.to(self.dtype)
        if self._linear is not None:
            return self._linear(features).float()
        logits: Tensor = self.lm_head(features)
        return (logits if self.token_ids is None else logits[..., self.token_ids]).float()

    @cached_property
    def _ids(self) -> list[int] | None:
        """`token_ids` on the host, for a few lookups per step."""
        return None if self.token_ids is None else self.token_ids.tolist()

    def best(self, features: Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
        """The ``k`` likeliest tokens after each of the head's outputs ``[n, H]``: log probabilities ``[n, k]``, and their ids
        in the target's vocabulary, likeliest first.
        """
        values, columns = top(self.logits(features), k, softmax=True)
        if self._ids is None:
            return values, columns
        return values, [[self._ids[column] for column in row] for row in columns]

    def target_ids(self, columns: Tensor) -> Tensor:
        """Ids of the target's vocabulary for columns of `logits`, in any shape."""
        return columns if self.token_ids is None else self.token_ids[columns]


class EagleDrafter:
    """Grows a draft tree with an EAGLE head over the target's features.

    ``vocabulary`` (default: of the head's ``draft_token_ids``) can be shared by all drafters on the same weights.
    Trees hold ids of the target's vocabulary, whatever is drafted.  Automatic settings need ``costs``; a `TreePlanner` then
    decides at every step whether to draft, how deep, and where to cut.

    Holds the head's KV cache: committed rows come from the target's features only; a tree's rows are dropped after it.
    """

    needs_hidden = True

    def __init__(
        self, head: DraftHead, target: Target, settings: TreeSettings, vocabulary: DraftVocabulary | None = None,
        costs: CostModel | None = None,
    ) -> None:  # fmt: skip
        if settings.automatic and costs is None:
            raise ValueError("an automatic tree needs a cost model")
        self.head, self.target, self.settings, self.costs = head, target, settings, costs
        self.vocabulary = vocabulary or DraftVocabulary(target, head.draft_token_ids)
        self.top_k = min(settings.top_k, self.vocabulary.size)
        self._shape: dict[tuple[int, ...], int] = {}  # static tree: path -> number of its children in the shape
        if settings.kind == "static":
            paths = static_shape(settings.depth_limit, self.top_k, settings.total_limit)
            self._shape = {path: sum(p[:-1] == path for p in paths) for path in ((), *paths)}
        self._lookup = PromptLookup(target.device) if settings.lookup else None
        self._steps = 0
        self.reset(0)

    def reset(self, capacity: int) -> None:
        """Forget the sequence; the cache takes ``capacity`` committed rows and one tree on top."""
        self._cache = self.head.new_cache(capacity + self._tree_rows())
        self._pending: Pending = []
        self._steps = 0
        if self._lookup is not None:
            self._lookup.reset(capacity)
        settings = self.settings
        self._planner: TreePlanner | None = None
        if settings.automatic and self.costs is not None:
            self._planner = TreePlanner(
                self.costs, width=self.top_k, depth=settings.depth, nodes=settings.total_tokens,
                depth_limit=settings.depth_limit, node_limit=settings.total_limit,
            )  # fmt: skip

    def resume(self, length: int, capacity: int) -> None:
        """Go on after the first ``length`` tokens; see `Drafter.resume`.  What the planner has learnt stays."""
        self._cache.drop_rows()
        self._cache.length, self._pending = resumed(self._cache.length, self._pending, length)
        self._cache.reserve(capacity + self._tree_rows())
        if self._lookup is not None:
            self._lookup.resume(length, capacity)

    def _tree_rows(self) -> int:
        if self._shape:
            return len(self._shape)
        return self.settings.depth_limit * self.top_k

    @torch.inference_mode()
    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Newly committed tokens and the target's features of them ``[n, H]``.

        The head sees them at `propose`, and a prompt here, but for its last token: that pass is the prompt's, no step's.
        """
        if hidden is None or len(hidden) != len(token_ids):
            raise ValueError("the draft head needs one target feature for each committed token")
        self._pending.append((token_ids, hidden))
        if self._lookup is not None:
            self._lookup.observe(token_ids, None)
        if self._planner is not None:
            self._planner.observe(len(token_ids))
        if len(token_ids) > self.settings.depth_limit + 1 and (self._planner is None or self._planner.may_draft):
            ids, hidden = self._waiting()
            self._advance(ids[1:], hidden[:-1], wanted=False)
            self._pending.append((ids[-1:], hidden[-1:]))

    @torch.inference_mode()
    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        """Expansion phase, then reranking phase (paper, sections 4.1 and 4.2).

        Where the planner skips a step, what was observed waits for the next draft's catch-up; copies are still verified
        where that pays.
        """
        device = self.target.feature_device
        settings, planner = self.settings, self._planner
        depth = min(settings.depth_limit, max_depth)
        budget = min(settings.total_limit, max_nodes)
        self._cache.drop_rows()
        if depth < 1 or budget < 1:
            return Proposal(DraftTree.root_only(root, device), ())
        copy = [] if self._lookup is None else self._lookup.copy(root, max_depth)
        if planner is not None and not planner.begin(sum(len(ids) for ids, _ in self._pending), budget):
            return self._only_copied(root, copy, planner)
        self._steps += 1
        feature = self._catch_up(root)  # [1, H]

        tokens, parents = [root], [-1]
        confidence, log_value = [1.0], [0.0]
        paths: list[tuple[int, ...]] = [()]  # rank among siblings, down from the root
        features: dict[int, Tensor] = {0: feature[0]}  # the head's output after each node that was fed
        cache_row: dict[int, int] = {}  # node -> its row behind the committed rows of the cache
        selected: list[tuple[int, ...]] = []
        fed = [0]
        position = self._cache.length  # of the next layer's features
        outputs, first_of_layer = feature, 1
        for layer in range(depth):
            if layer:
                fed = self._select(range(first_of_layer, len(tokens)), log_value, paths)
                if not fed:
                    break
                if planner is not None and not planner.goes_on(_values(log_value[1:]), _values(log_value, fed)):
                    break
                selected.append(tuple(fed))
                outputs = self._feed(fed, tokens, parents, features, cache_row, position + layer - 1)
            best_log, best_id = self.vocabulary.best(outputs, self.top_k)
            check_numbers(best_log, "draft head", self._steps)
            probs = [[math.exp(value) for value in row] for row in best_log]
            if planner is not None:
                planner.saw(_values(log_value, fed), probs)
            first_of_layer = len(tokens)
            for row, node in enumerate(fed):
                width = self._shape.get(paths[node], 0) if self._shape else self.top_k
                for rank in range(width):
                    tokens.append(best_id[row][rank])
                    parents.append(node)
                    confidence.append(min(probs[row][rank], 1.0))
                    log_value.append(log_value[node] + min(best_log[row][rank], 0.0))
                    paths.append((*paths[node], rank))
        self._cache.drop_rows()
        copied = graft(copy, tokens, parents, confidence, log_value)
        tree = _tree(tokens, parents, confidence, log_value, device)
        if planner is not None:
            budget = planner.cut(_values(log_value[1:]))
        kept = rerank(tree.log_value, tree.depths, budget)
        return Proposal(tree, kept, tuple(selected), copied)

    def _only_copied(self, root: int, copy: list[tuple[int, float]], planner: TreePlanner) -> Proposal:
        """A step without the head: the copy alone, as far as verifying it pays."""
        tokens, parents, confidence, log_value = [root], [-1], [1.0], [0.0]
        copied = graft(copy, tokens, parents, confidence, log_value)
        tree = _tree(tokens, parents, confidence, log_value, self.target.feature_device)
        return Proposal(tree, copied[: planner.cut_undrafted(_values(log_value[1:]))], (), copied)

    def _select(self, layer: range, log_value: list[float], paths: list[tuple[int, ...]]) -> list[int]:
        """Nodes of the newest layer that are fed next: the ``top_k`` of highest value, or those the shape goes on from."""
        if self._shape:
            return [node for node in layer if self._shape.get(paths[node], 0)]
        return sorted(layer, key=lambda node: (-log_value[node], node))[: self.top_k]

    def _catch_up(self, root: int) -> Tensor:
        """Feed the newly committed positions with the target's features; returns the head's output at the last one."""
        if not self._pending:
            raise ValueError("nothing was observed since the last proposal")
        ids, hidden = self._waiting()
        return self._advance([*ids[1:], root], hidden)[-1:]

    def _waiting(self) -> tuple[list[int], Tensor]:
        """What was observed and not fed yet, which no longer waits."""
        ids = [token for tokens, _ in self._pending for token in tokens]
        hidden = torch.cat([rows for _, rows in self._pending])
        self._pending.clear()
        return ids, hidden

    def _advance(self, following: list[int], hidden: Tensor, *, wanted: bool = True) -> Tensor:
        """Feed the next committed positions' features ``[n, H]``, each with the token after it; outputs ``[n, H]``.

        Where these are not ``wanted`` there may be none.
        """
        n, start = len(following), self._cache.length
        device = self.target.feature_device
        tokens = torch.tensor(following, device=device)
        positions = torch.arange(start, start + n, device=device)
        output = hidden[:0]
        embeds, features = self._inputs(tokens, hidden)
        if wanted or not (isinstance(self.head, LeanHead) and self.head.fill(embeds, features, positions, self._cache)):
            visible = torch.ones(n, n, dtype=torch.bool, device=device).tril()
            output = self.head.step(embeds, features, positions, visible, self._cache)
        self._cache.commit()
        return output

    def _feed(
        self, fed: list[int], tokens: list[int], parents: list[int], features: dict[int, Tensor],
        cache_row: dict[int, int], position: int,
    ) -> Tensor:  # fmt: skip
        """One pass over a layer's selected nodes under the tree mask; returns the head's outputs ``[fed, H]``."""
        device = self.target.feature_device
        before = self._cache.rows
        visible = []
        for row, node in enumerate(fed):
            cache_row[node] = before + row
            seen = [False] * (before + len(fed))
            at = node
            while at:  # the node itself and its drafted ancestors; the root's pair is the last committed row
                seen[cache_row[at]] = True
                at = parents[at]
            visible.append(seen)
        embeds, inputs = self._inputs(
            torch.tensor([tokens[node] for node in fed], device=device),
            torch.stack([features[parents[node]] for node in fed]),
        )
        positions = torch.full((len(fed),), position, device=device)
        outputs = self.head.step(embeds, inputs, positions, torch.tensor(visible, device=device), self._cache)
        for row, node in enumerate(fed):
            features[node] = outputs[row]
        return outputs

    def _inputs(self, token_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.head.dtype
        embeds = self.target.embed(token_ids.to(self.target.device)).to(features.device, dtype)
        return embeds, features.to(dtype)


Pending = list[tuple[Sequence[int], Tensor]]  # tokens and the target's features of them, which the head has not seen


def resumed(fed: int, pending: Pending, length: int) -> tuple[int, Pending]:
    """What is left of ``fed`` positions in a head's cache and of those that wait, when ``length`` tokens stay."""
    if not 0 <= length <= fed + sum(len(ids) for ids, _ in pending):
        raise ValueError(f"the draft head has not seen {length} tokens of this sequence")
    left: Pending = []
    room = length - fed
    for ids, hidden in pending:
        if room > 0:
            left.append((ids[:room], hidden[:room]))
            room -= len(ids)
    return min(fed, length), left


def graft(
    copy: Sequence[tuple[int, float]], tokens: list[int], parents: list[int], confidence: list[float],
    log_value: list[float],
) -> tuple[int, ...]:  # fmt: skip
    """Put a copied chain of (token, confidence) under the root of a pool, in place; returns its nodes.

    Where the pool has the chain's token already, the two agree, and the higher confidence counts, for all that hangs below.
    Where the head's best children do not have it, it joins them with ``UNSEEN`` of its confidence.
    """
    children: dict[int, dict[int, int]] = {}
    for node, parent in enumerate(parents[1:], 1):
        children.setdefault(parent, {})[tokens[node]] = node
    copied: list[int] = []
    at = 0
    for token, sure in copy:
        siblings = children.get(at, {})
        if token not in siblings:
            sure *= UNSEEN if siblings else 1.0
            siblings = {token: len(tokens)}
            tokens.append(token)
            parents.append(at)
            confidence.append(sure)
            log_value.append(log_value[at] + math.log(sure))
        elif sure > confidence[node := siblings[token]]:
            gain = math.log(sure) - (log_value[node] - log_value[at])
            confidence[node] = sure
            below = {node}
            log_value[node] += gain
            for other in range(node + 1, len(parents)):
                if parents[other] in below:
                    below.add(other)
                    log_value[other] += gain
        at = siblings[token]
        if confidence[at] == sure:  # else the head is surer
            copied.append(at)
    return tuple(copied)


def _tree(
    tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float], log_value: Sequence[float],
    device: torch.device,
) -> DraftTree:  # fmt: skip
    return DraftTree(
        torch.tensor(tokens, device=device),
        tuple(parents),
        torch.tensor(confidence, dtype=torch.float32, device=device),
        torch.tensor(log_value, dtype=torch.float32, device=device),
    )


def _values(log_value: Sequence[float], nodes: Sequence[int] | None = None) -> list[float]:
    """Values of ``nodes`` (default: all)."""
    return [math.exp(value) for value in (log_value if nodes is None else [log_value[node] for node in nodes])]
