"""The target model behind three calls: ``prefill``, ``forward`` (a tree) and ``commit`` (a path).

Sole owner of how the target runs and of its KV cache.  Any Hugging Face causal LM with full attention works: the tree
goes in through a 4-D mask and explicit position ids, the cache is preallocated and indexable.  Models of the Llama family
run on a lean forward instead (`eagle2.lean`; on a GPU `eagle2.graphs`), which gives the same logits sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .graphs import GraphForward
from .lean import Lean, LeanWeights
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

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, want_logits: bool
    ) -> tuple[Tensor | None, Tensor]:
        """``token_ids [N]`` -> logits ``[N, V]`` (None unless wanted) and hidden ``[N, H]``.

        ``visible [N, N]`` is the mask among the rows of this pass; the prefix is visible to all of them.
        """

    def keep(self, rows: Sequence[int]) -> None:
        """Move these rows of the last pass to the end of the prefix, drop the others."""


class HuggingFaceForward:
    """`Forward` through the model's own code, whatever its architecture."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lm_head = model.get_output_embeddings()
        weight = model.get_input_embeddings().weight
        self.device, self.dtype = weight.device, weight.dtype
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

    def keep(self, rows: Sequence[int]) -> None:
        for layer in self.layers:
            layer.keep(rows)

    def forward(
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, want_logits: bool
    ) -> tuple[Tensor | None, Tensor]:
        n = len(token_ids)
        mask = torch.zeros(n, self.length + n, dtype=self.dtype, device=self.device)
        mask[:, self.length :].masked_fill_(~visible.to(self.device), torch.finfo(self.dtype).min)
        arguments = {
            "input_ids": token_ids[None],
            "attention_mask": mask[None, None],
            "position_ids": positions[None],
            "cache": self._cache,
            "use_cache": True,
        }
        if not want_logits:
            hidden: Tensor = self.model.base_model(**arguments).last_hidden_state
            return None, hidden[0]
        # The LM head's input is by definition the feature that its logits come from, whatever the architecture does
        # around it (scaled or soft-capped logits).
        seen: list[Tensor] = []
        hook = self.lm_head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits: Tensor = self.model(**arguments).logits
        finally:
            hook.remove()
        return logits[0], seen[0][0]


class Target:
    """A causal LM and one sequence's KV cache.

    ``fork()`` gives a second sequence on the same weights (the other lane of a race).  Batch size is 1.  ``lean``: run on
    `eagle2.lean`, on a GPU on `eagle2.graphs`, where the model allows it (``why_not_lean`` says why it does not), else
    through the model's own code.
    """

    def __init__(self, model: Any, *, lean: bool = True, runs: Forward | None = None) -> None:
        _check_supported(model)
        self.model = model
        self.config = model.config.get_text_config()
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.lm_head = model.get_output_embeddings()
        self.hidden_size = int(self.lm_head.weight.shape[1])
        self.vocab_size = int(self.lm_head.weight.shape[0])
        self.max_length = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 20)
        self.why_not_lean: str | None = None
        if runs is None:
            if lean and GraphForward.refusal(model) is None:
                runs = GraphForward.of(model)
            else:
                self.why_not_lean = Lean.refusal(model) if lean else "it was asked not to"
                runs = HuggingFaceForward(model) if self.why_not_lean else Lean(LeanWeights(model))
        self._runs: Forward = runs
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
    def forward_name(self) -> str:
        """ "transformers", "lean", or "graphs" (with the reason, where there should be graphs and are none)."""
        if isinstance(self._runs, GraphForward):
            return self._runs.name
        return "transformers" if self.why_not_lean else "lean"

    def embed(self, token_ids: Tensor) -> Tensor:
        """The target's own token embeddings ``[..., H]``."""
        result: Tensor = self.model.get_input_embeddings()(token_ids)
        return result

    def check_prompt(self, token_ids: Sequence[int]) -> None:
        """Raise ValueError for an empty prompt, `ContextLengthError` for one that leaves no room in the context."""
        if not token_ids:
            raise ValueError("the prompt is empty")
        if len(token_ids) >= self.max_length:
            raise ContextLengthError(
                f"the prompt has {len(token_ids)} tokens, the model's context {self.max_length}; shorten the prompt"
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
        ids = torch.tensor(token_ids, device=self.device)
        hidden = []
        for start in range(0, len(token_ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            causal = torch.ones(len(chunk), len(chunk), dtype=torch.bool, device=self.device).tril()
            positions = torch.arange(start, start + len(chunk), device=self.device)
            last = start + len(chunk) == len(token_ids)
            logits, rows = self._forward(chunk, causal, positions, want_logits=last)
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
        logits, hidden = self._forward(tree.token_ids, tree.ancestor_mask(), positions, want_logits=True)
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
        self, token_ids: Tensor, visible: Tensor, positions: Tensor, *, want_logits: bool
    ) -> tuple[Tensor | None, Tensor]:
        needed = self.length + len(token_ids)
        if needed > self._runs.capacity:
            raise ValueError(f"the KV cache has {self._runs.capacity} rows, this pass needs {needed}")
        self._pass_rows = len(token_ids)
        return self._runs.forward(token_ids, visible, positions, want_logits=want_logits)


def _check_supported(model: Any) -> None:
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; EAGLE-2 needs a decoder-only one")
    if model.get_output_embeddings() is None:
        raise UnsupportedModelError(f"{name} has no LM head")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    other = sorted(kinds - {"full_attention"})
    if other or getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{name} has layers of kind {', '.join(other) or 'recurrent'}; a draft tree needs full attention everywhere"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"{name} attends within a sliding window of {window}; a draft tree needs full attention"
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
