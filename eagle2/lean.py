"""A lean forward for the Llama family: the same pass as Hugging Face's model, with little between the matrix products.

It takes the weights of a loaded Llama, Mistral (without sliding window), Qwen2 or Qwen3 and runs one sequence: fused
query-key-value and gate-up products, grouped-query attention without repeated keys, rotary embedding as one complex
product, a preallocated KV cache that commits all layers at once, and packed weights.  Where `eagle2.native` compiles, all
layers of a pass are one call into it; else they are torch's operations, with weights packed for FBGEMM or oneDNN.
`Lean.refusal` says which models it cannot run; those go through the generic adapter in `eagle2.target`.  `LeanHead` runs an
`EagleHead` on the same blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .head import EagleHead, HeadCache
from .native import NativeLayers, NativeLinear, library

ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
MOST_ROWS = NativeLinear.FEW  # of a tree's pass, for the choice of kernels; those of a prompt may have more
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Linear = Callable[[Tensor], Tensor]


def lean_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """``x [N, in] -> [N, out]`` for lean passes, in the `arithmetic` of the weight's dtype; the weight is packed once."""
    weight = weight.detach()
    if (native := _for_pairs(weight)) is not None:
        return NativeLinear(native, weight, bias)
    few, many = half_linear(weight, bias), None
    if few is None:
        dtype = arithmetic(weight)
        weight, bias = weight.to(dtype), None if bias is None else bias.detach().to(dtype)
        if dtype != torch.float32 or weight.device.type != "cpu" or (native := library()) is None:
            return packed_linear(weight, bias)
        return NativeLinear(native, weight, bias)
    if weight.dtype != torch.float32 and packs(weight.dtype):
        # A prompt's many rows wait for the products, not for memory, and this processor has instructions for them.
        many = partial(_linear_in_half, weight, bias)
    if isinstance(few, NativeLinear):  # stays what it is, for the layers that run in one piece
        few.many = many
        return few
    return few if many is None else lambda x: few(x) if len(x) <= MOST_ROWS else many(x)


def draft_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """As `lean_linear`, for drafts: in native code with eight bits per weight, which moves confidences by about 0.01.

    The target verifies whatever is drafted, so the output cannot change.
    """
    native = library() if weight.device.type == "cpu" and weight.dtype != torch.float64 else None
    return lean_linear(weight, bias) if native is None else NativeLinear.rounded(native, weight, bias)


def _linear_in_half(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight, bias).float()


def _for_pairs(weight: Tensor) -> CDLL | None:
    """Native code, where it has products in the weight's bfloat16."""
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
        return None
    return native if (native := library()) is not None and native.eagle2_pairs() else None


def arithmetic(weight: Tensor) -> torch.dtype:
    """Dtype in which lean passes compute with ``weight``: float32 for half precision too where `half_linear` takes it."""
    half = weight.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and weight.device.type == "cpu" and multiplies_halves() else weight.dtype


def half_linear(weight: Tensor, bias: Tensor | None = None) -> Linear | None:
    """``x [N, in] -> float32 [N, out]``: the weight lies in memory as float16, products and sums are float32.

    By `eagle2.native`, else by FBGEMM.  A pass of few rows waits for the weights, which are half as many bytes so, and no
    instructions for half precision are needed.  Weights in float16 and bfloat16 lose nothing that float32's sums would keep:
    where they leave float16's range, a power of two brings them into it and is taken out of the sums again.  Float32 weights
    are taken where that holds for them too, as for models that were published in half precision.

    None for other weights, on other devices, and where there is neither (elsewhere than on x86).
    """
    weight = weight.detach()
    if weight.device.type != "cpu" or weight.dtype == torch.float64 or not multiplies_halves():
        return None
    wide = weight.float()
    largest = max(abs(float(end)) for end in torch.aminmax(wide))
    if not math.isfinite(largest):
        return None
    scale = 1.0
    if not _fits_half(wide, largest):
        # Largest * scale lies between 2^14 and 2^15; the bound keeps a bias within float32.
        scale = 2.0 ** min(15 - math.frexp(largest)[1], 96)
        wide = wide * scale
        if not _fits_half(wide, largest * scale):
            return None
    if (native := library()) is not None:
        return NativeLinear(native, wide.half(), bias, 1 / scale)
    packed = torch.ops.quantized.linear_prepack_fp16(wide, None if bias is None else bias.detach().float() * scale)
    run = torch.ops.quantized.linear_dynamic_fp16.default
    if scale == 1.0:
        return lambda x: run(x.float(), packed)
    unscale = torch.tensor(1 / scale)
    return lambda x: run(x.float(), packed).mul_(unscale)


