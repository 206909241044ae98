"""The EAGLE-2 drafter for GPUs: the same trees as `eagle2.eagle.EagleDrafter` grows, without asking the host on the way.

`EagleDrafter` picks the nodes of every layer on the host, which on a GPU means to stop and wait for every layer.  Here
selection, tree mask, reranking and the kept tree's layout are tensor operations of fixed shapes, so that the catch-up is
one CUDA graph and the expansion with the reranking another (`eagle2.graphs`); the host reads once, at the end.

Sizes are fixed when the drafter is made.  Where less is asked for (near the end of a run), the whole tree is grown all
the same, and what lies too deep is not kept.  Automatic sizes are the host's decision after every layer, and the static
tree is small: both stay with `EagleDrafter`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .draft import Proposal
from .eagle import DraftVocabulary, Pending, TreeSettings, resumed
from .graphs import ROWS, SPARE, Graphs, Shelf, Status, padded
from .head import EagleHead
from .lean import ROPE_TYPES
from .target import PREFILL_CHUNK, Target
from .tree import DraftTree
from .verify import check_finite


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LaidOutTree(DraftTree):
    """A draft tree whose ancestor mask ``[N, N]`` and depths ``[N]`` are on its device already."""

    mask: Tensor
    layers: Tensor

    def ancestor_mask(self) -> Tensor:
        return self.mask

    def depth_ids(self) -> Tensor:
        return self.layers


class DeviceEagleDrafter:
    """`EagleDrafter`'s dynamic trees of fixed size, grown on the device.  See the module's text.

    ``fork()`` gives a drafter for another sequence.  Ties are broken as there: stable sorts, by value, then pool index.
    """

    needs_hidden = True

    def __init__(
        self, head: EagleHead, target: Target, settings: TreeSettings, vocabulary: DraftVocabulary | None = None
    ) -> None:
        if settings.kind != "dynamic" or settings.automatic:
            raise ValueError("the drafter on the device grows dynamic trees of fixed size; use EagleDrafter for others")
        self.head, self.target, self.settings = head, target, settings
        self.vocabulary = vocabulary or DraftVocabulary(target, head.draft_token_ids)
        self.top_k = min(settings.top_k, self.vocabulary.size)
        self.depth = settings.depth_limit
        self.pool = self.top_k + (self.depth - 1) * self.top_k**2  # drafted nodes of the expanded tree
        self.most_kept = min(settings.total_limit, self.pool)
        self.status = Status(target.device)
        self._shelf: Shelf[_Buffers] = Shelf()
        self._start()
        if target.device.type == "cuda":  # a first capture, so that a failure is known, and told, before any run
            trial = self.fork()
            trial.reset(1)
            trial.observe([0], torch.zeros(1, head.config.hidden_size, device=target.device))
            trial.propose(0, self.depth, self.most_kept)

    def _start(self) -> None:
        self._buffers: _Buffers | None = None
        self._give_back: Callable[[], object] | None = None
        self._length = 0  # committed rows of the head's cache
        self._pending: Pending = []
        self._steps = 0

    @staticmethod
    def refusal(head: EagleHead, settings: TreeSettings) -> str | None:
        """Why `EagleDrafter` is the one to take; None where this drafter is."""
        device = head.fc.weight.device
        if device.type != "cuda":
            return f"the head is on {device.type}, where asking the host costs nothing"
        if settings.kind != "dynamic" or settings.automatic or settings.lookup:
            return "the tree is not a dynamic one of fixed size without copies"
        rope = head.config.rope.get("rope_type", "default")
        if rope not in ROPE_TYPES:
            return f"the head's rotary embedding is of type {rope}"
        return None

    def fork(self) -> DeviceEagleDrafter:
        """A drafter for another sequence, with the same settings; it may take over buffers of one that is gone."""
        other = copy.copy(self)
        other._start()
        return other

    @torch.inference_mode()
    def reset(self, capacity: int) -> None:
        """Forget the sequence; at most ``capacity`` tokens will be committed in the next one."""
        if self._buffers is None or capacity > self._buffers.capacity:
            if self._give_back is not None:
                self._buffers = None
                self._give_back()
            make = partial(_Buffers, self)
            self._buffers, self._give_back = self._shelf.take(self, max(capacity, 1), make)
        self._buffers.clear()
        self._length = self._steps = 0
        self._pending = []

    @torch.inference_mode()
    def resume(self, length: int, capacity: int) -> None:
        """Go on after the first ``length`` tokens; see `Drafter.resume`."""
        self._length, self._pending = resumed(self._length, self._pending, length)
        before, give_back = self._buffers, self._give_back
        if before is not None and give_back is not None and capacity <= before.capacity:
            return
        kept = self._length, self._pending, self._steps
        self._buffers = self._give_back = None
        self.reset(capacity)  # new buffers before the old ones are given back
        self._length, self._pending, self._steps = kept
        if before is not None and give_back is not None:
            assert self._buffers is not None
            rows = slice(before.first, before.first + self._length)  # the tree's are not needed
            self._buffers.keys[:, :, rows] = before.keys[:, :, rows]
            self._buffers.values[:, :, rows] = before.values[:, :, rows]
            give_back()

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Newly committed tokens and the target's features of them ``[n, H]``; the head sees them at `propose`."""
        if hidden is None or len(hidden) != len(token_ids):
            raise ValueError("the draft head needs one target feature for each committed token")
        self._pending.append((token_ids, hidden))

    @torch.inference_mode()
    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        """Expansion phase, then reranking phase (paper, sections 4.1 and 4.2); the host waits for the device once."""
        k = self.top_k
        depth = min(self.depth, max_depth)
        if depth < 1 or max_nodes < 1:
            return Proposal(DraftTree.root_only(root, self.target.device), ())
        pool = k + (depth - 1) * k * k  # nodes that may be kept: the pool's first
        count = min(self.most_kept, max_nodes, pool)
        buffers = self._catch_up(root)
        buffers.pool.fill_(pool)
        buffers.kept.fill_(count)
        self._steps += 1
        # Copies: the results of a graph hold until its next replay, a proposal for as long as somebody looks at it.
        grown = _Grown(*(part.clone() for part in buffers.graphs.run("expansion", partial(self._expand, buffers))))
        return self._proposal(grown, depth, pool, count)

    def _proposal(self, grown: _Grown, depth: int, pool: int, count: int) -> Proposal:
        k, passes = self.top_k, self.depth - 1
        host = self._read(grown.plain)
        finite, kept, fed = host[0], tuple(host[1 : 1 + count]), host[1 + self.most_kept :]
        if not finite:
            check_finite(grown.maxima[:, None], "draft head", self._steps)
        selected = tuple(tuple(fed[start : start + k]) for start in range(0, passes * k, k))[: depth - 1]
        parents = (-1, *[0] * k, *(node for layer in selected for node in layer for _ in range(k)))
        row = {0: 0} | {node: number for number, node in enumerate(kept, 1)}
        rows = slice(self.pool + 1, self.pool + 2 + count)  # of the kept tree, behind the expanded one's
        expanded = DraftTree(grown.ids[0, : pool + 1], parents, *grown.values[:, : pool + 1])
        laid_out = LaidOutTree(
            grown.ids[0, rows],
            (-1, *(row[parents[node]] for node in kept)),  # a parent that is not kept would be a KeyError here
            *grown.values[:, rows],
            mask=grown.mask[: count + 1, : count + 1],
            layers=grown.ids[1, rows],
        )
        return Proposal(expanded, kept, selected, laid_out=laid_out)

    def _read(self, plain: Tensor) -> list[int]:
        """The step's one transfer to the host."""
        return plain.tolist()

    def _catch_up(self, root: int) -> _Buffers:
        """Feed the newly committed positions with the target's features; the buffers hold the last one's output."""
        if not self._pending or self._buffers is None:
            raise ValueError("nothing was observed since the last proposal")
        buffers = self._buffers
        ids = [token for tokens, _ in self._pending for token in tokens]
        hidden = torch.cat([rows for _, rows in self._pending])
        self._pending.clear()
        n, start = len(ids), self._length
        if start + n > buffers.capacity:
            raise ValueError(f"the draft head's KV cache has {buffers.capacity} rows, this pass needs {start + n}")
        # Every position has its own place in `staging`, so the copy need not be waited for.
        buffers.staging[start : start + n] = torch.tensor([*ids[1:], root])
        buffers.following[start : start + n].copy_(buffers.staging[start : start + n], non_blocking=True)
        for first in range(0, n, PREFILL_CHUNK):
            features = hidden[first : first + PREFILL_CHUNK]
            rows = len(features)
            buffers.start.fill_(start + first)
            buffers.count.fill_(rows)
            if rows > ROWS[-1]:
                self._feed_committed(buffers, features.to(buffers.features.dtype))
                continue
            buffers.features[:rows].copy_(features)
            size = padded(rows)
            feed = partial(self._feed_committed, buffers, buffers.features[:size])
            buffers.graphs.run(size, feed)
        self._length += n
        return buffers

    # --- on the device: what follows is captured, so no shape depends on a value and nothing is asked of the host ------

    def _feed_committed(self, b: _Buffers, features: Tensor) -> None:
        """The pass over ``features [N, H]`` of the committed positions from ``start`` on, of which ``count`` are no padding."""
        row = torch.arange(len(features), device=features.device)
        at = b.start + row
        places = at.clamp(max=b.capacity - 1)
        write = b.first + torch.where(row < b.count, at, b.capacity + row)
        committed = b.slots >= 0
        visible = committed & (b.slots <= at[:, None])
        outputs = self._run(b, b.following.index_select(0, places), features, places, write, visible)
        b.feature.copy_(outputs.index_select(0, b.count - 1))

    def _expand(self, b: _Buffers) -> _Grown:
        """The whole tree under the last committed position, its reranking, and the layout of what is kept."""
        k, device = self.top_k, b.feature.device
        committed = b.start + b.count  # [1]: the root's position; its pair is the last committed row
        prefix = (b.slots[b.first :] < committed).expand(k, -1)
        outputs = b.feature  # [fed, H]
        fed = torch.zeros(1, dtype=torch.int64, device=device)  # their nodes: the root
        # Sums of logarithms are carried in float64, as the host does it, and compared at the end in float32.
        values = torch.zeros(1, dtype=torch.float64, device=device)
        ancestors = torch.zeros(1, b.first, dtype=torch.bool, device=device)  # rows of the tree that a fed node sees
        ids, parents, confidence, log_value = (
            [b.following.index_select(0, committed - 1)],
            [fed],
            [values + 1],
            [values],
        )
        selected: list[Tensor] = []
        maxima: list[Tensor] = []
        first_of_layer = 1
        for layer in range(self.depth):
            if layer:
                best = log_value[-1].sort(descending=True, stable=True).indices[:k]
                fed, values, parent_row = best + first_of_layer, log_value[-1][best], best // k
                first_of_layer += len(log_value[-1])
                selected.append(fed)
                rows = slice((layer - 1) * k, layer * k)
                ancestors = ancestors.index_select(0, parent_row) | b.own[rows]
                outputs = self._run(
                    b, ids[-1][best], outputs.index_select(0, parent_row), (committed + layer - 1).expand(k),
                    b.tree_rows[rows], torch.cat((ancestors, prefix), 1),
                )  # fmt: skip
            logits = self.vocabulary.logits(outputs)
            maxima.append(logits.amax(-1))
            top = logits.log_softmax(-1).topk(k, -1)
            ids.append(self.vocabulary.target_ids(top.indices).flatten())
            parents.append(fed[:, None].expand(-1, k).flatten())
            confidence.append(top.values.exp().clamp(max=1).flatten())
            log_value.append((values[:, None] + top.values.clamp(max=0)).flatten())
        return self._rerank(b, ids, parents, confidence, log_value, selected, torch.cat(maxima))

    def _rerank(
        self, b: _Buffers, ids: list[Tensor], parents: list[Tensor], confidence: list[Tensor], log_value: list[Tensor],
        selected: list[Tensor], maxima: Tensor,
    ) -> _Grown:  # fmt: skip
        """`tree.rerank` of the first ``pool`` nodes, ``kept`` of them, and the kept tree's mask.

        The pool lies layer by layer, so one stable sort has that key: value, then depth, then pool index.
        """
        most, out = self.most_kept, self.pool + 1  # `out`: the place after the pool, for rows that are not used
        token_ids, above = torch.cat((*ids, ids[0])), torch.cat((*parents, parents[0]))  # [pool + 2], as all of these
        # A root's confidence serves as the missing one's too.
        values = torch.stack((torch.cat((*confidence, confidence[0])), torch.cat((*log_value, log_value[0])))).float()
        barred = b.nodes[: self.pool] >= b.pool
        order = values[1, 1:out].masked_fill(barred, -torch.inf).sort(descending=True, stable=True).indices
        kept = (order[:most] + 1).masked_fill(b.nodes[:most] >= b.kept, out).sort().values
        shown = torch.cat((b.nodes[:1], kept))  # [most + 1]: the root, then the kept nodes in the pool's order
        row_of = torch.zeros_like(b.nodes).index_copy(0, kept, b.nodes[1 : most + 1])
        parent_row = row_of[above[shown]]
        mask = b.diagonal
        for _ in range(self.depth):
            mask = b.diagonal | mask.index_select(0, parent_row)
        both = torch.cat((b.nodes[:out], shown))
        finite = torch.isfinite(maxima).all().to(torch.int64)[None]
        return _Grown(
            ids=torch.stack((token_ids, b.layers)).index_select(1, both),
            values=values.index_select(1, both),
            mask=mask,
            plain=torch.cat((finite, kept, *selected)),
            maxima=maxima,
        )

    def _run(
        self, b: _Buffers, token_ids: Tensor, features: Tensor, positions: Tensor, write: Tensor, visible: Tensor
    ) -> Tensor:
        """The head over ``N`` pairs: keys and values go to the rows ``write [N]``; ``visible [N, rows]`` -> ``[N, H]``."""
        head = self.head
        layer: Any = head.layers[0]
        x = head.join(self.target.embed(token_ids).to(features.dtype)[None], features[None])
        turns = b.cos.index_select(0, positions)[None], b.sin.index_select(0, positions)[None]
        queries, keys, values = layer.self_attn.qkv(x, *turns)
        b.keys.index_copy_(2, write, keys)
        b.values.index_copy_(2, write, values)
        end = visible.shape[1]
        attended = layer.self_attn.attend(queries, b.keys[:, :, :end], b.values[:, :, :end], visible[None, None])
        result: Tensor = layer.finish(x, attended)[0]
        return result


