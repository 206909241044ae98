"""The target model behind three calls: ``prefill``, ``forward`` (a tree) and ``commit`` (a path).

A sequence that goes on, as a conversation's does, is told so by ``extend`` (more text) and ``truncate`` (less).

Sole owner of how the target runs and of its KV cache.  Any Hugging Face causal LM with full attention works: the tree
goes in through a 4-D mask and explicit position ids, the cache is preallocated and indexable.  Models of the Llama family
run on a lean forward instead (`eagle2.lean`; on a GPU `eagle2.graphs`), which gives the same logits sooner.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from .graphs import GraphForward
from .lean import Lean, LeanWeights, Linear
from .tree import DraftTree

PREFILL_CHUNK = 256  # rows of the prompt in one pass; bounds the memory of masks and activations


class UnsupportedModelError(ValueError):
    """The model cannot verify a tree; the message says why."""


class ContextLengthError(ValueError):
    """The prompt leaves no room in the model's context."""


@dataclass(frozen=True, slots=True, eq=False)
class TargetOutput:
    """``logits [N, V]`` and ``hidden [N, H]`` (last hidden states after the final norm), one row per token fed.

    After `Target.prefill`, ``logits`` has one row, the last token's.
    """

    logits: Tensor
    hidden: Tensor


class PrefixLayer(CacheLayerMixin):
    """KV of one layer, ``[B, kv_heads, capacity, head_dim]``: a committed prefix, then the rows of the last pass."""

    is_sliding = False

    def __init__(self, capacity: int = 0) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0  # committed rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = key_states.new_empty(*key_states.shape[:2], self.capacity, key_states.shape[-1])
        self.values = value_states.new_empty(*value_states.shape[:2], self.capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; committed rows stay."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        if self.is_initialized:
            before = self.keys[:, :, : self.length], self.values[:, :, : self.length]
            self.lazy_initialization(*before)
            self.keys[:, :, : self.length], self.values[:, :, : self.length] = before

    def keep(self, rows: Sequence[int]) -> None:
        """Move the given rows of the last pass to the end of the prefix."""
        end = self.length + len(rows)
        if list(rows) != list(range(len(rows))):
            index = torch.tensor(rows, device=self.keys.device) + self.length
            self.keys[:, :, self.length : end] = self.keys.index_select(2, index)
            self.values[:, :, self.length : end] = self.values.index_select(2, index)
        self.length = end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


class Forward(Protocol):
    """How one sequence runs on the target: passes over new rows behind a committed prefix."""

    @property
    def length(self) -> int:
        """Committed rows."""

    @property
    def capacity(self) -> int:
        """Rows that there is room for, prefix and pass."""

    def fork(self) -> Forward:
        """Another sequence on the same weights, without rows."""

    def reset(self, capacity: int) -> None:
        """Forget the sequence; make room for ``capacity`` rows where there is less."""

    def reserve(self, capacity: int) -> None:
        """Make room for ``capacity`` rows where there is less; the committed ones stay."""

    def truncate(self, length: int) -> None:
        """Forget the committed rows from ``length`` on."""

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]`` -> logits of the last ``logit_rows`` rows (None: of 0) and hidden ``[N, H]``.

        ``visible [N, N]`` is the mask among the rows of this pass; the prefix is visible to all of them.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows of the last pass to the end of the prefix, drop the others."""


class HuggingFaceForward:
    """`Forward` through the model's own code, whatever its architecture."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lm_head = model.get_output_embeddings()
        self.device = runs_on(model.get_input_embeddings())
        self.feature_device = runs_on(self.lm_head)
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.capacity = 0
        self.layers = [PrefixLayer() for _ in range(model.config.get_text_config().num_hidden_layers)]
        self._cache = Cache(layers=list(self.layers))

    def fork(self) -> HuggingFaceForward:
        return HuggingFaceForward(self.model)

    @property
    def length(self) -> int:
        return self.layers[0].length

    def reset(self, capacity: int) -> None:
        self.capacity = max(self.capacity, capacity)
        for layer in self.layers:
            layer.length = 0
            if layer.capacity < capacity:
                layer.capacity = capacity
                layer.is_initialized = False

    def reserve(self, capacity: int) -> None:
        self.capacity = max(self.capacity, capacity)
        for layer in self.layers:
            layer.reserve(capacity)

    def truncate(self, length: int) -> None:
        for layer in self.layers:
            layer.length = length

    def keep(self, rows: Sequence[int]) -> None:
        for layer in self.layers:
            layer.keep(rows)

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        n = len(token_ids)
        mask = torch.zeros(n, self.length + n, dtype=self.dtype, device=self.device)
        mask[:, self.length :].masked_fill_(~visible.to(self.device), torch.finfo(self.dtype).min)
        arguments = {
            "input_ids": token_ids[None].to(self.device),
            "attention_mask": mask[None, None],
            "position_ids": positions[None].to(self.device),
            "cache": self._cache,
            "use_cache": True,
        }
        # The LM head's input is by definition the feature that its logits come from, whatever the architecture does
        # around it (scaled hidden states, scaled or soft-capped logits).
        seen: list[Tensor] = []

        def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(inputs[0][0])
            return (inputs[0][:, -max(logit_rows, 1) :],)  # at 0 one row of logits that nobody reads

        hook = self.lm_head.register_forward_pre_hook(look)
        try:
            logits: Tensor = self.model(**arguments).logits
        finally:
            hook.remove()
        if not seen:
            raise UnsupportedModelError(f"{type(self.model).__name__} does not run its LM head as a module of its own")
        return logits[0] if logit_rows else None, seen[0].to(self.feature_device)


