"""The target's passes with static shapes, so that on a GPU each is captured once as a CUDA graph and then replayed.

A decoding step is hundreds of small kernels; started one by one from Python they take longer to start than to run.  A
graph starts them all at once, but fixes shapes and addresses.  So a pass is padded to one of a few row counts (`ROWS`),
its inputs are copied into buffers that stay, it attends over the whole KV buffer under a mask, and whatever changes from
pass to pass (length of the prefix, rows that count, positions) is read from tensors on the device.

The models are those of `eagle2.lean`; here they run on their own modules, since a GPU's memory is too dear for a second,
fused copy of the weights.  Without CUDA the same code runs as it is, without graphs; that is how it is tested.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .lean import Lean, rounded
from .zero import on_zero_gpu

ROWS = (1, 8, 16, 32, 64)  # a pass is padded to one of these; a wider one (a prompt's) runs as it is, without a graph
SPARE = ROWS[-1]  # rows behind the capacity that take the keys and values of padding rows
WARM_UP = 3  # calls before a capture, in which libraries set themselves up

T = TypeVar("T")


def padded(rows: int) -> int:
    """The row count that a pass of ``rows`` rows runs with."""
    return next((size for size in ROWS if rows <= size), rows)


def roomy(capacity: int) -> int:
    """``capacity`` rounded up, so that the buffers of one sequence fit the next: 256, 512, then multiples of 1024."""
    return next((size for size in (256, 512) if capacity <= size), rounded(capacity, 1024))


class Status:
    """Whether passes run as graphs; shared by all sequences on the same weights.  ``failure``: why they do not."""

    def __init__(self, device: torch.device) -> None:
        self.failure = None if device.type == "cuda" else f"{device.type} has none"
        if self.failure is None and on_zero_gpu():  # they would be captured for one run
            self.failure = "on ZeroGPU a GPU is lent for one run"

    def __str__(self) -> str:
        return "graphs" if self.failure is None else f"static shapes without graphs: {self.failure}"


class Graphs:
    """Runs functions over static tensors: each is captured at its first call and replayed from then on.

    All graphs of one object share a memory pool, so a function's results hold until the next call: copy what is to stay.
    Where capturing fails, the reason goes into ``status`` and functions are called as they are, here and wherever the
    status is shared.
    """

    _one_at_a_time = threading.Lock()  # torch takes one capture at a time in a process; an app has several threads

    def __init__(self, device: torch.device, status: Status) -> None:
        self.device, self.status = device, status
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, function: Callable[[], T]) -> T:
        """What ``function`` returns.  It is the same function at every call with ``key``, and running it twice does no harm."""
        if self.status.failure is not None:
            return function()
        if key not in self._captured:
            try:
                with self._one_at_a_time:
                    self._captured[key] = self._capture(function)
            except RuntimeError as error:  # also what CUDA and its allocator raise
                first = (str(error).splitlines() or [type(error).__name__])[0]
                self.status.failure = f"the capture failed ({first})"
                return function()
        graph, results = self._captured[key]
        graph.replay()
        return results

    def _capture(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        # The outer contexts bring back device and stream even where a failed capture does not.
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(WARM_UP):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # thread_local: what other threads of an app do meanwhile does not spoil the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = function()
        return graph, results


class _Sized(Protocol):
    @property
    def capacity(self) -> int:
        """Rows that the buffers have room for."""


B = TypeVar("B", bound=_Sized)


class Shelf(Generic[B]):
    """Buffers, with the graphs over them, of sequences that have ended: capturing anew for every run would take longer."""

    def __init__(self) -> None:
        self._free: deque[B] = deque()

    def take(self, owner: object, capacity: int, make: Callable[[int], B]) -> tuple[B, Callable[[], object]]:
        """Buffers for ``owner`` alone, and the call that gives them back; when ``owner`` is gone, they are anyway.

        Those that are free and too small are let go.
        """
        found: B | None = None
        for _ in range(len(self._free)):
            try:
                free = self._free.popleft()
            except IndexError:  # another thread took it
                break
            if free.capacity < capacity:
                continue
            if found is None:
                found = free
            else:
                self._free.append(free)
        buffers = make(roomy(capacity)) if found is None else found
        give_back = weakref.finalize(owner, self._free.append, buffers)
        give_back.atexit = False
        return buffers, give_back


class GraphWeights:
    """The modules of one model, as they are; shared by all sequences that run on it."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.embed = model.get_input_embeddings()
        self.dtype, self.device = self.embed.weight.dtype, self.embed.weight.device
        self.layers: nn.ModuleList = model.base_model.layers
        self.final_norm: nn.Module = model.base_model.norm
        self.rotary: nn.Module = model.base_model.rotary_emb
        self.lm_head = model.get_output_embeddings()
        self.status = Status(self.device)
        self.shelf: Shelf[_Buffers] = Shelf()


