"""A lean forward for the Llama family: the same pass as Hugging Face's model, with little between the matrix products.

It takes the weights of a loaded Llama, Mistral (without sliding window), Qwen2 or Qwen3 and runs one sequence: fused
query-key-value and gate-up products, grouped-query attention without repeated keys, rotary embedding as one complex
product, a preallocated KV cache that commits all layers at once, and on CPUs oneDNN's packed weights.  `Lean.refusal`
says which models it cannot run; those go through the generic adapter in `eagle2.target`.  `LeanHead` runs an `EagleHead`
on the same blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .head import EagleHead, HeadCache

ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
MOST_ROWS = 64  # of passes that `LeanWeights.invariant_rows` is found for
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Linear = Callable[[Tensor], Tensor]


def packed_linear(weight: Tensor, bias: Tensor | None = None, rows: int = 4) -> Linear:
    """``x [..., in] -> [..., out]``; on CPUs the weight is packed once for oneDNN, which plain ``linear`` does on every call.

    ``rows``: of the passes that the layout is chosen for; others work too.  Half precision on a CPU that has no instructions
    for it: one row as it is, which takes half of float32's memory traffic; several rows, for which that way costs as many
    times more, through a packed copy in float32.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype != torch.float32 and not packs(weight.dtype):
        wide = packed_linear(weight.float(), None if bias is None else bias.float(), rows)
        narrow = weight.dtype
        return lambda x: F.linear(x, weight, bias) if len(x) == 1 else wide(x.float()).to(narrow)
    if weight.device.type == "cpu" and torch.backends.mkldnn.is_available():
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
            run = torch.ops.mkldnn._linear_pointwise.default
            run(weight.new_zeros(1, weight.shape[1]), packed, bias, "none", [], "")
        except (RuntimeError, AttributeError, NotImplementedError):
            pass  # a build without them
        else:
            return lambda x: run(x, packed, bias, "none", [], "")
    return lambda x: F.linear(x, weight, bias)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in ``dtype``, which oneDNN packs weights for."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), 4)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def available_memory() -> int | None:
    """Bytes that can be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attention_norm: Tensor | None  # None: the layer has no norm before its attention, as EAGLE's
    qkv: Linear
    out: Linear
    query_norm: Tensor | None  # per head, of Qwen3; permuted as the rows of `qkv`
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def _pairs(width: int, heads: int) -> Tensor:
    """Row order that brings the two elements of each rotated pair, ``i`` and ``i + D/2`` of a head, side by side."""
    size = width // heads
    one = torch.arange(size).view(2, size // 2).t().reshape(-1)
    return (torch.arange(heads)[:, None] * size + one).reshape(-1)


class Paths:
    """What each row of a pass attends to, row by row in order of position, padded to a multiple of ``STEP``.

    So a row's sums run over the same numbers in the same order, and over as many of them, whether its path lies in the cache
    in one piece, as in autoregressive decoding, or between the rows of a tree.
    """

    STEP = 64

    def __init__(self, visible: Tensor, start: int, dtype: torch.dtype) -> None:
        """``visible [N, N]`` among the rows behind ``start`` committed ones; ancestors come before their descendants."""
        lengths = start + visible.sum(-1)
        totals = (lengths + self.STEP - 1).div(self.STEP, rounding_mode="floor") * self.STEP
        # Rows of a deep tree may lie on both sides of a multiple of STEP.
        self._groups = [self._group(visible, lengths, totals == total, start, dtype) for total in totals.unique()]

    def _group(
        self, visible: Tensor, lengths: Tensor, chosen: Tensor, start: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Row numbers ``[M]``, their paths' slots ``[M * total]``, and the mask ``[M, 1, 1, total]`` of what is padding."""
        rows = chosen.nonzero()[:, 0]
        total = rounded(int(lengths[rows].max()), self.STEP)
        columns = torch.arange(total)
        mask = torch.zeros(len(rows), 1, 1, total, dtype=dtype)
        mask.masked_fill_((columns >= lengths[rows, None])[:, None, None], torch.finfo(dtype).min)
        slots = columns.clamp(max=start).repeat(len(rows), 1)
        own = start + torch.argsort(~visible[rows], dim=-1, stable=True)  # ancestors and the row itself first
        slots[:, start : start + len(visible)] = own[:, : total - start]
        return rows, slots.view(-1), mask

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``queries [N, kv_heads, groups, D]``, ``keys``, ``values [kv_heads, capacity, D]`` -> ``[N, heads * D]``."""
        heads, _, size = keys.shape
        seen = torch.empty_like(queries)
        for rows, slots, mask in self._groups:
            k, v = (
                cache.index_select(1, slots).view(heads, len(rows), -1, size).transpose(0, 1)
                for cache in (keys, values)
            )
            seen[rows] = F.scaled_dot_product_attention(queries[rows], k, v, attn_mask=mask)
        return seen.view(len(queries), -1)


def rounded(count: int, step: int) -> int:
    """``count`` up to a multiple of ``step``."""
    return -(-count // step) * step


class _Blocks:
    """Decoder layers with fused and packed weights, and the rotations of their positions."""

    def __init__(
        self, layers: Sequence[Any], rotary: Any, *, heads: int, kv_heads: int, head_dim: int, eps: float
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        self.layers = [self._layer(layer) for layer in layers]
        self._rotary = rotary
        self._turns = torch.empty(0)
        self._floors: dict[int, Tensor] = {}

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        q_rows = _pairs(q.weight.shape[0], self.heads)
        k_rows = _pairs(k.weight.shape[0], self.kv_heads)
        biases = None
        if q.bias is not None:
            biases = torch.cat((q.bias[q_rows], k.bias[k_rows], v.bias)).detach()
        norm_rows = _pairs(self.head_dim, 1)
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        input_norm = getattr(layer, "input_layernorm", None)
        gate, up = mlp.gate_proj, mlp.up_proj
        return _Layer(
            attention_norm=None if input_norm is None else input_norm.weight.detach(),
            qkv=packed_linear(torch.cat((q.weight[q_rows], k.weight[k_rows], v.weight)), biases),
            out=packed_linear(attention.o_proj.weight, attention.o_proj.bias),
            query_norm=None if query_norm is None else query_norm.weight.detach()[norm_rows],
            key_norm=None if key_norm is None else key_norm.weight.detach()[norm_rows],
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=packed_linear(
                torch.cat((gate.weight, up.weight)),
                None if gate.bias is None else torch.cat((gate.bias, up.bias)).detach(),
            ),
            down=packed_linear(mlp.down_proj.weight, mlp.down_proj.bias),
        )

    def turns(self, positions: Tensor) -> Tensor:
        """Rotations ``[N, 1, D/2]``, complex64, for ``positions [N]``."""
        reach = int(positions.max()) + 1
        if reach > len(self._turns):
            every = torch.arange(max(256, 2 * reach))
            cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), every[None])
            half = self.head_dim // 2
            self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return self._turns[positions][:, None]

    def mask(self, visible: Tensor, total: int, dtype: torch.dtype) -> Tensor | None:
        """Additive ``[groups * N, total]`` for ``visible [N, T]``, the newest T of ``total`` rows; the others are seen by all.

        None where a single row sees everything.  Queries that share a key head are stacked, so that the keys need not be
        repeated.
        """
        n, newest = visible.shape
        if newest == 1:
            return None
        rows = torch.zeros(n, total, dtype=dtype)
        rows[:, total - newest :].masked_fill_(~visible, torch.finfo(dtype).min)
        return rows.repeat(self.heads // self.kv_heads, 1)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
        # The same in fewer and quicker operations than torch has for it on CPUs.
        size = x.shape[-1]
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(weight).div_(torch.hypot(length, self._floor(size)).mul_(size**-0.5))

    def _floor(self, size: int) -> Tensor:
        """What keeps a row of zeros from a division by zero: sqrt(size * eps)."""
        if size not in self._floors:
            self._floors[size] = torch.tensor((size * self.eps) ** 0.5)
        return self._floors[size]

    def run(
        self, layer: _Layer, x: Tensor, turns: Tensor, mask: Tensor | None, keys: Tensor, values: Tensor, start: int,
        paths: Paths | None = None,
    ) -> Tensor:  # fmt: skip
        """One layer over ``x [N, H]``; writes its rows into ``keys``, ``values [kv_heads, capacity, D]`` from ``start``.

        With ``paths`` each row attends to its own path in order of position, whatever other rows there are.
        """
        n, end = len(x), start + len(x)
        split = self.heads + self.kv_heads
        h = layer.qkv(x if layer.attention_norm is None else self.norm(x, layer.attention_norm))
        h = h.view(n, -1, self.head_dim)
        turned = h[:, :split]
        if layer.query_norm is not None and layer.key_norm is not None:
            turned = torch.cat(
                (
                    self.norm(turned[:, : self.heads], layer.query_norm),
                    self.norm(turned[:, self.heads :], layer.key_norm),
                ),
                1,
            )
        turned = _turn(turned, turns)
        keys[:, start:end] = turned[:, self.heads :].transpose(0, 1)
        values[:, start:end] = h[:, split:].transpose(0, 1)
        if paths is not None:
            queries = turned[:, : self.heads].reshape(n, self.kv_heads, -1, self.head_dim)
            seen = paths.attend(queries, keys, values)
        elif mask is None:  # one row
            queries = turned[:, : self.heads].transpose(0, 1)[None]
            seen = F.scaled_dot_product_attention(
                queries, keys[None, :, :end], values[None, :, :end], enable_gqa=True
            ).view(1, -1)
        else:
            # [N, heads, D] -> [1, kv_heads, groups * N, D]
            queries = turned[:, : self.heads].transpose(0, 1).reshape(1, self.kv_heads, -1, self.head_dim)
            seen = F.scaled_dot_product_attention(queries, keys[None, :, :end], values[None, :, :end], attn_mask=mask)
            seen = seen.view(self.heads, n, self.head_dim).transpose(0, 1).reshape(n, -1)
        x = x + layer.out(seen)
        gate, up = layer.gate_up(self.norm(x, layer.mlp_norm)).chunk(2, -1)
        return x + layer.down(F.silu(gate).mul_(up))


class LeanWeights(_Blocks):
    """The weights of one model, fused and packed; shared by all sequences that run on it."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        super().__init__(
            model.base_model.layers,
            model.base_model.rotary_emb,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            eps=config.rms_norm_eps,
        )
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.dtype = self.embedding.dtype
        self.width, self.inner = int(config.hidden_size), int(config.intermediate_size)
        self.final_norm: Tensor = model.base_model.norm.weight
        head = model.get_output_embeddings()
        self.lm_head = packed_linear(head.weight, head.bias)

    @cached_property
    def invariant_rows(self) -> int | None:
        """Fewest rows to whose multiples passes must be padded for a row's products not to depend on the other rows.

        1 where they never do; None where no such number was found.  Kernels choose other orders of summation for other
        numbers of rows, on each processor in another way, so it is found by trying.
        """
        layer = self.layers[0]
        linears = (layer.qkv, layer.out, layer.gate_up, layer.down, self.lm_head)
        generator = torch.Generator().manual_seed(0)
        widths = (self.width, self.heads * self.head_dim, self.width, self.inner, self.width)
        inputs = [torch.randn(MOST_ROWS, width, generator=generator).to(self.dtype) for width in widths]
        outputs = [linear(x) for linear, x in zip(linears, inputs)]
        one_row_alike = self.dtype == torch.float32 or packs(self.dtype)  # see `packed_linear`
        for step in (1, 2, 4, 8, 16, 32) if one_row_alike else (2, 4, 8, 16, 32):
            if all(
                torch.equal(linear(x[:rows]), y[:rows])
                for linear, x, y in zip(linears, inputs, outputs)
                for rows in range(step, MOST_ROWS, step)
            ):
                return step
        return None


