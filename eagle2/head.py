"""The EAGLE draft head: one decoder layer over the target's features, in the official checkpoint format.

The head (EAGLE paper, arXiv 2401.15077, section 4.1) predicts the target's next feature: ``fc`` joins the embedding of
token i+1 and the feature of position i, one decoder layer without an input norm follows, and the target's own LM head
turns the result into draft logits, with no norm in between.

A checkpoint may name the tokens that its head drafts (FR-Spec, arXiv 2502.14856): ``draft_token_ids``, int32 or int64
``[v]``, ids of the target's vocabulary in increasing order.  This is not EAGLE-3's ``d2t``/``t2d``: the LM head stays
the target's own, of which only these rows are used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from .checkpoint import HeadFormatError, read_config, read_tensors

COPY_ROWS = 1024  # of a copy of the target's matrix that are compared with it
COPY_LIMIT = 0.02  # relative difference: float16 and bfloat16 copies of the same numbers differ by 0.002


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Shape of a head; ``rope`` is what `transformers.LlamaConfig` calls ``rope_parameters``."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    hidden_act: str = "silu"
    fc_bias: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise HeadFormatError(f"the head's config has {name} {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadFormatError(
                f"the head's config has {self.num_attention_heads} attention heads, which do not divide into "
                f"{self.num_key_value_heads} key/value heads"
            )
        if self.hidden_act != "silu":
            raise HeadFormatError(
                f"the head's config asks for the activation {self.hidden_act!r}; only 'silu' is supported"
            )

    @classmethod
    def for_target(cls, config: Any) -> HeadConfig:
        """A head as wide as the target, with the Llama family's layer whatever the target's own is."""
        data = config.to_dict() | {"vocab_size": config.vocab_size, "hidden_act": "silu"}
        data |= {name: getattr(config, name) for name in config.attribute_map}  # GPT-2 says n_embd, n_head, ...
        data.setdefault("intermediate_size", 4 * data["hidden_size"])
        return cls.from_dict(data, fc_bias=False, attention_bias=False)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, fc_bias: bool, attention_bias: bool) -> HeadConfig:
        """From an official ``config.json``. Whether there are biases is for the tensors to say, not for the config."""
        try:
            heads = int(data["num_attention_heads"])
            return cls(
                hidden_size=int(data["hidden_size"]),
                intermediate_size=int(data["intermediate_size"]),
                num_attention_heads=heads,
                num_key_value_heads=int(data.get("num_key_value_heads") or heads),
                head_dim=int(data.get("head_dim") or int(data["hidden_size"]) // heads),
                vocab_size=int(data["vocab_size"]),
                rms_norm_eps=float(data.get("rms_norm_eps") or 1e-6),
                rope=_rope(data),
                max_position_embeddings=int(data.get("max_position_embeddings") or 2048),
                hidden_act=str(data.get("hidden_act") or "silu"),
                fc_bias=fc_bias,
                attention_bias=attention_bias,
            )
        except HeadFormatError:
            raise
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise HeadFormatError(f"the head's config.json lacks or garbles a setting: {error}") from error

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """What the checkpoint must hold: shapes by official name."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj.weight": (queries, width), "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width), "self_attn.o_proj.weight": (width, queries),
            "mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner), "post_attention_layernorm.weight": (width,),
        }  # fmt: skip
        if self.attention_bias:
            layer |= {"self_attn.q_proj.bias": (queries,)}
            layer |= {"self_attn.k_proj.bias": (keys,), "self_attn.v_proj.bias": (keys,)}
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width)}
        if self.fc_bias:
            shapes["fc.bias"] = (width,)
        return shapes | {f"layers.0.{name}": shape for name, shape in layer.items()}

    def to_llama(self) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            num_hidden_layers=1,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope),
            max_position_embeddings=self.max_position_embeddings,
            hidden_act=self.hidden_act,
            attention_bias=self.attention_bias,
        )


