"""Made-up but lifelike traces, and an engine that replays one: for tests and for looking at the drawings."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle2.race import LaneProgress, RaceUpdate
from eagle2.trace import Decision, LaneTrace, StepTrace, Trace
from visual.player import export_html

GOLDEN = Path(__file__).parent / "data" / "trace_v1.json"
_WORDS = (
    " the| a| of| and| to| in| lighthouse| keeper| old| sea| storm| lamp| night| stairs| every| had| was| he| she| it|"
    " climbed| lit| watched| waves| ships| harbour| silence| wind| against| rocks| who|,|.| with| his| long| winding|"
    ' beam| light| island| years| never| once|ing|ed|s|ly| extraordinarily| counter|-|clock|wise|\n|\n\n| "|"|?|!| It|'
    " The| One| morning| fog| rolled| bell| rang| from| beyond| that| there| were| only| gulls|'s| heart| lonely| boat"
)
WORDS = _WORDS.split("|")


def exported(folder: Path, makes: Mapping[str, Callable[[], Trace]]) -> dict[str, tuple[Trace, Path]]:
    """Each run and the page of it, written into ``folder``."""
    made = {}
    for name, make in makes.items():
        trace, path = make(), folder / f"{name}.html"
        path.write_text(export_html(trace), encoding="utf-8")
        made[name] = (trace, path)
    return made


def in_loop(make: Callable[[], Any]) -> Any:
    """Call in a running event loop: without one Gradio makes loops that it never closes, and warnings are errors here."""

    async def call() -> Any:
        return make()

    return asyncio.run(call())


def with_copies() -> Trace:
    """The golden run as if prompt lookup had proposed two nodes of the first step, and all of the second, alone."""
    trace = Trace.load(GOLDEN)
    first, second, *rest = trace.steps
    first = dataclasses.replace(first, copied=(1, 5))
    second = dataclasses.replace(second, selected=(), copied=tuple(range(1, len(second.token_ids))))
    return dataclasses.replace(trace, steps=(first, second, *rest))


def synthetic(
    steps: int = 20, *, depth: int = 6, top_k: int = 10, total: int = 60, seed: int = 1, temperature: float = 0.0,
    words: list[str] | None = None,
) -> Trace:  # fmt: skip
    """A run whose trees have the shape of EAGLE-2's: geometric confidences, the best nodes fed, the best kept."""
    rng = random.Random(seed)
    words = words or WORDS
    vocabulary = dict(enumerate(words))

    def children() -> list[tuple[int, float]]:
        ids = rng.sample(range(len(words)), top_k)
        sharp = rng.choice((0.35, 0.6, 0.8, 0.93))
        left, pairs = 1.0, []
        for token in ids:
            share = left * sharp * rng.uniform(0.75, 1)
            pairs.append((token, share))
            left -= share
            sharp *= 0.8
        return pairs

    made: list[StepTrace] = []
    root = 0
    output = [root]
    for _ in range(steps):
        ids, parents, confidence, log_value, selected = [root], [-1], [1.0], [0.0], []
        layer = [0]
        for number in range(depth):
            fed = sorted(layer, key=lambda i: (-log_value[i], i))[:top_k] if number else [0]
            if number:
                selected.append(tuple(sorted(fed)))
            layer = []
            for node in sorted(fed):
                for token, share in children():
                    layer.append(len(ids))
                    ids.append(token)
                    parents.append(node)
                    confidence.append(round(share, 5))
                    log_value.append(round(log_value[node] + math.log(share), 5))
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        ranked = sorted(range(1, len(ids)), key=lambda i: (-log_value[i], depths[i], i))[:total]
        kept = tuple(sorted(ranked))
        path: list[int] = []
        at = 0
        while True:
            best = [i for i in kept if parents[i] == at]
            if not best or rng.random() > 0.72:
                break
            at = best[0] if rng.random() < 0.8 else rng.choice(best)
            path.append(at)
        leaf = not any(parents[i] == at for i in kept)
        firsts = set(path)
        probs = tuple(
            round(rng.uniform(0.4, 0.99) if i in firsts else confidence[i] * rng.uniform(0, 0.4), 5) for i in kept
        )
        ranks = tuple(0 if i in firsts else rng.randint(1, 40) for i in kept)
        follow = dict(zip([0, *path], path))
        own = rng.randrange(len(words))
        choices = tuple(
            ids[follow[i]] if i in follow else own if i == at else rng.randrange(len(words)) for i in (0, *kept)
        )
        decisions = []
        for node, child in (*follow.items(), (at, -1)):
            for i in kept:
                if parents[i] == node:
                    decisions.append(
                        Decision(i, probs[kept.index(i)], rng.random() if temperature else None, i == child)
                    )
                    if i == child:
                        break
        made.append(
            StepTrace(
                token_ids=tuple(ids), parents=tuple(parents), confidence=tuple(confidence), log_value=tuple(log_value),
                selected=tuple(selected), kept=kept, target_probs=probs, target_ranks=ranks, choice_ids=choices,
                choice_probs=tuple(round(rng.uniform(0.3, 0.95), 5) for _ in choices), accepted=tuple(path), next_id=own,
                next_kind="bonus" if leaf else "correction", decisions=tuple(decisions), emitted=len(path) + 1,
                draft_seconds=0.004 * depth, verify_seconds=0.03 + 0.001 * len(kept), commit_seconds=0.001,
            )
        )  # fmt: skip
        output += made[-1].emitted_ids
        root = output[-1]
    pieces = tuple(vocabulary[i] for i in output)
    return Trace(
        metadata={
            "target": "made-up", "head": "made-up", "dtype": "float32", "device": "cpu", "threads": 2, "seed": seed,
            "sampling": {"temperature": temperature, "top_k": 0, "top_p": 1.0},
            "tree": {"kind": "dynamic", "depth": depth, "top_k": top_k, "total_tokens": total},
            "versions": {}, "clock": "measured", "created": "2026-11-29T12:00:00Z",
        },
        prompt_text="Write a short story about a lighthouse keeper.", prompt_ids=(1,), prompt_pieces=("…",),
        output_ids=tuple(output), output_pieces=pieces, finish_reason="length", prefill_seconds=0.06,
        steps=tuple(made), vocabulary=vocabulary,
        autoregressive=LaneTrace(tuple(output), pieces, 0.05, tuple(0.033 for _ in output[1:]), "length"),
    )  # fmt: skip