def _fits_half(weight: Tensor, largest: float) -> bool:
    """Whether float16 holds all of ``weight`` but what is less than float32's rounding of the ``largest`` element."""
    return largest < 65504 and float(weight.half().float().sub_(weight).abs_().max()) <= 2.0**-25 * largest


@cache
def multiplies_halves() -> bool:
    """Whether there are products of float32 rows with float16 weights: our own, or FBGEMM's in torch."""
    if library() is not None:
        return True
    try:
        packed = torch.ops.quantized.linear_prepack_fp16(torch.eye(16), None)
        x = torch.arange(32.0).view(2, 16)
        return torch.equal(torch.ops.quantized.linear_dynamic_fp16(x, packed), x)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


def packed_linear(weight: Tensor, bias: Tensor | None = None, rows: int = 4) -> Linear:
    """``x [..., in] -> [..., out]``; on CPUs the weight is packed once for oneDNN, which plain ``linear`` does on every call.

    ``rows``: of the passes that the layout is chosen for; others work too.  Half precision on a CPU that has no instructions
    for it runs by `half_linear`; without that, one row as it is, and several rows, for which that way costs as many times
    more, through a packed copy in float32.
    """
    weight = weight.detach().contiguous()
    if weight.device.type == "cpu" and weight.dtype != torch.float32 and not packs(weight.dtype):
        narrow = weight.dtype
        if (half := half_linear(weight, bias)) is not None:
            return lambda x: half(x).to(narrow)
        wide = packed_linear(weight.float(), None if bias is None else bias.float(), rows)
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
        self, layers: Sequence[Any], rotary: Any, *, heads: int, kv_heads: int, head_dim: int, eps: float,
        linear: Callable[[Tensor, Tensor | None], Linear] = lean_linear,
    ) -> None:  # fmt: skip
        self._linear = linear
        self.heads, self.kv_heads, self.head_dim, self.eps = heads, kv_heads, head_dim, eps
        self.dtype = arithmetic(layers[0].mlp.down_proj.weight)  # of all activations
        self._floors: dict[int, Tensor] = {}
        self.layers = [self._layer(layer) for layer in layers]
        self._rotary = rotary
        self._turns = torch.empty(0)
        self.native: NativeLayers | None = None
        if NativeLayers.refusal(self.layers, head_dim) is None:
            self.native = NativeLayers(self.layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, eps=eps)

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
            attention_norm=None if input_norm is None else self._own(input_norm.weight),
            qkv=self._linear(torch.cat((q.weight[q_rows], k.weight[k_rows], v.weight)), biases),
            out=self._linear(attention.o_proj.weight, attention.o_proj.bias),
            query_norm=None if query_norm is None else self._own(query_norm.weight)[norm_rows],
            key_norm=None if key_norm is None else self._own(key_norm.weight)[norm_rows],
            mlp_norm=self._own(layer.post_attention_layernorm.weight),
            gate_up=self._linear(
                torch.cat((gate.weight, up.weight)),
                None if gate.bias is None else torch.cat((gate.bias, up.bias)).detach(),
            ),
            down=self._linear(mlp.down_proj.weight, mlp.down_proj.bias),
        )

    def turns(self, positions: Tensor) -> Tensor:
        """Rotations ``[N, D/2]``, complex64, for ``positions [N]``."""
        reach = int(positions.max()) + 1
        if reach > len(self._turns):
            every = torch.arange(max(256, 2 * reach))
            cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), every[None])
            half = self.head_dim // 2
            self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return self._turns[positions]

    def all_turns(self, positions: Tensor) -> Tensor:
        """Rotations ``[N, (heads + 2 * kv_heads) * D/2]``, complex64, of a row of `qkv`; values are not rotated."""
        turns = torch.ones(len(positions), self.heads + 2 * self.kv_heads, self.head_dim // 2, dtype=torch.complex64)
        turns[:, : self.heads + self.kv_heads] = self.turns(positions)[:, None]
        return turns.view(len(positions), -1)

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
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.mul(weight).div_(torch.hypot(length, self._floors[x.shape[-1]]))

    def _own(self, weight: Tensor) -> Tensor:
        """A norm's weight for `norm`."""
        weight = weight.detach().to(self.dtype)
        if self.dtype != torch.float32:
            return weight
        size = len(weight)
        self._floors[size] = torch.tensor((size * self.eps) ** 0.5)  # keeps a row of zeros from a division by zero
        return weight * size**0.5

    def run(
        self, layer: _Layer, x: Tensor, turns: Tensor, mask: Tensor | None, store: Tensor, keys: Tensor, values: Tensor,
        paths: Paths | None = None,
    ) -> Tensor:  # fmt: skip
        """One layer over ``x [N, H]``.

        Writes its rows into ``store [2 * kv_heads, N, D]``, which are the last ones of ``keys`` and ``values
        [1, kv_heads, T, D]``, and attends to all of these.  With ``paths`` each row attends to its own path in order of
        position, whatever other rows there are.
        """
        n = len(x)
        queries = self.fill(layer, x, turns, store)
        if paths is not None:
            seen = paths.attend(queries.reshape(n, self.kv_heads, -1, self.head_dim), keys[0], values[0])
        elif mask is None:  # one row
            queries = queries.view(1, self.kv_heads, -1, self.head_dim)
            seen = F.scaled_dot_product_attention(queries, keys, values).view(1, -1)
        else:
            # [N, heads, D] -> [1, kv_heads, groups * N, D]
            queries = queries.transpose(0, 1).reshape(1, self.kv_heads, -1, self.head_dim)
            seen = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
            seen = seen.view(self.heads, n, self.head_dim).transpose(0, 1).reshape(n, -1)
        x = layer.out(seen).add_(x)
        gate, up = layer.gate_up(self.norm(x, layer.mlp_norm)).chunk(2, -1)
        return layer.down(F.silu(gate).mul_(up)).add_(x)

    def fill(self, layer: _Layer, x: Tensor, turns: Tensor, store: Tensor) -> Tensor:
        """The first part of `run`: keys and values of ``x [N, H]`` into ``store``; gives the queries ``[N, heads, D]``."""
        n, split = len(x), self.heads + self.kv_heads
        h = layer.qkv(x if layer.attention_norm is None else self.norm(x, layer.attention_norm))
        if layer.query_norm is not None and layer.key_norm is not None:
            h = h.view(n, -1, self.head_dim)
            queries, others = self.norm(h[:, : self.heads], layer.query_norm), h[:, split:]
            h = torch.cat((queries, self.norm(h[:, self.heads : split], layer.key_norm), others), 1).view(n, -1)
        queries, new = _turn(h, turns).view(n, -1, self.head_dim).split((self.heads, 2 * self.kv_heads), 1)
        store.copy_(new.transpose(0, 1))
        return queries


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
        self.width, self.inner = int(config.hidden_size), int(config.intermediate_size)
        self.final_norm = self._own(model.base_model.norm.weight)
        if self.native is not None:
            self.native.end_with(self.final_norm)
        head = model.get_output_embeddings()
        self.lm_head = lean_linear(head.weight, head.bias)

    @property
    def arithmetic(self) -> torch.dtype:
        """What products' inputs are rounded to; float32 where they are not.  Sums may be wider."""
        return torch.bfloat16 if isinstance(self.lm_head, NativeLinear) and self.lm_head.pairs else self.dtype

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
        for step in (1, 2, 3, 4, 6, 8, 16, 32) if one_row_alike else (2, 4, 8, 16, 32):
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
        if invariant and weights.native is None and weights.invariant_rows is None:
            raise ValueError("a row's products depend on the other rows here, however they are padded")
        self.weights, self.invariant = weights, invariant
        self.length = 0  # committed rows
        self.capacity = 0
        self._kv = torch.empty(0)  # [layers, 2 * kv_heads, capacity, D]: keys, then values

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
        half = parameters[0].dtype != torch.float32 and _for_pairs(parameters[0]) is None
        if half and packs(parameters[0].dtype) == multiplies_halves():
            size *= 2  # neither: a copy in float32; both: one each for few and for many rows
        if copies and (free := available_memory()) is not None and 1.2 * size > free:
            return f"its packed weights need {size >> 20} MB, and {free >> 20} MB are free"
        if any(module._forward_hooks for module in model.modules()):
            return "it has forward hooks"
        return None

    @property
    def row_invariant(self) -> bool:
        """Whether a row's result does not depend on the other rows; native passes are so in any case."""
        return self.invariant or self.weights.native is not None

    def fork(self) -> Lean:
        return Lean(self.weights, invariant=self.invariant)

    def reset(self, capacity: int) -> None:
        self.length = 0
        if self.capacity < capacity:
            w = self.weights
            self.capacity = capacity
            if w.native is not None:
                self._kv = w.native.new_cache(capacity)
                return
            room = capacity + MOST_ROWS if self.invariant else capacity  # rows of padding lie behind those that count
            self._kv = torch.empty(len(w.layers), 2 * w.kv_heads, room, w.head_dim, dtype=w.dtype)

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; the committed ones stay."""
        if self.capacity < capacity:
            length, before, held = self.length, self._kv, self._kv.shape[2]
            self.reset(capacity)
            self._kv[:, :, :held] = before  # whole panels, where native passes have an order of their own
            self.length = length

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows of the last pass to the end of the prefix, in all layers at once."""
        end = self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            native = self.weights.native
            if native is not None and native.pairs:
                native.keep(self._kv, self.length, rows)
            else:
                index = torch.tensor(rows) + self.length
                self._kv[:, :, self.length : end] = self._kv.index_select(2, index)
        self.length = end

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]``, ``visible [N, N]`` -> logits of the last ``logit_rows`` rows and hidden ``[N, H]``."""
        w = self.weights
        n = len(token_ids)
        if w.native is not None and (logit_rows == n or n <= MOST_ROWS or not w.native.few_only):
            hidden = F.embedding(token_ids, w.embedding).float()
            w.native.run(hidden, w.turns(positions), visible, self._kv, self.length + n)
            lm_head = w.lm_head.few if isinstance(w.lm_head, NativeLinear) else w.lm_head
            return lm_head(hidden[-logit_rows:]) if logit_rows else None, hidden
        mask = paths = None
        if self.invariant and logit_rows == n:  # prompts run in the same chunks in both lanes anyway
            padding = rounded(n, w.invariant_rows or 1) - n
            # Rows that stand for nothing: each sees itself only, and nobody sees it.
            token_ids, positions = (F.pad(each, (0, padding)) for each in (token_ids, positions))
            visible = torch.block_diag(visible, torch.eye(padding)).bool() if padding else visible
            paths = Paths(visible, self.length, w.dtype)
        else:
            mask = w.mask(visible, self.length + n, w.dtype)
        x = F.embedding(token_ids, w.embedding).to(w.dtype)
        turns = w.all_turns(positions)
        # Views for all layers at once: what is done between the products of a pass counts.
        end = self.length + len(x)
        rows, seen = self._kv[:, :, self.length : end], self._kv[:, None, :, :end]
        views = rows.unbind(), seen[:, :, : w.kv_heads].unbind(), seen[:, :, w.kv_heads :].unbind()
        for layer, store, keys, values in zip(w.layers, *views):
            x = w.run(layer, x, turns, mask, store, keys, values, paths)
        hidden = w.norm(x, w.final_norm)
        if paths is not None:  # all rows' logits are wanted, and padding is part of every product
            return w.lm_head(hidden)[:n], hidden[:n]
        return w.lm_head(hidden[-logit_rows:]) if logit_rows else None, hidden


class LeanHead:
    """An `EagleHead` on the lean blocks: the same features from the same calls, sooner.  Its weights are copied.

    ``rounded``: by `draft_linear`.
    """

    def __init__(self, head: EagleHead, *, rounded: bool = False) -> None:
        self.rounded = rounded
        linear = draft_linear if rounded else lean_linear
        config = head.config
        self.config, self.draft_token_ids = config, head.draft_token_ids
        self._blocks = _Blocks(
            list(head.layers),
            head.rotary_module,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            linear=linear,
        )
        self.dtype = self._blocks.dtype
        self._join = linear(head.fc.weight, head.fc.bias)

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
        blocks, new = self._blocks, cache.take(len(embeds))
        x = self._join(torch.cat((embeds, features), -1))
        if blocks.native is not None and (len(x) <= MOST_ROWS or not blocks.native.few_only):
            blocks.native.run(x, blocks.turns(positions), visible, cache.both[None], new.stop)
            return x
        mask = blocks.mask(visible, new.stop, self.dtype)
        keys, values = cache.keys[:, :, : new.stop], cache.values[:, :, : new.stop]
        return blocks.run(blocks.layers[0], x, blocks.all_turns(positions), mask, cache.both[:, new], keys, values)

    def fill(self, embeds: Tensor, features: Tensor, positions: Tensor, cache: HeadCache) -> bool:
        """`step` for rows whose outputs nobody needs: of a head's only layer their keys and values are all that later rows
        see.  False, and nothing is done, where there are more layers.
        """
        blocks = self._blocks
        if len(blocks.layers) != 1:
            return False
        store = cache.both[:, cache.take(len(embeds))]
        blocks.fill(blocks.layers[0], self._join(torch.cat((embeds, features), -1)), blocks.all_turns(positions), store)
        return True


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the adjacent pairs of ``x [N, 2 * M]`` by ``turns [N, M]``, in float32."""
    if x.dtype != torch.float32:
        return _turn(x.float(), turns).to(x.dtype)
    return (x.view(torch.complex64) * turns).view(torch.float32)


__all__ = [
    "CLASSES", "Lean", "LeanHead", "LeanWeights", "Paths", "arithmetic", "available_memory", "draft_linear", "half_linear", "lean_linear",
    "packed_linear", "rounded",
]  # fmt: skip
