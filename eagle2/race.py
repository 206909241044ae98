"""The race: EAGLE-2 and autoregressive decoding of one prompt, interleaved on one device, each on its own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .generate import Prefill, Step
from .record import step_trace
from .text import Detokenizer, TokenTexts
from .trace import STOPPED, Difference, LaneTrace, StepTrace, Trace
from .verify import SamplingParams


class HasSeconds(Protocol):
    """Anything that a lane yields."""

    @property
    def seconds(self) -> float: ...


def interleave(lanes: Mapping[str, Iterator[HasSeconds]]) -> Iterator[tuple[str, HasSeconds]]:
    """Advance, one item at a time, the lane whose own accumulated seconds are smallest.

    So all lanes are shown at the same own clock, live and on one device, without running at the same time.  Ties go to
    the lane named first.  Closing this iterator closes the lanes.
    """
    clocks = dict.fromkeys(lanes, 0.0)
    try:
        while clocks:
            name = min(clocks, key=lambda lane: clocks[lane])
            try:
                item = next(lanes[name])
            except StopIteration:
                del clocks[name]
                continue
            clocks[name] += item.seconds
            yield name, item
    finally:
        for lane in lanes.values():
            close = getattr(lane, "close", None)
            if close is not None:
                close()


@dataclass(slots=True)
class LaneProgress:
    """What one lane has made so far. ``seconds`` is its own clock, the prefill included."""

    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)  # "prefill", "drafted", "bonus", "correction" or "plain"
    seconds: float = 0.0
    target_passes: int = 0  # decoding passes, the prefill not counted
    finish_reason: str | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def tau(self) -> float:
        """Tokens per decoding pass of the target, its own tokens included; the prefill and its token left out."""
        return (len(self.token_ids) - 1) / self.target_passes if self.target_passes else 0.0


@dataclass(slots=True)
class RaceUpdate:
    """State of the race after one lane advanced. The progress objects are live: copy what you keep."""

    lane: str  # "eagle2" or "autoregressive": the lane that advanced
    eagle2: LaneProgress
    autoregressive: LaneProgress
    step: StepTrace | None  # newest EAGLE-2 step
    vocabulary: Mapping[int, str]  # display text of every token id seen so far
    snapshot: Callable[[], Trace]  # the record of the run so far, for whoever ends it early
    trace: Trace | None = None  # the whole run, on the last update only

    @property
    def speedup(self) -> float | None:
        """Ratio of the lanes' tokens per second so far; None before both have one."""
        if not (self.eagle2.tokens_per_second and self.autoregressive.tokens_per_second):
            return None
        return self.eagle2.tokens_per_second / self.autoregressive.tokens_per_second

    @property
    def tau(self) -> float:
        """The EAGLE-2 lane's."""
        return self.eagle2.tau


def first_difference(eagle2: Sequence[int], autoregressive: Sequence[int]) -> int | None:
    """First position where the outputs differ, an end counting as a difference; None where they are equal."""
    for index, (one, other) in enumerate(zip(eagle2, autoregressive)):
        if one != other:
            return index
    return None if len(eagle2) == len(autoregressive) else min(len(eagle2), len(autoregressive))