class Lean:
    """One sequence: the committed prefix, then the rows of the last pass.  Same calls as `eagle2.target`'s adapter."""

    def __init__(self, weights: LeanWeights, *, invariant: bool = False) -> None:
        """``invariant``: a row's result does not depend on how many rows ride along, so that in half precision, where
        kernels round differently for each number of rows, the lanes of a race hardly ever part.  ValueError
        where this processor's kernels do not allow it.
        """
        if invariant and weights.invariant_rows is None:
            raise ValueError("a row's products depend on the other rows here, however they are padded")
        self.weights, self.invariant = weights, invariant
        self.length = 0  # committed rows
        self.capacity = 0
        self._kv = torch.empty(0)  # [layers, 2, kv_heads, capacity, D]: keys, values

    @staticmethod
    def refusal(model: Any, *, copies: bool = True) -> str | None:
        """Why this model needs the generic adapter; None where the lean forward can run it.

        ``copies=False``: for a forward that takes the same models and no copy of their weights (`eagle2.graphs`).
        """
        config = model.config.get_text_config()
        if type(model).__name__ not in CLASSES:
            return f"{type(model).__name__} is not of {', '.join(CLASSES)}"
        if getattr(config, "hidden_act", "silu") != "silu":
            return f"its activation is {config.hidden_act}"
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope not in ROPE_TYPES:
            return f"its rotary embedding is of type {rope}"
        parameters = list(model.parameters())
        if any(parameter.device != parameters[0].device for parameter in parameters):
            return "its weights lie on several devices"
        if any(type(module) is not nn.Linear for name, module in model.named_modules() if name.endswith("_proj")):
            return "its linear layers are quantized or adapted"
        if any(parameter.dtype != parameters[0].dtype for parameter in parameters):
            return "its weights have several dtypes"
        if type(model.get_output_embeddings()) is not nn.Linear:
            return f"its LM head is a {type(model.get_output_embeddings()).__name__}"
        if copies and parameters[0].device.type != "cpu":
            return f"it is on {parameters[0].device.type}, where a second copy of the weights is too dear"
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        if not packs(parameters[0].dtype):
            size *= 2  # a copy in float32
        if copies and (free := available_memory()) is not None and 1.2 * size > free:
            return f"its packed weights need {size >> 20} MB, and {free >> 20} MB are free"
        if any(module._forward_hooks for module in model.modules()):
            return "it has forward hooks"
        return None

    def fork(self) -> Lean:
        return Lean(self.weights, invariant=self.invariant)

    def reset(self, capacity: int) -> None:
        self.length = 0
        if self.capacity < capacity:
            w = self.weights
            self.capacity = capacity
            room = capacity + MOST_ROWS if self.invariant else capacity  # rows of padding lie behind those that count
            self._kv = torch.empty(len(w.layers), 2, w.kv_heads, room, w.head_dim, dtype=w.dtype)

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; the committed ones stay."""
        if self.capacity < capacity:
            length, before = self.length, self._kv
            self.reset(capacity)
            self._kv[..., :length, :] = before[..., :length, :]
            self.length = length

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows of the last pass to the end of the prefix, in all layers at once."""
        end = self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            index = torch.tensor(rows) + self.length
            self._kv[..., self.length : end, :] = self._kv.index_select(3, index)
        self.length = end

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]``, ``visible [N, N]`` -> logits of the last ``logit_rows`` rows and hidden ``[N, H]``."""
        w = self.weights
        n = len(token_ids)
        mask = paths = None
        if self.invariant and logit_rows == n:  # prompts run in the same chunks in both lanes anyway
            padding = rounded(n, w.invariant_rows or 1) - n
            # Rows that stand for nothing: each sees itself only, and nobody sees it.
            token_ids, positions = (F.pad(each, (0, padding)) for each in (token_ids, positions))
            visible = torch.block_diag(visible, torch.eye(padding)).bool() if padding else visible
            paths = Paths(visible, self.length, w.dtype)
        else:
            mask = w.mask(visible, self.length + n, w.dtype)
        x = F.embedding(token_ids, w.embedding)
        turns = w.turns(positions)
        for layer, (keys, values) in zip(w.layers, self._kv):
            x = w.run(layer, x, turns, mask, keys, values, self.length, paths)
        hidden = w.norm(x, w.final_norm)
        if paths is not None:  # all rows' logits are wanted, and padding is part of every product
            return w.lm_head(hidden)[:n], hidden[:n]
        return w.lm_head(hidden[-logit_rows:]) if logit_rows else None, hidden


class LeanHead:
    """An `EagleHead` on the lean blocks: the same features from the same calls, sooner.  Its weights are copied."""

    def __init__(self, head: EagleHead) -> None:
        config = head.config
        self.config, self.draft_token_ids = config, head.draft_token_ids
        self.dtype: torch.dtype = head.dtype
        self._blocks = _Blocks(
            list(head.layers),
            head.rotary_module,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
        )
        self._join = packed_linear(head.fc.weight, head.fc.bias)

    @staticmethod
    def refusal(head: EagleHead) -> str | None:
        """Why this head must run as it is; None where the lean blocks can run it."""
        if head.fc.weight.device.type != "cpu":
            return f"it is on {head.fc.weight.device.type}"
        rope = head.config.rope.get("rope_type", "default")
        if rope not in ROPE_TYPES:
            return f"its rotary embedding is of type {rope}"
        if any(type(module) is not nn.Linear for name, module in head.named_modules() if name.endswith("_proj")):
            return "its linear layers are quantized or adapted"
        return None

    def new_cache(self, capacity: int) -> HeadCache:
        return HeadCache(self.config, capacity, torch.device("cpu"), self.dtype)

    def step(self, embeds: Tensor, features: Tensor, positions: Tensor, visible: Tensor, cache: HeadCache) -> Tensor:
        """As `EagleHead.step`."""
        blocks, start = self._blocks, cache.length + cache.rows
        cache.take(len(embeds))
        keys, values = cache.keys[0], cache.values[0]
        x = self._join(torch.cat((embeds, features), -1))
        mask = blocks.mask(visible, start + len(embeds), self.dtype)
        return blocks.run(blocks.layers[0], x, blocks.turns(positions), mask, keys, values, start)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the adjacent pairs of ``x [N, heads, D]``, in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


__all__ = ["CLASSES", "Lean", "LeanHead", "LeanWeights", "Paths", "available_memory", "packed_linear", "rounded"]
