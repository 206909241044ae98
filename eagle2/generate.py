"""The decoding loop. One loop serves EAGLE-2 and plain autoregressive decoding: only the drafter differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .draft import Drafter, Proposal
from .processors import PathProcessors
from .target import Target, TargetOutput
from .tree import DraftTree
from .verify import SamplingParams, Verdict, check_finite, verify


@dataclass(frozen=True, slots=True)
class Stops:
    """When a run ends: after a token of ``eos_ids``, once the output's text holds a stop string, or at the cap.

    The token that ends the run is part of the output, as in Hugging Face ``generate``.
    """

    max_new_tokens: int = 128
    eos_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if any(not string for string in self.strings):
            raise ValueError("a stop string must not be empty")
        if self.strings and self.decode is None:
            raise ValueError("stop strings need a decode function")

    def cut(self, output: Sequence[int], new: Sequence[int]) -> tuple[int, str | None]:
        """How many of the ``new`` tokens still belong to the output, and why it ends (None: it goes on)."""
        for count, token in enumerate(new, 1):
            if token in self.eos_ids:
                return count, "eos"
            if self.strings and self._holds_stop_string([*output, *new[:count]]):
                return count, "stop"
            if len(output) + count >= self.max_new_tokens:
                return count, "length"
        return len(new), None

    def _holds_stop_string(self, ids: list[int]) -> bool:
        assert self.decode is not None
        # A stop string that ends with the newest token begins within as many tokens as it has characters (bytes, for
        # byte-level pieces), and a few more for a character cut in two.
        longest = max(len(string.encode()) for string in self.strings)
        text = self.decode(ids[-(longest + 4) :])
        return any(string in text for string in self.strings)


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prompt's pass; it gives the first token."""

    token: int
    output: TargetOutput
    seconds: float
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Step:
    """One decoding step, as references to what the loop holds anyway: recording costs nothing when off."""

    proposal: Proposal
    output: TargetOutput  # row 0: the root; row i + 1: proposal.kept[i]
    verdict: Verdict
    emitted: tuple[int, ...]  # tokens that count: accepted ones and the target's own, cut at a stop
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    finish_reason: str | None

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.commit_seconds


def generate(
    target: Target, drafter: Drafter, prompt_ids: Sequence[int], *, sampling: SamplingParams, stops: Stops,
    generator: torch.Generator | None = None, max_nodes: int = 512, reused: int = 0,
) -> Iterator[Prefill | Step]:  # fmt: skip
    """Decode ``prompt_ids``; yields a `Prefill`, then a `Step` per target pass (EAGLE-2 paper, sections 3 and 4).

    ``reused``: the first so many prompt ids were decoded by this target and this drafter before, and the id after them
    too where it was (see `Drafter.resume`); only the others are computed.  0: a new sequence.

    ``max_nodes`` bounds the drafted nodes of a step.  The output is the prefill's token and all steps' ``emitted``.
    Penalties and bans of the model's generation config are applied in the logits that are yielded (`eagle2.processors`).
    Raises `GenerationConfigError` and `ContextLengthError` before any pass, `NonFiniteLogitsError` with the step's number.
    """
    limit = target.max_length
    rows = min(len(prompt_ids) + stops.max_new_tokens, limit)
    clock = _Clock(target.device)
    processors = PathProcessors.of(target, len(prompt_ids), stops.max_new_tokens, stops.eos_ids)
    if reused:
        target.check_prompt(prompt_ids)
        target.truncate(reused)
        drafter.resume(reused, rows)
        prefill = target.extend(prompt_ids[reused:], rows + max_nodes + 1)
    else:
        drafter.reset(rows)
        prefill = target.prefill(prompt_ids, rows + max_nodes + 1)
    if processors is not None:
        prefill = processors(prefill, prompt_ids)
    check_finite(prefill.logits, "target", 0)
    root = _first_token(prefill.logits, sampling, generator)
    drafter.observe(prompt_ids[reused:], prefill.hidden if drafter.needs_hidden else None)
    output = [root]
    reason = stops.cut([], output)[1] or ("context" if target.length >= limit else None)
    yield Prefill(root, prefill, clock.lap(), reason)
    number = 0
    while reason is None:
        number += 1
        clock.lap()  # what the consumer did since the last yield is not ours
        room = min(stops.max_new_tokens - len(output), limit - target.length) - 1
        proposal = drafter.propose(root, room, max_nodes)
        tree = proposal.verified
        draft_seconds = clock.lap()
        result = target.forward(tree)
        if processors is not None:
            result = processors(result, [*prompt_ids, *output], tree)
        choices = check_finite(result.logits, "target", number)
        verdict = verify(tree, result.logits, sampling, generator, choices)
        verify_seconds = clock.lap()
        target.commit(verdict.rows)
        tokens = tree.token_ids.tolist()
        accepted = [tokens[row] for row in verdict.accepted]
        hidden = result.hidden[list(verdict.rows)] if drafter.needs_hidden else None
        drafter.observe([root, *accepted], hidden)
        count, reason = stops.cut(output, [*accepted, verdict.next_token])
        emitted = (*accepted, verdict.next_token)[:count]
        output += emitted
        root = verdict.next_token
        if reason is None and target.length >= limit:
            reason = "context"
        yield Step(proposal, result, verdict, emitted, draft_seconds, verify_seconds, clock.lap(), reason)


def _first_token(logits: Tensor, sampling: SamplingParams, generator: torch.Generator | None) -> int:
    """The target's token after the prompt: verification of a tree that is only a root."""
    return verify(DraftTree.root_only(0), logits, sampling, generator).next_token


def now(device: torch.device) -> float:
    """Seconds on the host's clock once the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


class _Clock:
    """Seconds between laps, with the device's queue drained."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last = now(device)

    def lap(self) -> float:
        at = now(self._device)
        seconds, self._last = at - self._last, at
        return seconds
