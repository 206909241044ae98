"""A lean forward for the Llama family: the same pass as Hugging Face's model, with little between the matrix products.

It takes the weights of a loaded Llama, Mistral (without sliding window), Qwen2 or Qwen3 and runs one sequence: fused
query-key-value and gate-up products, grouped-query attention without repeated keys, rotary embedding as one complex
product, a preallocated KV cache that commits all layers at once, and on CPUs oneDNN's packed weights.  `Lean.refusal`
says which models it cannot run; those go through the generic adapter in `eagle2.target`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROPE_TYPES = ("default", "linear", "llama3")  # angles that depend on the position alone
CLASSES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

Linear = Callable[[Tensor], Tensor]


def packed_linear(weight: Tensor, bias: Tensor | None = None, rows: int = 4) -> Linear:
    """``x [..., in] -> [..., out]``; on CPUs the weight is packed once for oneDNN, which plain ``linear`` does on every call.

    ``rows``: of the passes that the layout is chosen for; others work too.
    """
    weight = weight.detach().contiguous()
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
    attention_norm: Tensor
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


class LeanWeights:
    """The weights of one model, fused and packed; shared by all sequences that run on it."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        base = model.base_model
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = getattr(config, "num_key_value_heads", None) or self.heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps: float = config.rms_norm_eps
        self.embedding: Tensor = model.get_input_embeddings().weight
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self.final_norm: Tensor = base.norm.weight
        head = model.get_output_embeddings()
        self.lm_head = packed_linear(head.weight, head.bias)
        self.layers = [self._layer(layer) for layer in base.layers]
        self._rotary = base.rotary_emb
        self._turns = torch.empty(0)

    def _layer(self, layer: nn.Module) -> _Layer:
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        q_rows = _pairs(q.weight.shape[0], self.heads)
        k_rows = _pairs(k.weight.shape[0], self.kv_heads)
        biases = None
        if q.bias is not None:
            biases = torch.cat((q.bias[q_rows], k.bias[k_rows], v.bias)).detach()
        norm_rows = _pairs(self.head_dim, 1)
        query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        gate, up = mlp.gate_proj, mlp.up_proj
        return _Layer(
            attention_norm=layer.input_layernorm.weight.detach(),  # type: ignore[union-attr, operator]
            qkv=packed_linear(torch.cat((q.weight[q_rows], k.weight[k_rows], v.weight)), biases),
            out=packed_linear(attention.o_proj.weight, attention.o_proj.bias),
            query_norm=None if query_norm is None else query_norm.weight.detach()[norm_rows],
            key_norm=None if key_norm is None else key_norm.weight.detach()[norm_rows],
            mlp_norm=layer.post_attention_layernorm.weight.detach(),  # type: ignore[union-attr, operator]
            gate_up=packed_linear(
                torch.cat((gate.weight, up.weight)),
                None if gate.bias is None else torch.cat((gate.bias, up.bias)).detach(),
            ),
            down=packed_linear(mlp.down_proj.weight, mlp.down_proj.bias),
        )

    def turns(self, positions: Tensor) -> Tensor:
        """Rotations ``[N, 1, D/2]``, complex64, for ``positions [N]``."""
        reach = int(positions.max()) + 1 if positions.device.type == "cpu" else 0
        if reach > len(self._turns):
            every = torch.arange(max(256, 2 * reach), device=self.device)
            cos, sin = self._rotary(torch.empty(0, dtype=torch.float32, device=self.device), every[None])
            half = self.head_dim // 2
            self._turns = torch.complex(cos[0, :, :half], sin[0, :, :half])
        return self._turns[positions][:, None]


class Lean:
    """One sequence: the committed prefix, then the rows of the last pass.  Same calls as `eagle2.target`'s adapter."""

    def __init__(self, weights: LeanWeights) -> None:
        self.weights = weights
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
        if copies and parameters[0].device.type != "cpu":
            return f"it is on {parameters[0].device.type}, where a second copy of the weights is too dear"
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        if copies and (free := available_memory()) is not None and 1.2 * size > free:
            return f"its packed weights need {size >> 20} MB, and {free >> 20} MB are free"
        if any(module._forward_hooks for module in model.modules()):
            return "it has forward hooks"
        return None

    def fork(self) -> Lean:
        return Lean(self.weights)

    def reset(self, capacity: int) -> None:
        self.length = 0
        if self.capacity < capacity:
            w = self.weights
            self.capacity = capacity
            self._kv = torch.empty(len(w.layers), 2, w.kv_heads, capacity, w.head_dim, dtype=w.dtype, device=w.device)

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows of the last pass to the end of the prefix, in all layers at once."""
        end = self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            index = torch.tensor(rows, device=self._kv.device) + self.length
            self._kv[..., self.length : end, :] = self._kv.index_select(3, index)
        self.length = end

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, want_logits: bool
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]``, ``visible [N, N]`` among this pass's rows -> logits ``[N, V]`` and hidden ``[N, H]``."""
        w = self.weights
        n, start, end = len(token_ids), self.length, self.length + len(token_ids)
        groups = w.heads // w.kv_heads
        x = F.embedding(token_ids, w.embedding)
        turns = w.turns(positions)
        mask = None
        if n > 1:
            rows = torch.zeros(n, end, dtype=w.dtype, device=w.device)
            rows[:, start:].masked_fill_(~visible.to(w.device), torch.finfo(w.dtype).min)
            # Queries that share a key head are stacked, so that the keys need not be repeated.
            mask = rows.repeat(groups, 1)
        for layer, kv in zip(w.layers, self._kv):
            h = layer.qkv(self._norm(x, layer.attention_norm)).view(n, -1, w.head_dim)
            turned = h[:, : w.heads + w.kv_heads]
            if layer.query_norm is not None and layer.key_norm is not None:
                turned = torch.cat(
                    (
                        self._norm(turned[:, : w.heads], layer.query_norm),
                        self._norm(turned[:, w.heads :], layer.key_norm),
                    ),
                    1,
                )
            turned = _turn(turned, turns)
            kv[0, :, start:end] = turned[:, w.heads :].transpose(0, 1)
            kv[1, :, start:end] = h[:, w.heads + w.kv_heads :].transpose(0, 1)
            # [N, heads, D] -> [1, kv_heads, groups * N, D]
            queries = turned[:, : w.heads].transpose(0, 1).reshape(1, w.kv_heads, groups * n, w.head_dim)
            seen = F.scaled_dot_product_attention(queries, kv[None, 0, :, :end], kv[None, 1, :, :end], attn_mask=mask)
            x = x + layer.out(seen.view(w.heads, n, w.head_dim).transpose(0, 1).reshape(n, -1))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        hidden = self._norm(x, w.final_norm)
        return w.lm_head(hidden) if want_logits else None, hidden

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.weights.eps)


def _turn(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate the adjacent pairs of ``x [N, heads, D]``, in float32."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


__all__ = ["CLASSES", "Lean", "LeanWeights", "available_memory", "packed_linear"]