class _Buffers:
    """What the passes of one sequence read and write, at addresses that stay."""

    def __init__(self, weights: GraphWeights, capacity: int) -> None:
        w, most = weights, ROWS[-1]
        device = w.device
        self.capacity = capacity
        # [layers, 2, kv_heads, capacity + SPARE, D]: keys, values.  Zeros, since a masked row must still be a number.
        self.kv = torch.zeros(
            len(w.layers), 2, w.kv_heads, capacity + SPARE, w.head_dim, dtype=w.dtype, device=device
        )  # fmt: skip
        self.slots = torch.arange(capacity, device=device)
        cos, sin = w.rotary(torch.empty(0, dtype=torch.float32, device=device), self.slots[None])
        half = w.head_dim // 2
        self.cos = cos[0, :, None]  # [capacity, 1, D], float32
        self.sin = torch.cat((-sin[0, :, None, :half], sin[0, :, None, half:]), -1)  # signs as `_turn` wants them
        self.length = torch.zeros(1, dtype=torch.int64, device=device)  # committed rows
        self.count = torch.zeros(1, dtype=torch.int64, device=device)  # rows of the pass that are not padding
        self.token_ids = torch.zeros(most, dtype=torch.int64, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.visible = torch.zeros(most, most, dtype=torch.bool, device=device)
        self.graphs = Graphs(device, w.status)


class GraphForward:
    """One sequence: `eagle2.target.Forward` with static shapes.

    A pass of at most ``ROWS[-1]`` rows is one graph, whatever the prefix.  Padding rows write behind the capacity, where
    nothing attends, and no row that counts sees them.
    """

    def __init__(self, weights: GraphWeights) -> None:
        self.weights = weights
        self.length = 0
        self._buffers: _Buffers | None = None
        self._give_back: Callable[[], object] | None = None

    @classmethod
    def of(cls, model: Any) -> GraphForward:
        """On a GPU one pass is captured here, so that a failure is known, and told, before any run."""
        made = cls(GraphWeights(model))
        device = made.weights.device
        if device.type == "cuda":
            trial = made.fork()
            trial.reset(1)
            one = torch.zeros(1, dtype=torch.int64, device=device)
            trial.forward(one, torch.ones(1, 1, dtype=torch.bool, device=device), one, logit_rows=1)
        return made

    @staticmethod
    def refusal(model: Any) -> str | None:
        """Why this model runs otherwise; None where this forward is the one to take."""
        device = model.get_input_embeddings().weight.device
        if device.type != "cuda":
            return f"it is on {device.type}, where there are no CUDA graphs"
        return Lean.refusal(model, copies=False)

    @property
    def name(self) -> str:
        """ "graphs", or why there are none."""
        return str(self.weights.status)

    @property
    def capacity(self) -> int:
        return 0 if self._buffers is None else self._buffers.capacity

    def fork(self) -> GraphForward:
        return GraphForward(self.weights)

    @torch.inference_mode()
    def reset(self, capacity: int) -> None:
        self.length = 0
        if capacity > self.capacity:
            if self._give_back is not None:
                self._buffers = None
                self._give_back()
            make = partial(_Buffers, self.weights)
            self._buffers, self._give_back = self.weights.shelf.take(self, capacity, make)
        if self._buffers is not None:
            self._buffers.kv.zero_()  # what a failed run may have left must not reach this one through the mask

    @torch.inference_mode()
    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; the committed ones stay."""
        if capacity <= self.capacity:
            return
        length, before, give_back = self.length, self._buffers, self._give_back
        self._buffers = self._give_back = None
        self.reset(capacity)  # new buffers before the old ones are given back
        if before is not None and give_back is not None:
            assert self._buffers is not None
            self._buffers.kv[..., :length, :] = before.kv[..., :length, :]
            self.length = length
            give_back()

    def truncate(self, length: int) -> None:
        self.length = length

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows of the last pass to the end of the prefix, in all layers at once."""
        end = self.length + len(rows)
        if self._buffers is not None and list(rows) != list(range(len(rows))):
            kv = self._buffers.kv
            index = torch.tensor(rows, device=kv.device) + self.length
            kv[..., self.length : end, :] = kv.index_select(3, index)
        self.length = end

    @torch.inference_mode()
    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]``, ``visible [N, N]`` -> logits of the last ``logit_rows`` rows and hidden ``[N, H]``."""
        n, buffers, w = len(token_ids), self._buffers, self.weights
        if buffers is None or self.length + n > buffers.capacity:
            # On a GPU a write beyond the buffer would end the process's use of it.
            raise ValueError(f"the KV cache has {self.capacity} rows, this pass needs {self.length + n}")
        buffers.length.fill_(self.length)
        buffers.count.fill_(n)
        if n > ROWS[-1]:
            return _run(w, buffers, token_ids, visible.to(w.device), positions, logit_rows=logit_rows)
        buffers.token_ids[:n].copy_(token_ids)
        buffers.positions[:n].copy_(positions)
        buffers.visible[:n, :n].copy_(visible)
        size = padded(n)
        inputs = buffers.token_ids[:size], buffers.visible[:size, :size], buffers.positions[:size]
        logits, hidden = buffers.graphs.run(size, partial(_run, w, buffers, *inputs, logit_rows=size))
        assert logits is not None
        return logits[n - logit_rows : n].clone() if logit_rows else None, hidden[:n].clone()


def _run(
    w: GraphWeights, buffers: _Buffers, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
) -> tuple[Tensor | None, Tensor]:
    """One pass over ``N`` rows, padding included: logits of the last ``logit_rows`` and hidden ``[N, H]``.  No shape depends on a value."""
    n, capacity, groups = len(token_ids), buffers.capacity, w.heads // w.kv_heads
    length, count, slots = buffers.length, buffers.count, buffers.slots
    row = slots[:n]
    write = torch.where(row < count, length + row, capacity + row)
    of_row = slots - length  # [capacity]: the row of this pass that a slot holds
    here = (of_row >= 0) & (of_row < count)
    seen = (of_row < 0) | (here & visible.index_select(1, of_row.clamp(0, n - 1)))
    # Not minus infinity: a padding row that sees nothing would become NaN.
    mask = torch.zeros(n, capacity, dtype=w.dtype, device=w.device).masked_fill_(~seen, torch.finfo(w.dtype).min)
    mask = mask.repeat(groups, 1)  # queries that share a key head are stacked, so that the keys need not be repeated
    cos, sin = buffers.cos.index_select(0, positions), buffers.sin.index_select(0, positions)
    x: Tensor = w.embed(token_ids)
    layer: Any
    for layer, kv in zip(w.layers, buffers.kv):
        attention = layer.self_attn
        h = _norm(x, layer.input_layernorm, w.eps)
        queries = attention.q_proj(h).view(n, w.heads, w.head_dim)
        keys = attention.k_proj(h).view(n, w.kv_heads, w.head_dim)
        values = attention.v_proj(h).view(n, w.kv_heads, w.head_dim)
        if getattr(attention, "q_norm", None) is not None:  # Qwen3: per head
            queries, keys = _norm(queries, attention.q_norm, w.eps), _norm(keys, attention.k_norm, w.eps)
        turned = _turn(torch.cat((queries, keys), 1), cos, sin)
        kv.index_copy_(2, write, torch.stack((turned[:, w.heads :], values)).transpose(1, 2))
        # [N, heads, D] -> [1, kv_heads, groups * N, D]
        queries = turned[:, : w.heads].transpose(0, 1).reshape(1, w.kv_heads, groups * n, w.head_dim)
        attended = F.scaled_dot_product_attention(
            queries, kv[None, 0, :, :capacity], kv[None, 1, :, :capacity], attn_mask=mask
        )
        x = x + attention.o_proj(attended.view(w.heads, n, w.head_dim).transpose(0, 1).reshape(n, -1))
        x = x + layer.mlp(_norm(x, layer.post_attention_layernorm, w.eps))
    hidden = _norm(x, w.final_norm, w.eps)
    return w.lm_head(hidden[n - logit_rows :]) if logit_rows else None, hidden


def _norm(x: Tensor, norm: Any, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), norm.weight, eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x [N, heads, D]`` in float32; the first half of ``sin [N, 1, D]`` has its sign changed."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


__all__ = ["ROWS", "GraphForward", "GraphWeights", "Graphs", "Shelf", "Status", "padded", "roomy"]
