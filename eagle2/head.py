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
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb


class HeadFormatError(ValueError):
    """The folder does not hold a usable EAGLE-1/2 head for this target; the message says what was found and expected."""


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
            rope = data.get("rope_parameters") or {
                "rope_type": "default",
                "rope_theta": data.get("rope_theta", 10000.0),
            }
            if data.get("rope_scaling"):
                scaling = dict(data["rope_scaling"])
                rope = {**rope, **scaling, "rope_type": scaling.get("rope_type", scaling.get("type", "default"))}
            return cls(
                hidden_size=int(data["hidden_size"]),
                intermediate_size=int(data["intermediate_size"]),
                num_attention_heads=heads,
                num_key_value_heads=int(data.get("num_key_value_heads") or heads),
                head_dim=int(data.get("head_dim") or data["hidden_size"] // heads),
                vocab_size=int(data["vocab_size"]),
                rms_norm_eps=float(data.get("rms_norm_eps", 1e-6)),
                rope=rope,
                max_position_embeddings=int(data.get("max_position_embeddings", 2048)),
                hidden_act=str(data.get("hidden_act", "silu")),
                fc_bias=fc_bias,
                attention_bias=attention_bias,
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, HeadFormatError):
                raise
            raise HeadFormatError(f"the head's config.json lacks or garbles a setting: {error}") from error

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
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.empty(shape, device=device, dtype=dtype)
        self.values = torch.empty(shape, device=device, dtype=dtype)
        self.length = 0  # committed rows, which come from the target's features
        self.rows = 0  # rows behind them that belong to the tree under way

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

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
        cls, folder: str | Path, *, target_config: Any = None, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> EagleHead:  # fmt: skip
        """Read a head folder; every tensor must be present, known and of the right shape.

        With ``target_config`` the head must fit that target.  Raises `HeadFormatError` with one sentence otherwise.
        """
        folder = Path(folder)
        tensors = _read_tensors(folder)
        try:
            data = json.loads((folder / "config.json").read_text())
        except FileNotFoundError:
            raise HeadFormatError(f"{folder} has no config.json") from None
        except ValueError as error:
            raise HeadFormatError(f"{folder}/config.json is not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise HeadFormatError(f"{folder}/config.json is not a JSON object")
        if any(name in tensors for name in ("midlayer.self_attn.q_proj.weight", "d2t", "t2d")):
            raise HeadFormatError(f"{folder} holds an EAGLE-3 head; this program runs EAGLE-1 and EAGLE-2 heads")
        # The file decides about biases: configs are often wrong about them.
        config = HeadConfig.from_dict(
            data, fc_bias="fc.bias" in tensors, attention_bias="layers.0.self_attn.q_proj.bias" in tensors
        )
        if target_config is not None:
            for name in ("hidden_size", "vocab_size"):
                found, expected = getattr(config, name), getattr(target_config, name)
                if found != expected:
                    raise HeadFormatError(
                        f"the head in {folder} has {name} {found}, the target {expected}: it was made for another target"
                    )
        for name in ("embed_tokens.weight", "lm_head.weight"):
            tensors.pop(name, None)  # copies of the target's own, which are used instead
        head = cls(config)
        if "draft_token_ids" in tensors:
            head.with_draft_tokens(tensors.pop("draft_token_ids"))
        expected_shapes = {name: tuple(value.shape) for name, value in head.state_dict().items()}
        missing = sorted(set(expected_shapes) - set(tensors))
        unknown = sorted(set(tensors) - set(expected_shapes))
        if missing:
            raise HeadFormatError(f"the head in {folder} lacks {', '.join(missing)}")
        if unknown:
            raise HeadFormatError(
                f"the head in {folder} has tensors that an EAGLE-2 head does not: {', '.join(unknown)}"
            )
        for name, shape in expected_shapes.items():
            if tuple(tensors[name].shape) != shape:
                raise HeadFormatError(
                    f"the head's {name} has shape {list(tensors[name].shape)}; its config.json calls for {list(shape)}"
                )
            if not torch.isfinite(tensors[name].float()).all():
                raise HeadFormatError(f"the head's {name} holds values that are not numbers")
        head.load_state_dict({name: value.float() for name, value in tensors.items()})
        return head.to(device=device, dtype=dtype).eval().requires_grad_(False)


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


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    safe, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    try:
        if safe.exists():
            return load_file(safe)
        if pickled.exists():
            loaded = torch.load(pickled, map_location="cpu", weights_only=True)
            if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
                raise HeadFormatError(f"{pickled} does not hold a dictionary of tensors")
            return dict(loaded)
    except HeadFormatError:
        raise
    except (SafetensorError, OSError, EOFError) as error:
        raise HeadFormatError(f"the head's weights in {folder} cannot be read: {error}") from error
    except Exception as error:  # torch.load raises many kinds for a damaged or unsafe pickle
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise HeadFormatError(f"the head's weights in {folder} cannot be read: {first}") from error
    raise HeadFormatError(f"{folder} has neither model.safetensors nor pytorch_model.bin")