class Target:
    """A causal LM and one sequence's KV cache.

    ``fork()`` gives a second sequence on the same weights (the other lane of a race).  Batch size is 1.  ``lean``: run on
    `eagle2.lean`, on a GPU on `eagle2.graphs`, where the model allows it (``why_not_lean`` says why it does not), else
    through the model's own code.  ``invariant``: rows do not depend on how many ride along (see `Lean`); ValueError where
    that cannot be had.
    """

    def __init__(self, model: Any, *, lean: bool = True, invariant: bool = False, runs: Forward | None = None) -> None:
        _check_supported(model)
        self.model = model
        self.config = model.config.get_text_config()
        self._embedding = model.get_input_embeddings()
        self.device = runs_on(self._embedding)
        self.dtype: torch.dtype = self._embedding.weight.dtype
        self.lm_head = model.get_output_embeddings()
        self.feature_device = runs_on(self.lm_head)  # of features; the draft head belongs there too
        weight = self.lm_head.weight
        # A quantized layer's weight may be packed: its shape says nothing.
        self.hidden_size = int(getattr(self.lm_head, "in_features", weight.shape[-1]))
        self.vocab_size = int(getattr(self.lm_head, "out_features", weight.shape[0]))
        self.max_length = _context_length(self.config)
        self.why_not_lean: str | None = None
        if runs is None:
            if lean and not invariant and GraphForward.refusal(model) is None:
                runs = GraphForward.of(model)
            else:
                self.why_not_lean = Lean.refusal(model) if lean else "it was asked not to"
                if invariant and self.why_not_lean:
                    raise ValueError(f"row-invariant passes need the lean forward, and {self.why_not_lean}")
                runs = HuggingFaceForward(model) if self.why_not_lean else Lean(LeanWeights(model), invariant=invariant)
        self._runs: Forward = runs
        of_head = weight.dtype if weight.is_floating_point() else self.dtype
        self.feature_dtype: torch.dtype = runs.weights.dtype if isinstance(runs, Lean) else of_head
        self._pass_rows = 0  # rows of the last pass that are not committed

    def fork(self) -> Target:
        """Another sequence with a cache of its own on the same weights."""
        other = Target(self.model, runs=self._runs.fork())
        other.why_not_lean = self.why_not_lean
        return other

    @property
    def length(self) -> int:
        """Tokens whose KV are committed."""
        return self._runs.length

    @property
    def packed_lm_head(self) -> Linear | None:
        """The LM head with packed weights, where the lean forward has made one."""
        return self._runs.weights.lm_head if isinstance(self._runs, Lean) else None

    @property
    def arithmetic(self) -> torch.dtype:
        """Dtype that products' inputs are rounded to, which need not be that of the weights."""
        return self._runs.weights.arithmetic if isinstance(self._runs, Lean) else self.dtype

    @property
    def forward_name(self) -> str:
        """ "transformers", "lean", "native" (lean, all layers in C), or "graphs" (or the reason why there are none)."""
        if isinstance(self._runs, GraphForward):
            return self._runs.name
        if isinstance(self._runs, Lean):
            return "lean" if self._runs.weights.native is None else "native"
        return "transformers"

    @property
    def row_invariant(self) -> bool:
        """Whether a row's result does not depend on how many ride along."""
        return isinstance(self._runs, Lean) and self._runs.row_invariant

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's own token embeddings ``[..., H]``."""
        result: Tensor = self._embedding(token_ids)
        return result

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError for an empty prompt or several, `ContextLengthError` for one that leaves no room in the context."""
        if not len(token_ids):
            raise ValueError("the prompt is empty")
        if isinstance(token_ids[0], Sequence) or getattr(token_ids[0], "ndim", False):  # lists of ids, rows of a tensor
            raise ValueError(
                f"a batch of {len(token_ids)} was given; this loop decodes one prompt at a time: give one list of ids"
            )
        self.check_length(len(token_ids))

    def check_length(self, length: int) -> None:
        """Raise `ContextLengthError` where a prompt of ``length`` tokens leaves no room in the context."""
        if length >= self.max_length:
            raise ContextLengthError(
                f"the prompt has {length} tokens, the model's context {self.max_length}; shorten the prompt"
            )

    def reset(self, capacity: int = 0) -> None:
        """Forget the sequence; make room for ``capacity`` rows (prefix and tree) where there is less."""
        self._pass_rows = 0
        self._runs.reset(capacity)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], capacity: int) -> TargetOutput:
        """Start a new sequence: compute and commit ``token_ids``.

        Returns the last token's ``logits [1, V]`` and all tokens' ``hidden [S, H]``.
        """
        self.check_prompt(token_ids)
        self.reset(max(capacity, len(token_ids)))
        return self._commit_all(token_ids)

    @torch.inference_mode()
    def extend(self, token_ids: Sequence[int], capacity: int) -> TargetOutput:
        """Go on with the sequence: compute and commit ``token_ids`` behind what is committed; as `prefill` otherwise.

        ``capacity`` counts all rows.  Raises `ContextLengthError` before any pass.
        """
        if not token_ids:
            raise ValueError("there are no tokens to go on with")
        total = self.length + len(token_ids)
        self.check_length(total)
        self._pass_rows = 0
        self._runs.reserve(max(capacity, total))
        return self._commit_all(token_ids)

    def truncate(self, length: int) -> None:
        """Forget the committed tokens from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"{self.length} tokens are committed, so the first {length} cannot be kept")
        self._pass_rows = 0
        self._runs.truncate(length)

    def _commit_all(self, token_ids: Sequence[int]) -> TargetOutput:
        """Compute and commit ``token_ids`` in chunks."""
        ids = torch.tensor(token_ids, device=self.device)
        begin = self.length
        hidden = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            causal = torch.ones(len(chunk), len(chunk), dtype=torch.bool, device=self.device).tril()
            positions = torch.arange(begin + start, begin + start + len(chunk), device=self.device)
            last = start + len(chunk) == len(token_ids)
            logits, rows = self._forward(chunk, causal, positions, logit_rows=int(last))
            hidden.append(rows)
            self.commit(range(len(chunk)))
        assert logits is not None  # of the last chunk
        return TargetOutput(logits[-1:], torch.cat(hidden))

    @torch.inference_mode()
    def forward(self, tree: DraftTree) -> TargetOutput:
        """One pass over a tree: each row attends to the committed prefix, its ancestors and itself.

        Position id = prefix length + depth.  Nothing is committed.
        """
        positions = self.length + tree.depth_ids().to(self.device)
        logits, hidden = self._forward(tree.token_ids, tree.ancestor_mask(), positions, logit_rows=len(tree))
        assert logits is not None
        return TargetOutput(logits, hidden)

    @torch.inference_mode()
    def commit(self, rows: Sequence[int]) -> None:
        """Append these rows of the last pass (a path, root first) to the prefix and drop the others."""
        if not all(0 <= row < self._pass_rows for row in rows):
            raise ValueError(f"rows {list(rows)} are not all rows of the last pass, which had {self._pass_rows}")
        self._runs.keep(rows)
        self._pass_rows = 0

    def _forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, logit_rows: int
    ) -> tuple[Tensor | None, Tensor]:
        needed = self.length + len(token_ids)
        if needed > self._runs.capacity:
            raise ValueError(f"the KV cache has {self._runs.capacity} rows, this pass needs {needed}")
        self._pass_rows = len(token_ids)
        return self._runs.forward(token_ids, visible, positions, logit_rows=logit_rows)


