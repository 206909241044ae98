"""A model's own generation settings: which are honoured, with transformers' own logits processors, and which refused.

A checkpoint's ``generation_config`` may ask for penalties and bans that change every token.  They are part of what the
model says, so they are applied to the target's logits before anything is decided, in each lane alike: row by row, with the
row's own path as input ids, as ``generate`` would see it there.  Greedy ids then equal those of ``model.generate``.

Not read from it: length (``Stops``), and whether and how to sample (``SamplingParams``): the run's own settings decide
these.  What one path at a time cannot do (beams, guidance, ...) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from .target import Target, TargetOutput
from .tree import DraftTree


class GenerationConfigError(ValueError):
    """The model's generation config asks for something that cannot be done here, or garbles it; the message names it."""


@dataclass(frozen=True, slots=True)
class _Run:
    """What some processors need to know of the run."""

    prompt_length: int
    max_length: int  # prompt and output
    eos_ids: list[int]
    device: torch.device
    forced_bos: bool

    @property
    def begin(self) -> int:
        """Length at which the first free token is chosen, as `GenerationMixin` has it."""
        return self.prompt_length + (self.prompt_length == 1 and self.forced_bos)


Build = Callable[[Any, _Run], LogitsProcessor]

# Setting -> (value that asks for nothing, its processor), in the order of transformers' `GenerationMixin`.
SUPPORTED: dict[str, tuple[Any, Build]] = {
    "sequence_bias": (None, lambda value, run: SequenceBiasLogitsProcessor(value)),
    "repetition_penalty": (1, lambda value, run: RepetitionPenaltyLogitsProcessor(float(value))),
    "no_repeat_ngram_size": (0, lambda value, run: NoRepeatNGramLogitsProcessor(value)),
    "bad_words_ids": (None, lambda value, run: NoBadWordsLogitsProcessor(value, run.eos_ids or None)),
    "min_length": (0, lambda value, run: MinLengthLogitsProcessor(value, run.eos_ids, run.device)),
    "min_new_tokens": (
        0,
        lambda value, run: MinNewTokensLengthLogitsProcessor(run.prompt_length, value, run.eos_ids, run.device),
    ),
    "forced_bos_token_id": (None, lambda value, run: ForcedBOSTokenLogitsProcessor(value)),
    "forced_eos_token_id": (None, lambda value, run: ForcedEOSTokenLogitsProcessor(run.max_length, value, run.device)),
    "remove_invalid_values": (False, lambda value, run: InfNanRemoveLogitsProcessor()),
    "exponential_decay_length_penalty": (
        None,
        lambda value, run: ExponentialDecayLengthPenalty(value, run.eos_ids, run.prompt_length),
    ),
    "suppress_tokens": (None, lambda value, run: SuppressTokensLogitsProcessor(value, run.device)),
    "begin_suppress_tokens": (
        None,
        lambda value, run: SuppressTokensAtBeginLogitsProcessor(value, run.begin, run.device),
    ),
}
NEEDS_EOS = frozenset({"min_length", "min_new_tokens", "exponential_decay_length_penalty"})  # no meaning without one

# Setting -> value that asks for nothing.
REFUSED: dict[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": 0,  # contrastive search
    "dola_layers": None,
    "guidance_scale": 1,
    "watermarking_config": None,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "token_healing": False,
    "max_time": None,
    "stop_strings": None,  # the run's `Stops` has its own
    # other ways to draft
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
    "speculation_type": None,
}


def settings_in_force(model: Any) -> dict[str, Any]:
    """The settings of a model's ``generation_config`` that change the target's logits, by name.

    Raises `GenerationConfigError` for one that is not supported.
    """
    config = getattr(model, "generation_config", None)
    for name, nothing in REFUSED.items():
        value = getattr(config, name, None)
        if _asks(value, nothing):
            raise GenerationConfigError(
                f"the model's generation config sets {name} to {value!r}, which EAGLE-2 cannot follow; "
                f"set model.generation_config.{name} to {nothing!r} to run without it"
            )
    asked = {name: getattr(config, name, None) for name in SUPPORTED}
    return {name: value for name, value in asked.items() if _asks(value, SUPPORTED[name][0])}


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """Plain values for traces and JSON; long lists are cut."""
    return {name: value if isinstance(value, int | float) else str(value)[:80] for name, value in settings.items()}


def _asks(value: Any, nothing: Any) -> bool:
    return value is not None and value != nothing and value != []


class PathProcessors:
    """Logits processors over the rows of a tree, each with its own path as input ids."""

    def __init__(self, processors: LogitsProcessorList) -> None:
        self._processors = processors

    @classmethod
    def of(
        cls, target: Target, prompt_length: int, max_new_tokens: int, eos_ids: frozenset[int]
    ) -> PathProcessors | None:
        """For one run on ``target``; None where its generation config asks for nothing (the usual case).

        ``eos_ids`` are those that end the run.  Raises `GenerationConfigError`.
        """
        asked = settings_in_force(target.model)
        run = _Run(
            prompt_length, prompt_length + max_new_tokens, sorted(eos_ids), target.device,
            "forced_bos_token_id" in asked,
        )  # fmt: skip
        made = LogitsProcessorList()
        for name, value in asked.items():
            if name in NEEDS_EOS and not eos_ids:
                continue
            try:
                made.append(SUPPORTED[name][1](value, run))
            except (ValueError, TypeError, IndexError) as error:
                raise GenerationConfigError(
                    f"the model's generation config sets {name} to {value!r}, which it cannot be ({error})"
                ) from error
        return cls(made) if made else None

    def __call__(self, output: TargetOutput, ids: Sequence[int], tree: DraftTree | None = None) -> TargetOutput:
        """``output`` with processed ``logits [N, V]`` in float32; row i is after node i of ``tree`` (None: only a root).

        ``ids`` are all decided tokens, the root last.  Nodes of one depth have paths of one length: a call for each layer.
        """
        tree = tree or DraftTree.root_only(ids[-1])
        logits = output.logits.float()
        before = torch.tensor(ids[:-1], dtype=torch.long, device=logits.device)
        paths: list[list[int]] = []  # from the root down
        layers: dict[int, list[int]] = {}
        for node, (token, parent, depth) in enumerate(zip(tree.token_ids.tolist(), tree.parents, tree.depths)):
            paths.append([*(paths[parent] if node else ()), token])
            layers.setdefault(depth, []).append(node)
        processed = torch.empty_like(logits)
        for nodes in layers.values():
            own = torch.tensor([paths[node] for node in nodes], device=logits.device)
            processed[nodes] = self._processors(torch.cat((before.expand(len(nodes), -1), own), 1), logits[nodes])
        return replace(output, logits=processed)


__all__ = ["REFUSED", "SUPPORTED", "GenerationConfigError", "PathProcessors", "describe", "settings_in_force"]