class RunRecorder:
    """Follows one or two lanes and builds the `Trace`; with ``record=False`` it only follows their text."""

    def __init__(
        self, tokenizer: Any, prompt: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, record: bool = True
    ) -> None:
        self._record = record
        self._tokenizer, self._prompt, self._prompt_ids, self._sampling = tokenizer, prompt, list(prompt_ids), sampling
        self._texts = TokenTexts(tokenizer)
        self.vocabulary: dict[int, str] = {}
        self.lanes = {"eagle2": LaneProgress(), "autoregressive": LaneProgress()}
        self._streams = {name: Detokenizer(tokenizer, self._prompt_ids) for name in self.lanes}
        self._seconds: dict[str, list[float]] = {name: [] for name in self.lanes}
        self.steps: list[StepTrace] = []
        # Logits of the autoregressive lane at positions that the other lane has not reached: for the first difference.
        self._logits: dict[int, Tensor] = {}
        self._difference: Difference | None = None

    def add(self, lane: str, item: Prefill | Step) -> None:
        """Take note of what ``lane`` did."""
        progress = self.lanes[lane]
        if isinstance(item, Prefill):
            emitted: tuple[int, ...] = (item.token,)
            origins = ["prefill"]
        else:
            progress.target_passes += 1
            emitted = item.emitted
            own = "plain" if lane == "autoregressive" else item.verdict.kind
            origins = [*("drafted" for _ in item.verdict.accepted), own][: len(emitted)]
            if lane == "eagle2" and self._record:
                self.steps.append(step_trace(item, self._sampling))
        if lane == "autoregressive" and self._record and self._difference is None:
            self._logits[len(progress.token_ids)] = item.output.logits[0]
        progress.seconds += item.seconds
        self._seconds[lane].append(item.seconds)
        progress.finish_reason = item.finish_reason
        stream = self._streams[lane]
        for token, origin in zip(emitted, origins):
            progress.token_ids.append(token)
            progress.pieces.append(stream.push(token))
            progress.origins.append(origin)
        if item.finish_reason and progress.pieces:
            progress.pieces[-1] += stream.flush()
        if self._record:
            self._note_vocabulary(emitted)
            self._compare()

    def _note_vocabulary(self, emitted: Sequence[int]) -> None:
        ids = set(emitted)
        if self.steps:
            newest = self.steps[-1]
            ids.update(newest.token_ids, newest.choice_ids, (newest.next_id,))
        for token in ids - self.vocabulary.keys():
            self.vocabulary[token] = self._texts[token]

    def _compare(self) -> None:
        """Find the first difference as soon as both lanes have reached it; forget logits behind."""
        ours, plain = self.lanes["eagle2"].token_ids, self.lanes["autoregressive"].token_ids
        if self._difference is not None:
            return
        both = min(len(ours), len(plain))
        for index in sorted(self._logits):
            if index >= both:
                break
            if ours[index] != plain[index]:
                row = self._logits[index].float()
                # Lanes that sample differ by their draws; the gap would say nothing.
                gap = float(row[plain[index]] - row[ours[index]]) if self._sampling.greedy else None
                self._difference = Difference(index, ours[index], plain[index], gap)
                self._logits.clear()
                return
            del self._logits[index]

    def trace(self, metadata: Mapping[str, Any]) -> Trace:
        """The record of the run so far."""
        ours, plain = self.lanes["eagle2"], self.lanes["autoregressive"]
        lane = None
        difference = None
        if plain.token_ids:
            times = self._seconds["autoregressive"]
            lane = LaneTrace(
                tuple(plain.token_ids),
                tuple(plain.pieces),
                times[0],
                tuple(times[1:]),
                plain.finish_reason or STOPPED,
            )
            difference = self._difference
            # A lane that was stopped is shorter, not different.
            done = bool(ours.finish_reason and plain.finish_reason)
            if done and difference is None and (index := first_difference(ours.token_ids, plain.token_ids)) is not None:
                longer = ours.token_ids if len(ours.token_ids) > len(plain.token_ids) else plain.token_ids
                mine = longer is ours.token_ids
                difference = Difference(index, longer[index] if mine else None, None if mine else longer[index], None)
        prompt = Detokenizer(self._tokenizer, special=True)
        shown = [prompt.push(token) for token in self._prompt_ids]
        shown[-1] += prompt.flush()
        return Trace(
            metadata=dict(metadata),
            prompt_text=self._prompt,
            prompt_ids=tuple(self._prompt_ids),
            prompt_pieces=tuple(shown),
            output_ids=tuple(ours.token_ids),
            output_pieces=tuple(ours.pieces),
            finish_reason=ours.finish_reason or STOPPED,
            prefill_seconds=self._seconds["eagle2"][0] if self._seconds["eagle2"] else 0.0,
            steps=tuple(self.steps),
            vocabulary=dict(self.vocabulary),
            autoregressive=lane,
            difference=difference,
        )


def race(
    lanes: Mapping[str, Iterator[Prefill | Step]], recorder: RunRecorder, metadata: Mapping[str, Any]
) -> Iterator[RaceUpdate]:
    """Run ``lanes`` ("eagle2", "autoregressive") interleaved; the last update carries the trace."""
    running = interleave(lanes)
    try:
        update: RaceUpdate | None = None
        for name, item in running:
            if update is not None:
                yield update
            assert isinstance(item, (Prefill, Step))
            recorder.add(name, item)
            update = RaceUpdate(
                name,
                recorder.lanes["eagle2"],
                recorder.lanes["autoregressive"],
                recorder.steps[-1] if recorder.steps else None,
                recorder.vocabulary,
                lambda: recorder.trace(metadata),
            )
        if update is not None:
            update.trace = recorder.trace(metadata)
            yield update
    finally:
        close = getattr(running, "close", None)
        if close is not None:
            close()