class _Grown(NamedTuple):
    """What a step leaves on the device.  ``R``: rows of the expanded tree, then of the kept one, each root first."""

    ids: Tensor  # [2, R], int64: token ids, depths
    values: Tensor  # [2, R], float32: confidences, log values
    mask: Tensor  # [kept, kept], bool: the kept tree's ancestors
    plain: (
        Tensor  # [1 + kept + fed], int64: whether all logits are finite, the kept nodes, the nodes fed layer by layer
    )
    maxima: Tensor  # [rows of all passes]: the highest logit


class _Buffers:
    """What the passes of one sequence read and write, at addresses that stay.

    The cache's rows: those of the tree, ``first`` in all; ``capacity`` committed ones; spare ones for padding rows.
    """

    def __init__(self, drafter: DeviceEagleDrafter, capacity: int) -> None:
        head, k, device = drafter.head, drafter.top_k, drafter.target.device
        fed = (drafter.depth - 1) * k
        self.capacity = capacity
        self.first = -(-fed // 8) * 8  # a multiple of 8, which attention kernels like
        cache = head.new_cache(self.first + capacity + SPARE)
        self.keys, self.values = cache.keys, cache.values  # [1, kv_heads, rows, D]
        dtype = self.keys.dtype
        places = torch.arange(capacity + drafter.depth, device=device)
        cos, sin = head.rotary(places[None], dtype)
        self.cos, self.sin = cos[0], sin[0]  # [capacity + depth, D]
        self.slots = (
            torch.arange(self.first + capacity, device=device) - self.first
        )  # row -> position; below 0: the tree's
        self.tree_rows = torch.arange(fed, device=device)
        self.own = torch.eye(fed, self.first, dtype=torch.bool, device=device)
        # [capacity]: the token after each committed position, on the host and on the device
        self.staging = torch.zeros(capacity, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.following = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.features = torch.zeros(ROWS[-1], head.config.hidden_size, dtype=dtype, device=device)
        self.feature = torch.zeros(1, head.config.hidden_size, dtype=dtype, device=device)
        self.start, self.count, self.pool, self.kept = torch.zeros(4, 1, dtype=torch.int64, device=device)
        self.nodes = torch.arange(drafter.pool + 2, device=device)
        self.layers = torch.cat((self.nodes[:1], (self.nodes[1:] - 1 - k).div(k * k, rounding_mode="floor") + 2))
        self.diagonal = torch.eye(drafter.most_kept + 1, dtype=torch.bool, device=device)
        self.graphs = Graphs(device, drafter.status)

    def clear(self) -> None:
        """Zeros, since a masked row must still be a number."""
        self.keys.zero_()
        self.values.zero_()


__all__ = ["DeviceEagleDrafter", "LaidOutTree"]