class HeadCache:
    """KV rows of the head's layer: ``[1, kv_heads, capacity, head_dim]``; the first ``length`` are committed."""

    def __init__(self, config: HeadConfig, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (2 * config.num_key_value_heads, capacity, config.head_dim)
        self.both = torch.empty(shape, device=device, dtype=dtype)  # keys, then values
        self.length = 0  # committed rows, which come from the target's features
        self.rows = 0  # rows behind them that belong to the tree under way

    @property
    def keys(self) -> Tensor:
        return self.both[None, : len(self.both) // 2]

    @property
    def values(self) -> Tensor:
        return self.both[None, len(self.both) // 2 :]

    @property
    def capacity(self) -> int:
        return self.both.shape[1]

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; what is held stays."""
        if capacity <= self.capacity:
            return
        held = self.length + self.rows
        before = self.both
        self.both = before.new_empty(len(before), capacity, before.shape[2])
        self.both[:, :held] = before[:, :held]

    def take(self, count: int) -> slice:
        """The next ``count`` rows, to be written; ValueError where there is no room for them."""
        start = self.length + self.rows
        if start + count > self.capacity:
            raise ValueError(f"the draft head's KV cache has {self.capacity} rows, this pass needs {start + count}")
        self.rows += count
        return slice(start, start + count)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new = self.take(keys.shape[2])
        self.keys[:, :, new] = keys
        self.values[:, :, new] = values
        return self.keys[:, :, : new.stop], self.values[:, :, : new.stop]

    def commit(self) -> None:
        """Make the rows behind the prefix part of it."""
        self.length += self.rows
        self.rows = 0

    def drop_rows(self) -> None:
        """Forget the tree's rows."""
        self.rows = 0


class DraftHead(Protocol):
    """What a drafter needs of a head: an `EagleHead`, or the same head on the lean blocks (`eagle2.lean`)."""

    draft_token_ids: Tensor | None

    @property
    def dtype(self) -> torch.dtype: ...

    def new_cache(self, capacity: int) -> HeadCache: ...

    def step(self, embeds: Tensor, features: Tensor, positions: Tensor, visible: Tensor, cache: HeadCache) -> Tensor:
        """See `EagleHead.step`."""


class _Attention(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, width, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``x [B, S, H]`` to rotated queries ``[B, heads, S, D]`` and keys, values ``[B, kv_heads, S, D]``."""
        shape = (*x.shape[:2], -1, self.config.head_dim)
        queries = self.q_proj(x).view(shape).transpose(1, 2)
        keys = self.k_proj(x).view(shape).transpose(1, 2)
        values = self.v_proj(x).view(shape).transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        return queries, keys, values

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """``mask`` is additive or boolean ``[B or 1, 1, S, T]``; None: causal."""
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=mask is None)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


class _Mlp(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    """A Llama decoder layer without its input norm, as in the official head's layer 0."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual, norm and MLP after the attention."""
        x = x + attended
        result: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return result


class EagleHead(nn.Module):
    """The draft head. Parameters have the official names (``fc.weight``, ``layers.0.self_attn.q_proj.weight``, ...).

    ``draft_token_ids``: int64 ``[v]``, the only tokens that are drafted; None: all of the target's.  See
    `with_draft_tokens`.
    """

    draft_token_ids: Tensor | None

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList([_Layer(config)])
        self._rotary = [LlamaRotaryEmbedding(config.to_llama())]  # in a list: its buffers are no part of the checkpoint
        # A buffer moves with the head; not persistent: the state dict holds what is trained, and nothing else.
        self.register_buffer("draft_token_ids", None, persistent=False)

    def with_draft_tokens(self, token_ids: Tensor | None) -> EagleHead:
        """Draft only ``token_ids [v]`` from now on, or any token (None); returns the head itself.

        The ids are int32 or int64, strictly increasing and at least two.  Raises `HeadFormatError` otherwise.
        """
        if token_ids is not None:
            _check_draft_tokens(token_ids, self.config.vocab_size)
            token_ids = token_ids.detach().to(self.fc.weight.device, torch.int64, copy=True)
        self.draft_token_ids = token_ids
        return self

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def rotary_module(self) -> LlamaRotaryEmbedding:
        return self._rotary[0]

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[B, S, D]`` for ``positions [B, S]``."""
        if self._rotary[0].inv_freq.device != positions.device:
            self._rotary[0] = self._rotary[0].to(positions.device)
        cos, sin = self._rotary[0](torch.empty(0, dtype=dtype, device=positions.device), positions)
        return cos, sin

    def join(self, embeds: Tensor, features: Tensor) -> Tensor:
        """``fc`` over (embedding of token i+1, feature of position i), embedding first; both ``[B, S, H]``."""
        result: Tensor = self.fc(torch.cat((embeds, features), -1))
        return result

    def forward(
        self, embeds: Tensor, features: Tensor, positions: Tensor, mask: Tensor | None = None,
        cache: HeadCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Predicted next features ``[B, S, H]``.

        ``positions [B, S]`` are those of the features.  ``mask`` is ``[B or 1, 1, S, T]`` over the cache's rows and
        this pass's; None: causal (only without earlier rows).
        """
        layer: _Layer = self.layers[0]  # type: ignore[assignment]
        x = self.join(embeds, features)
        queries, keys, values = layer.self_attn.qkv(x, *self.rotary(positions, x.dtype))
        if cache is not None:
            keys, values = cache.append(keys, values)
        return layer.finish(x, layer.self_attn.attend(queries, keys, values, mask))

    def step(self, embeds: Tensor, features: Tensor, positions: Tensor, visible: Tensor, cache: HeadCache) -> Tensor:
        """`forward` for one sequence: ``embeds``, ``features [n, H]``, ``positions [n]`` -> ``[n, H]``.

        ``visible [n, rows + n]`` covers the cache's rows that are not committed, and this pass's; all see the committed.
        """
        mask = torch.cat((visible.new_ones(len(visible), cache.length), visible), -1)
        result: Tensor = self(embeds[None], features[None], positions[None], mask[None, None], cache)[0]
        return result

    def new_cache(self, capacity: int) -> HeadCache:
        return HeadCache(self.config, capacity, self.fc.weight.device, self.fc.weight.dtype)

    def save(self, folder: str | Path, *, dtype: torch.dtype = torch.float16) -> None:
        """Write ``config.json`` and ``model.safetensors`` with official names; no copy of the target's matrices.

        ``dtype`` is that of the weights; ``draft_token_ids`` (int32 on disk) is there where the head has them.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.config.to_llama().to_dict()
        keep = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act", "attention_bias",
            "num_hidden_layers",
        )  # fmt: skip
        official = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": self.config.fc_bias}
        official |= {key: config[key] for key in keep}
        official |= {
            "rope_theta": self.config.rope.get("rope_theta", 10000.0),
            "torch_dtype": str(dtype).split(".")[-1],
        }
        (folder / "config.json").write_text(json.dumps(official, indent=2) + "\n")
        tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in self.state_dict().items()}
        if self.draft_token_ids is not None:
            tensors["draft_token_ids"] = self.draft_token_ids.to("cpu", torch.int32)
        partial = folder / "model.safetensors.partial"
        save_file(tensors, partial, {"format": "pt"})
        partial.chmod(0o644)  # safetensors writes 0600; a head is meant to be read
        partial.replace(folder / "model.safetensors")

    @classmethod
    def load(
        cls, folder: str | Path, *, target_config: Any = None, target: Any = None, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> EagleHead:  # fmt: skip
        """Read a head folder; every tensor must be present, known and of the right shape.

        With ``target_config`` the head must fit that target.  With ``target``, the loaded model, copies of its matrices
        in the file must also be equal to its own.  Raises `HeadFormatError` with one sentence otherwise.
        """
        folder = Path(folder)
        tensors, data = read_tensors(folder), read_config(folder)
        # The file decides about biases: configs are often wrong about them.
        config = HeadConfig.from_dict(
            data, fc_bias="fc.bias" in tensors, attention_bias="layers.0.self_attn.q_proj.bias" in tensors
        )
        if data.get("num_hidden_layers", 1) != 1:
            raise HeadFormatError(
                f"{folder}/config.json speaks of {data['num_hidden_layers']} layers; an EAGLE-1 or EAGLE-2 head has 1"
            )
        if target is not None:
            target_config = target.config.get_text_config()
        if target_config is not None:
            for name in ("hidden_size", "vocab_size"):
                found, expected = getattr(config, name), getattr(target_config, name)
                if found != expected:
                    raise HeadFormatError(
                        f"the head in {folder} has {name} {found}, the target {expected}: it was made for another target"
                    )
        for name in ("embed_tokens", "lm_head"):
            if (copy := tensors.pop(f"{name}.weight", None)) is not None:
                _check_copy(folder, f"{name}.weight", copy, config, target)
        frequencies = tensors.pop("layers.0.self_attn.rotary_emb.inv_freq", None)
        token_ids = tensors.pop("draft_token_ids", None)
        _check_tensors(folder, tensors, config)
        _check_rope(folder, config, frequencies)
        head = cls(config).to(dtype)
        if token_ids is not None:
            head.with_draft_tokens(token_ids)
        head.load_state_dict(tensors)
        for name, value in head.state_dict().items():
            if not torch.isfinite(value).all():
                kind = str(dtype).split(".")[-1]
                raise HeadFormatError(f"the head's {name} holds values beyond the range of {kind}; use bfloat16")
        return head.to(device=device).eval().requires_grad_(False)


def _rope(data: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings as transformers 5 names them, from ``rope_parameters`` or the older ``rope_scaling``, ``rope_theta``."""
    rope = {"rope_type": "default", "rope_theta": data.get("rope_theta") or 10000.0}
    for key in ("rope_parameters", "rope_scaling"):
        given = dict(data.get(key) or {})
        if any(isinstance(value, dict) for value in given.values()):
            raise HeadFormatError(f"the head's config has rotary settings for several kinds of layers: {given}")
        if "type" in given:
            given.setdefault("rope_type", given.pop("type"))
        rope |= {name: value for name, value in given.items() if value is not None}
    rope["rope_theta"] = float(rope["rope_theta"])
    if rope["rope_type"] != "default" and rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
        raise HeadFormatError(
            f"the head's config asks for the rotary embedding {rope['rope_type']!r}; known are default, "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    return rope


def _check_copy(folder: Path, name: str, copy: Tensor, config: HeadConfig, target: Any) -> None:
    """Raise unless ``copy [V, H]``, which many files hold, is the target's own matrix; that one is then used.

    Fewer rows than all are compared.  A target whose weights lie elsewhere (offloaded) cannot be compared with.
    """
    expected = (config.vocab_size, config.hidden_size)
    if tuple(copy.shape) != expected:
        raise HeadFormatError(
            f"the head's {name} has shape {list(copy.shape)}; its config.json calls for {list(expected)}"
        )
    if target is None:
        return
    layer = target.get_input_embeddings() if name.startswith("embed") else target.get_output_embeddings()
    own = getattr(layer, "weight", None)
    if own is None or own.is_meta or not own.is_floating_point() or own.shape != copy.shape:
        return
    rows = torch.linspace(0, len(copy) - 1, min(len(copy), COPY_ROWS)).long()
    theirs = own.detach()[rows.to(own.device)].float().cpu()
    difference = float((copy[rows].float() - theirs).norm() / theirs.norm().clamp_min(1e-30))
    if not difference <= COPY_LIMIT:  # also for NaN
        raise HeadFormatError(
            f"the head in {folder} holds a copy of its target's {name} that differs from this target's by "
            f"{difference:.0%}: it was made for another target"
        )


def _check_rope(folder: Path, config: HeadConfig, stored: Tensor | None) -> None:
    """Raise unless the rotary settings work and give the frequencies that the file stores (older files do)."""
    try:
        expected = LlamaRotaryEmbedding(config.to_llama()).inv_freq
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise HeadFormatError(f"the head's rotary settings {config.rope} cannot be used: {error}") from error
    if stored is not None and not (
        stored.shape == expected.shape and torch.allclose(stored.float(), expected, rtol=0.01)
    ):
        raise HeadFormatError(
            f"the head in {folder} stores rotary frequencies that are not those of its config.json ({config.rope})"
        )


def _check_tensors(folder: Path, tensors: dict[str, Tensor], config: HeadConfig) -> None:
    shapes = config.tensor_shapes
    norm = tensors.get("layers.0.input_layernorm.weight")
    if norm is not None and bool((norm == 1).all()):  # a placeholder: a trained one would not be exactly 1
        del tensors["layers.0.input_layernorm.weight"]
    missing, unknown = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing:
        raise HeadFormatError(f"the head in {folder} lacks {', '.join(missing)}")
    if unknown:
        raise HeadFormatError(f"the head in {folder} has tensors that an EAGLE-2 head does not: {', '.join(unknown)}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise HeadFormatError(
                f"the head's {name} has shape {list(tensors[name].shape)}; its config.json calls for {list(shape)}"
            )
        if not torch.isfinite(tensors[name].float()).all():
            raise HeadFormatError(f"the head's {name} holds values that are not numbers")


def _check_draft_tokens(token_ids: Tensor, vocab_size: int) -> None:
    """Raise `HeadFormatError` unless ``token_ids [v]`` are increasing ids of a vocabulary of ``vocab_size`` tokens."""
    if token_ids.dim() != 1 or token_ids.dtype not in (torch.int32, torch.int64):
        kind = str(token_ids.dtype).split(".")[-1]
        raise HeadFormatError(
            f"the head's draft_token_ids has shape {list(token_ids.shape)} and dtype {kind}; "
            "it must be one row of int32 or int64"
        )
    if len(token_ids) < 2:
        raise HeadFormatError(f"the head's draft_token_ids names {len(token_ids)} tokens; at least 2 are needed")
    if not (token_ids[1:] > token_ids[:-1]).all():
        raise HeadFormatError("the head's draft_token_ids is not strictly increasing")
    low, high = int(token_ids[0]), int(token_ids[-1])
    if low < 0 or high >= vocab_size:
        raise HeadFormatError(
            f"the head's draft_token_ids runs from {low} to {high}, outside of the vocabulary of {vocab_size} tokens"
        )
