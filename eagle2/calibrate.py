"""Measures a `CostModel` on this machine, and keeps it on the disk for the next start."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock

from . import __version__, native
from .cost import CostError, CostModel
from .eagle import DraftVocabulary, EagleDrafter, TreeSettings
from .generate import now
from .head import DraftHead
from .lean import LeanHead
from .models import cache_dir
from .target import Target
from .tree import DraftTree
from .verify import SamplingParams, verify

FORMAT, VERSION = "eagle2-calibration", 2
CONTEXT = 200  # committed tokens while measuring
LAYERS = 4  # of the deep one of the two drafts whose difference is that of the passes
Points = tuple[tuple[int, ...], tuple[int, ...]]  # rows of target passes, rows of draft passes
# The first for which the budget suffices, else the last.  6, 7 and 12: AVX2's kernels take rows in blocks of six, so that the
# costs of the trees that matter most here rise in steps.
ROWS: tuple[Points, ...] = (
    ((1, 2, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64), (1, 2, 4, 8, 10, 16)),
    ((1, 2, 4, 6, 8, 12, 16, 32, 64), (1, 2, 4, 8, 16)),
    ((1, 4, 8, 16, 32), (1, 4, 10)),
    ((1, 8, 32), (1, 4, 10)),
    ((1, 8), (1, 8)),
)
MANY = 16  # passes over more rows than this are dear and seldom chosen: measured in every third round only
ROUNDS = (2, 15)  # at least, at most

STEADY = 1.4  # median over least seconds of one plain pass: above, others were using the machine

Key = Mapping[str, Any]


class Measured(NamedTuple):
    """``steady``: the machine was quiet enough for the costs to be worth keeping."""

    costs: CostModel
    steady: bool


def calibrate(
    target: Target, head: DraftHead, vocabulary: DraftVocabulary | None = None, *, budget: float = 3.0,
    clock: Callable[[], float] | None = None,
) -> Measured:  # fmt: skip
    """Measure within about ``budget`` seconds: the least of interleaved rounds after a warm-up.

    The least and not the median: other programs only ever add to a time, by more than what is measured where their
    threads and ours share cores, and by about as much for one row as for many, which would make rows look cheap.

    ``clock``: seconds with the device's queue drained (for tests).  The target's own sequence is not touched.
    """
    clock = clock or partial(now, target.device)
    bench = _Bench(target.fork(), head, vocabulary or DraftVocabulary(target, head.draft_token_ids), clock)
    begun = clock()
    once = min(bench.verify(1) for _ in range(4))  # the least: one slow pass must not cost us half of the points
    plans = [plan for plan in ROWS if 3 * sum(1 + n / 16 for n in plan[0]) * once <= 1.5 * budget]
    verify_rows, draft_rows = plans[0] if plans else ROWS[-1]
    draft_rows = tuple(n for n in draft_rows if n <= bench.width_limit)
    for n in verify_rows[1:]:
        bench.verify(n)
    for n in draft_rows:
        bench.draft(n)
    verified: dict[int, list[float]] = {n: [] for n in verify_rows}
    shallow: dict[int, list[float]] = {n: [] for n in draft_rows}
    deep: dict[int, list[float]] = {n: [] for n in draft_rows}
    for number in range(ROUNDS[1]):
        if number >= ROUNDS[0] and clock() - begun > budget:
            break
        for n in verify_rows:
            if n <= MANY or number % 3 == 0:
                verified[n].append(bench.verify(n))
        for n in draft_rows:
            short, long = bench.draft(n)
            shallow[n].append(short)
            deep[n].append(long)
    verify_seconds = rising([min(verified[n]) for n in verify_rows])
    draft_seconds = rising([max(min(deep[n]) - min(shallow[n]), 0.0) / (LAYERS - 1) for n in draft_rows])
    # A draft of one layer is a pass over one committed row and what every drafted step does besides its passes.
    width = min(draft_rows, key=lambda n: abs(n - 4))
    overhead = max(min(shallow[width]) - draft_seconds[0], 0.0)
    costs = CostModel(
        verify_rows, _rounded(verify_seconds), draft_rows, _rounded(draft_seconds), _rounded((overhead,))[0]
    )
    return Measured(costs, statistics.median(verified[1]) <= STEADY * min(verified[1]))


class _Bench:
    """One sequence of about `CONTEXT` committed tokens, and the passes to be timed on it."""

    def __init__(
        self, target: Target, head: DraftHead, vocabulary: DraftVocabulary, clock: Callable[[], float]
    ) -> None:
        self.target, self.head, self.vocabulary, self.clock = target, head, vocabulary, clock
        self.width_limit = vocabulary.size
        context = max(1, min(CONTEXT, target.max_length // 2))
        # What the tokens are does not matter to the time they take.
        self.prompt = [(7 * position + 3) % target.vocab_size for position in range(context)]
        most = max(max(rows) for rows, _ in ROWS)
        self.hidden = target.prefill(self.prompt, context + most).hidden
        self._trees: dict[int, DraftTree] = {}
        self._drafters: dict[int, EagleDrafter] = {}

    def verify(self, rows: int) -> float:
        """Seconds of a target pass over a tree of ``rows`` rows, verified greedily; nothing is committed."""
        if rows not in self._trees:
            parents = (-1, *((node - 1) // 3 for node in range(1, rows)))
            self._trees[rows] = DraftTree(
                torch.zeros(rows, dtype=torch.long, device=self.target.device),
                parents,
                torch.ones(rows),
                torch.zeros(rows),
            )
        begun = self.clock()
        tree = self._trees[rows]
        verify(tree, self.target.forward(tree).logits, SamplingParams())
        self.target.commit(())
        return self.clock() - begun

    def draft(self, rows: int) -> tuple[float, float]:
        """Seconds of whole drafts of one layer and of `LAYERS` layers that feed ``rows`` nodes each."""
        if rows not in self._drafters:
            settings = TreeSettings("dynamic", LAYERS, rows, 4)
            drafter = self._drafters[rows] = EagleDrafter(self.head, self.target, settings, self.vocabulary)
            drafter.reset(len(self.prompt) + 2 * (ROUNDS[1] + 2))
            drafter.observe(self.prompt, self.hidden)
            drafter.propose(0, 1, 4)
        short, long = (self._draft(self._drafters[rows], depth) for depth in (1, LAYERS))
        return short, long

    def _draft(self, drafter: EagleDrafter, depth: int) -> float:
        drafter.observe([0], self.hidden[-1:])
        begun = self.clock()
        _ = drafter.propose(0, depth, 4).verified
        return self.clock() - begun


def rising(values: Sequence[float]) -> tuple[float, ...]:
    """The non-decreasing values nearest to ``values`` in squares (neighbours in the wrong order are averaged)."""
    groups: list[tuple[float, int]] = []  # mean, how many
    for value in values:
        mean, count = value, 1
        while groups and groups[-1][0] > mean:
            other, others = groups.pop()
            mean = (mean * count + other * others) / (count + others)
            count += others
        groups.append((mean, count))
    return tuple(mean for mean, count in groups for _ in range(count))


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    """Four significant digits: a clock that is shared with others has no more."""
    return tuple(float(f"{value:.4g}") for value in values)


def machine_key(
    target: Target, head: DraftHead, vocabulary: DraftVocabulary, *, name: str, head_name: str
) -> dict[str, Any]:
    """All that the costs depend on: the models, how they run, and the machine."""
    config = target.config
    shape = {
        key: getattr(config, key, None)
        for key in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size",
        )
    }  # fmt: skip
    return {
        "model": name,
        "architecture": type(target.model).__name__,
        "shape": shape,
        "head": head_name,
        "draft_vocab": vocabulary.size,
        "forward": target.forward_name,
        "native": native.build(),
        "lean_head": isinstance(head, LeanHead),
        "rounded_draft": isinstance(head, LeanHead) and head.rounded,
        "row_invariant": target.row_invariant,
        "dtype": str(target.dtype).split(".")[-1],
        "arithmetic": str(target.arithmetic).split(".")[-1],
        "device": _processor(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "eagle2": __version__,
    }


def _processor(device: torch.device) -> str:
    """A name that differs between machines which share a cache folder."""
    if device.type == "cuda":
        return f"{device.type} {torch.cuda.get_device_name(device)}"
    name = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):  # Linux: `platform` knows the architecture only
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{device.type} {name}, {os.cpu_count()} cores"


def calibrated(
    key: Key, measure: Callable[[], Measured], *, force: bool = False, folder: Path | None = None
) -> CostModel:
    """The costs kept under ``key``, else ``measure()``, which is then kept; ``force``: measured anew.

    A file that is damaged, of another version or of another key is as good as none.  Processes that start together wait
    for the first one's measurement.  Nothing is kept of an unsteady measurement, nor where the folder cannot be written.
    """
    folder = folder or cache_dir() / "costs"
    path = folder / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
    except OSError:
        return measure().costs
    try:
        costs = None if force else _read(path, key)
        if costs is None:
            costs, steady = measure()
            if steady:
                _write(path, key, costs)
            else:
                path.unlink(missing_ok=True)
        return costs
    finally:
        lock.release()


def _read(path: Path, key: Key) -> CostModel | None:
    try:
        data = json.loads(path.read_bytes())
        if data["format"] != FORMAT or data["version"] != VERSION or data["key"] != dict(key):
            return None
        return CostModel.from_dict(data["costs"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, CostError):
        return None


def _write(path: Path, key: Key, costs: CostModel) -> None:
    data = {"format": FORMAT, "version": VERSION, "key": dict(key), "costs": costs.to_dict()}
    building = path.with_suffix(f".{os.getpid()}.tmp")
    with suppress(OSError):
        building.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        os.replace(building, path)


__all__ = ["Measured", "calibrate", "calibrated", "machine_key", "rising"]