@dataclass(frozen=True)
class FakeSettings:
    """The checks of `eagle2.engine.Settings` that the app's tests need."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    sample_top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tree: str = "dynamic"
    depth: int | str = 3
    top_k: int = 4
    total_tokens: int | str = 5
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.max_new_tokens <= 512:
            raise ValueError("max_new_tokens must lie between 1 and 512.")


class FakeEngine:
    """Replays a trace as a race, at so many seconds per step."""

    name, head_name, dtype, device = "fake-target", "fake-head", "float32", "cpu"

    def __init__(self, trace: Trace, delay: float = 0.0) -> None:
        self.trace, self.delay = trace, delay
        self.prompts: list[tuple[str, Any]] = []
        self.closed = threading.Event()
        self.running = 0
        self.most_running = 0

    def calibrate(self) -> None:
        pass

    def encode(self, prompt: str) -> list[int]:
        return list(range(len(prompt.split())))

    def race(self, prompt: str, settings: Any) -> Iterator[RaceUpdate]:
        if prompt == "fail":
            raise ValueError("The prompt is too long for this model.")
        self.prompts.append((prompt, settings))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        trace, other = self.trace, self.trace.autoregressive
        assert other is not None
        fast, slow = LaneProgress(seconds=trace.prefill_seconds), LaneProgress(seconds=other.prefill_seconds)
        self._grow(fast, trace.output_ids[:1], trace.output_pieces[:1], ["prefill"])
        self._grow(slow, other.token_ids[:1], other.pieces[:1], ["prefill"])
        steps = iter(trace.steps)
        step = None
        try:
            while fast.finish_reason is None or slow.finish_reason is None:
                time.sleep(self.delay)
                if fast.finish_reason is None and (fast.seconds <= slow.seconds or slow.finish_reason):
                    step = next(steps)
                    at = len(fast.pieces)
                    pieces = trace.output_pieces[at : at + step.emitted]
                    self._grow(fast, step.emitted_ids, pieces, list(step.emitted_origins))
                    fast.seconds += step.seconds
                    fast.target_passes += 1
                    if len(fast.pieces) == len(trace.output_ids):
                        fast.finish_reason = "length"
                    lane = "eagle2"
                else:
                    at = len(slow.pieces)
                    self._grow(slow, other.token_ids[at : at + 1], other.pieces[at : at + 1], ["plain"])
                    slow.seconds += other.step_seconds[at - 1]
                    slow.target_passes += 1
                    if len(slow.pieces) == len(other.token_ids):
                        slow.finish_reason = "length"
                    lane = "autoregressive"
                done = fast.finish_reason is not None and slow.finish_reason is not None
                yield RaceUpdate(
                    lane, fast, slow, step, trace.vocabulary, lambda: self._so_far(fast, slow), trace if done else None
                )
        finally:
            self.running -= 1
            self.closed.set()

    def follow(self, prompt: str, settings: Any) -> Iterator[Trace | None]:
        if prompt == "fail":
            raise ValueError("The prompt is too long for this model.")
        self.prompts.append((prompt, settings))
        self.running += 1
        try:
            for _ in self.trace.steps:
                time.sleep(self.delay)
                yield None
            tree = {**self.trace.metadata["tree"], "kind": settings.tree}
            yield replace(self.trace, metadata={**self.trace.metadata, "tree": tree}, autoregressive=None)
        finally:
            self.running -= 1
            self.closed.set()

    def _so_far(self, fast: LaneProgress, slow: LaneProgress) -> Trace:
        whole, other = self.trace, self.trace.autoregressive
        assert other is not None
        made, plain = len(fast.token_ids), len(slow.token_ids)
        lane = replace(
            other, token_ids=other.token_ids[:plain], pieces=other.pieces[:plain],
            step_seconds=other.step_seconds[: plain - 1], finish_reason="stopped",
        )  # fmt: skip
        return replace(
            whole, output_ids=whole.output_ids[:made], output_pieces=whole.output_pieces[:made], finish_reason="stopped",
            steps=whole.steps[: fast.target_passes], autoregressive=lane,
        )  # fmt: skip

    @staticmethod
    def _grow(lane: LaneProgress, ids: Any, pieces: Any, origins: Any) -> None:
        lane.token_ids += ids
        lane.pieces += pieces
        lane.origins += origins