def runs_on(module: nn.Module) -> torch.device:
    """Where a module computes: its weight's device, or where accelerate brings the weight for each pass."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if (device := getattr(one, "execution_device", None)) is not None:
            return torch.device(device)
    return next(module.parameters()).device


def _context_length(config: Any) -> int:
    """Positions that the model has; 1 << 20 where it sets no bound."""
    length = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
    # "longrope" turns all positions otherwise once a pass goes beyond the original length, while the cached keys stay as
    # they were: what a token gets would depend on the passes it came in.
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        length = min(length, int(rope.get("original_max_position_embeddings") or length))
    return length


def _check_supported(model: Any) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; EAGLE-2 needs a decoder-only one")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no LM head")
    kinds = getattr(config, "layer_types", None)
    other = sorted(set(kinds or ()) - {"full_attention"})
    if other or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(other) or 'recurrent'}; a draft tree needs full attention everywhere"
        )
    window = getattr(config, "sliding_window", None)
    if kinds is None and window and getattr(config, "use_sliding_window", True) and window < _context_length(config):
        raise UnsupportedModelError(
            f"{name} attends within a sliding window of {window}; a draft tree needs full attention"
        )
    accepted = inspect.signature(type(model).forward).parameters
    if "position_ids" not in accepted or "cache" not in accepted or getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{name} does not take position ids and a KV cache, so it cannot place the nodes of a draft tree"
        )
    # An encoder that was not told to be a decoder.  (The vision part of a decoder may look both ways.)
    if getattr(config, "is_decoder", None) is False and any(
        getattr(module, "is_causal", True) is False for module in model.base_model.modules()
    ):
        raise UnsupportedModelError(f"{name} attends to later tokens too; EAGLE-2 needs a causal model")
    attention = getattr(config, "_attn_implementation", "eager")
    if attention not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"{name} was loaded with the attention {attention!r}, which takes no tree mask; load it with 'sdpa' or 'eager'"
        )


__all__ = [
    "ContextLengthError",
    "Forward",
    "HuggingFaceForward",
    "PrefixLayer",
    "Target",
    "TargetOutput",
    "UnsupportedModelError",
]
