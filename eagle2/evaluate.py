"""Acceptance figures over question files: tau, acceptance by depth, and how far the head's confidences can be trusted.

Greedy runs are replayed (``replay.py``): the target decodes many prompts at once and the loop runs on the recording.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
from tqdm import tqdm

from .corpus import loop_start
from .engine import Engine, Settings
from .generate import Prefill, Step, Stops, generate
from .models import ModelError
from .replay import BATCH_ROWS, Recording, RecordingStore, ReplayTarget, record

BINS = 10
STAGE_SECONDS = 1.0  # between two looks at how far a batch is
Method = Literal["replay", "full loop"]


class QuestionError(ValueError):
    """The question file cannot be used; the message names the line."""


class WorkerError(ValueError):
    """A worker process could not do its part; the message says why."""


def read_questions(path: str | Path, limit: int | None = None) -> list[str]:
    """First turns of a FastChat JSONL file (one object with ``turns`` a line), at most ``limit``."""
    prompts: list[str] = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(prompts) >= limit:
                    break
                if not line.strip():
                    continue
                try:
                    turn = json.loads(line)["turns"][0]
                except (ValueError, KeyError, IndexError, TypeError) as error:
                    raise QuestionError(f'{path}, line {number}: expected an object with "turns": [...]') from error
                if not isinstance(turn, str):
                    raise QuestionError(f"{path}, line {number}: the first turn is not text")
                if not turn.strip():
                    raise QuestionError(f"{path}, line {number}: the first turn is empty")
                prompts.append(turn)
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(f"{path} cannot be read: {error}") from error
    if not prompts:
        raise QuestionError(f"{path} holds no questions")
    return prompts


def read_question_sets(paths: Sequence[str | Path], limit: int | None = None) -> dict[str, list[str]]:
    """Prompts by the name of their file; a folder stands for all its ``*.jsonl``, sorted. ``limit`` is per file.

    The name is the file's stem; of two files with the same stem both go by their whole path.
    """
    files: dict[Path, Path] = {}  # resolved -> as given: a file named twice is one set
    for path in map(Path, paths):
        if not path.is_dir():
            files.setdefault(path.resolve(), path)
            continue
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise QuestionError(f"{path} holds no .jsonl file")
        for file in found:
            files.setdefault(file.resolve(), file)
    stems = [file.stem for file in files.values()]
    return {
        file.stem if stems.count(file.stem) == 1 else str(file): read_questions(file, limit) for file in files.values()
    }


@dataclass(slots=True)
class Acceptance:
    """Counts over the steps of many runs. tau leaves out the prefill and the token that it gives.

    Draft tokens after the one that ended the run are not counted as accepted.
    """

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    at_least: list[int] = field(default_factory=list)  # [d]: steps that accepted more than d draft tokens

    def add(self, step: Step) -> None:
        self.tokens += len(step.emitted)
        self.passes += 1
        self.drafted += len(step.proposal.kept)
        accepted = min(len(step.verdict.accepted), len(step.emitted))
        self.accepted += accepted
        self.at_least += [0] * (accepted - len(self.at_least))
        for depth in range(accepted):
            self.at_least[depth] += 1

    def merge(self, other: Acceptance) -> None:
        self.tokens += other.tokens
        self.passes += other.passes
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.at_least += [0] * (len(other.at_least) - len(self.at_least))
        for depth, count in enumerate(other.at_least):
            self.at_least[depth] += count

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def by_depth(self) -> list[float]:
        """Share of the steps that accepted at least 1, 2, ... draft tokens."""
        return [count / self.passes for count in self.at_least]

    @property
    def given_previous(self) -> list[float]:
        """Of the steps that accepted d - 1 draft tokens or more, the share that accepted the d-th; d = 1, 2, ...

        A step whose tree ended at depth d - 1 (nothing kept below, or no room before ``max_new_tokens``) counts as one
        that did not.
        """
        before = [self.passes, *self.at_least]
        return [count / above for count, above in zip(self.at_least, before) if above]


@dataclass(slots=True)
class Calibration:
    """How often a draft token of confidence c is the target's: a reliability table of 10 bins of equal width.

    Judged are all expanded children, kept by the rerank cut or not, of the root and of each accepted node at which the
    target's token counts: each is right if its token is the one that the output has there.  So no child is left out for
    its low value; only the node above has to lie on the output's path.  At temperature 0 "right" is "the argmax".  At a
    higher one the output's token is drawn from the target's distribution (the loop is lossless), so the share of right
    ones estimates the target's probability of the token; for kept children it is the verdict's own decision.  (That
    holds for trees built without draws, as EAGLE's are.)  Confidences are the head's at temperature 1.

    ECE = sum over bins of n_bin / n * |share right - mean confidence| (Guo et al. 2017, arXiv 1706.04599, equation 3);
    a bin holds [low, high), the last one 1 as well.
    """

    count: list[int] = field(default_factory=lambda: [0] * BINS)
    confidence: list[float] = field(default_factory=lambda: [0.0] * BINS)  # sums
    right: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, step: Step) -> None:
        tree = step.proposal.expanded
        children, tokens, confidence = tree.children(), tree.token_ids.tolist(), tree.confidence.tolist()
        path = [0, *(step.proposal.kept[row - 1] for row in step.verdict.accepted)]
        for node, token in zip(path, step.emitted):  # below path[i] the output has emitted[i]
            for child in children[node]:
                self.put(confidence[child], tokens[child] == token)

    def put(self, confidence: float, right: bool) -> None:
        index = min(int(confidence * BINS), BINS - 1)
        self.count[index] += 1
        self.confidence[index] += confidence
        self.right[index] += right

    def merge(self, other: Calibration) -> None:
        for index in range(BINS):
            self.count[index] += other.count[index]
            self.confidence[index] += other.confidence[index]
            self.right[index] += other.right[index]

    @property
    def ece(self) -> float | None:
        """Expected calibration error; None where nothing was judged."""
        total = sum(self.count)
        if not total:
            return None
        return sum(abs(right - confidence) for right, confidence in zip(self.right, self.confidence)) / total

    def to_dict(self) -> dict[str, Any]:
        return {
            "ece": self.ece,
            "judged": sum(self.count),
            "bins": [
                {
                    "low": index / BINS,
                    "high": (index + 1) / BINS,
                    "count": count,
                    "confidence": self.confidence[index] / count if count else None,
                    "accepted": self.right[index] / count if count else None,
                }
                for index, count in enumerate(self.count)
            ],
        }


@dataclass(slots=True)
class PromptResult:
    """What one prompt adds to the figures. ``skipped``: it was too long for the context."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    calibration: Calibration = field(default_factory=Calibration)
    looping: bool = False
    skipped: bool = False


def _measure(items: Iterator[Prefill | Step]) -> PromptResult:
    result = PromptResult()
    ids: list[int] = []
    for item in items:
        if isinstance(item, Prefill):
            ids.append(item.token)
        else:
            result.acceptance.add(item)
            result.calibration.add(item)
            ids += item.emitted
    result.looping = loop_start(ids) is not None
    return result


Emit = Callable[[str, Any], None]  # ("result", (index, PromptResult)), ("stage", text) or ("notice", text)


class _Runner:
    """Runs prompts on one engine and emits each one's result."""

    def __init__(self, engine: Engine, settings: Settings, method: Method, cache: Path | None) -> None:
        if method == "replay" and engine.model_settings:
            raise ValueError(
                f"the model's generation config sets {', '.join(engine.model_settings)}, which a replay does not follow; "
                "evaluate by the full loop"
            )
        self.engine, self.settings, self.method = engine, settings, method
        self.store: RecordingStore | None = None
        if cache is not None and method == "replay":
            self.store = RecordingStore(
                cache, engine.target, engine.name, max_new_tokens=settings.max_new_tokens, eos_ids=engine.eos_ids
            )

    def run(self, job: Sequence[tuple[int, str]], emit: Emit) -> None:
        """``job`` are prompts with their places in the whole."""
        todo: list[tuple[int, list[int]]] = []
        for index, text in job:
            ids = self.engine.encode(text)
            if len(ids) >= self.engine.target.max_length:
                emit("result", (index, PromptResult(skipped=True)))
            else:
                todo.append((index, ids))
        if self.method == "full loop":
            for index, ids in todo:
                emit("result", (index, _measure(self.engine.run(ids, self.settings))))
            return
        # What is on disk is replayed at once; the rest is decoded together.
        missing = []
        for index, ids in todo:
            recording = self._load(ids, emit)
            if recording is None:
                missing.append((index, ids))
            else:
                emit("result", (index, self._replay(recording)))
        recordings = record(
            self.engine.target, [ids for _, ids in missing], max_new_tokens=self.settings.max_new_tokens,
            eos_ids=self.engine.eos_ids, report=lambda done: emit("stage", f"decoding, token {done}"),
        )  # fmt: skip
        for (index, _), recording in zip(missing, recordings):
            emit("stage", "drafting")
            if self.store is not None:
                self.store.save(recording)
            emit("result", (index, self._replay(recording)))

    def _load(self, ids: Sequence[int], emit: Emit) -> Recording | None:
        if self.store is None:
            return None
        try:
            return self.store.load(ids)
        except ValueError as error:
            emit("notice", f"{error}; it is made again")
            return None

    def _replay(self, recording: Recording) -> PromptResult:
        engine, settings = self.engine, self.settings
        target = ReplayTarget(engine.target.model, recording)
        stops = Stops(settings.max_new_tokens, engine.eos_ids, settings.stop, engine.tokenizer.decode)
        return _measure(
            generate(
                target, engine.drafter(settings, target), recording.prompt_ids, sampling=settings.sampling, stops=stops,
                max_nodes=settings.tree_settings.total_limit,
            )
        )  # fmt: skip


class _Board:
    """Collects what runners emit and shows how far they are."""

    def __init__(self, total: int, progress: bool) -> None:
        self.results: list[PromptResult | None] = [None] * total
        self.sum = Acceptance()
        self.shown = time.monotonic()
        self.bar = tqdm(total=total, unit="prompt", disable=not progress)

    def emit(self, kind: str, value: Any) -> None:
        if kind == "result":
            index, result = value
            self.results[index] = result
            self.sum.merge(result.acceptance)
            self.bar.set_postfix(tau=f"{self.sum.tau:.3f}", refresh=False)
            self.bar.update()
        elif kind == "stage":
            self.bar.set_description_str(value, refresh=False)
            if time.monotonic() - self.shown >= STAGE_SECONDS:
                self.shown = time.monotonic()
                self.bar.refresh()
        else:
            tqdm.write(f"notice: {value}", file=sys.stderr)


def evaluate(
    engine: Engine, prompts: Sequence[str], settings: Settings, *, full_loop: bool = False,
    cache: Path | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """EAGLE-2's acceptance on one set of prompts: its entry of `evaluate_sets`, with ``method`` and ``settings``."""
    result = evaluate_sets(
        lambda: engine, {"prompts": prompts}, settings, full_loop=full_loop, cache=cache, progress=progress
    )
    return {**result["sets"]["prompts"], "method": result["method"], "settings": result["settings"]}


def evaluate_sets(
    load: Callable[[], Engine], sets: Mapping[str, Sequence[str]], settings: Settings, *, full_loop: bool = False,
    cache: Path | None = None, workers: int = 1, threads: int = 1, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Run EAGLE-2 on sets of prompts; plain values for a table or JSON.

    Greedy runs are replayed from a recording (``method`` "replay"), unless ``full_loop``; recordings are kept in the
    folder ``cache`` and found there again.  With several ``workers`` each process calls ``load`` (it must pickle) and
    has ``threads`` threads; results are put together in the order of the prompts.

    ``sets``: each set's figures.  ``tau`` is over all of its steps together; ``tau_by_prompt`` lists each prompt's (None:
    skipped, or ended by its first token), and ``looping`` is the share of outputs that end in a loop: small models
    repeat themselves, and repetition is easy to draft.  ``skipped`` prompts leave no room in the context; they are in no
    other figure.  ``mean_tau`` is the unweighted mean over the sets, ``calibration`` is over all of them together.
    """
    if workers < 1:
        raise ValueError(f"there must be at least 1 worker, not {workers}")
    method: Method = "full loop" if full_loop or not settings.sampling.greedy else "replay"
    texts = [text for prompts in sets.values() for text in prompts]
    if not texts:
        raise ValueError("there are no prompts to evaluate")
    jobs = _jobs(texts, method, workers)
    workers = min(workers, len(jobs))
    board = _Board(len(texts), progress)
    with board.bar:
        if workers == 1:
            engine = load()
            runner = _Runner(engine, settings, method, cache)
            for job in jobs:
                runner.run(job, board.emit)
            about = engine.metadata(settings)
        else:
            about = _run_workers(workers, threads, jobs, (load, settings, method, cache), board.emit)
    results = [result for result in board.results if result is not None]
    assert len(results) == len(texts)
    entries: dict[str, Any] = {}
    total = Calibration()
    at = 0
    for name, prompts in sets.items():
        entries[name] = _figures(results[at : at + len(prompts)], total)
        at += len(prompts)
    taus = [entry["tau"] for entry in entries.values() if entry["target_passes"]]
    return {
        "sets": entries,
        "mean_tau": statistics.fmean(taus) if taus else 0.0,
        "skipped": sum(entry["skipped"] for entry in entries.values()),
        "calibration": total.to_dict(),
        "method": method,
        "workers": workers,
        "settings": about,
    }


def _figures(results: Sequence[PromptResult], all_sets: Calibration) -> dict[str, Any]:
    """One set's figures; its calibration is added to ``all_sets``."""
    total, calibration = Acceptance(), Calibration()
    run = [result for result in results if not result.skipped]
    for result in run:
        total.merge(result.acceptance)
        calibration.merge(result.calibration)
    all_sets.merge(calibration)
    by_prompt = [round(r.acceptance.tau, 4) if r.acceptance.passes else None for r in results]
    known = [tau for tau in by_prompt if tau is not None]
    return {
        "tau": total.tau,
        "prompts": len(run),
        "skipped": len(results) - len(run),
        "tokens": total.tokens,
        "target_passes": total.passes,
        "tau_median": statistics.median(known) if known else None,
        "tau_lowest": min(known, default=None),
        "tau_highest": max(known, default=None),
        "acceptance_by_depth": total.by_depth,
        "acceptance_given_previous": total.given_previous,
        "acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
        "looping": sum(result.looping for result in run) / len(run) if run else 0.0,
        "calibration": calibration.to_dict(),
        "tau_by_prompt": by_prompt,
    }


Job = list[tuple[int, str]]


def _jobs(texts: Sequence[str], method: Method, workers: int) -> list[Job]:
    """Prompts in portions: of like length, since a batch is padded to its longest, and the longest first."""
    if method == "full loop":
        size = 1
    elif workers == 1:
        size = BATCH_ROWS
    else:  # a few portions for each worker, so that they end together
        size = max(4, min(BATCH_ROWS, -(-len(texts) // (4 * workers))))
    order = sorted(range(len(texts)), key=lambda index: (-len(texts[index]), index))
    return [[(index, texts[index]) for index in order[at : at + size]] for at in range(0, len(order), size)]


def _run_workers(workers: int, threads: int, jobs: Sequence[Job], arguments: tuple[Any, ...], emit: Emit) -> Any:
    """Hand ``jobs`` out to processes as they get free; returns the run's metadata.

    A worker's error becomes this process's, a worker that dies is noticed, and none is left behind.
    """
    context = multiprocessing.get_context("spawn")
    processes: dict[Any, Any] = {}  # by this end of their pipes
    waiting = list(reversed(jobs))
    about: Any = None
    try:
        with _interrupts_ignored():  # inherited: Ctrl-C reaches the whole group, and only this process is to act on it
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, threads, *arguments), daemon=True)
                process.start()
                theirs.close()
                processes[ours] = process
        busy = set(processes)
        while busy:
            ready: list[Any] = wait(list(busy))
            for connection in ready:
                try:
                    kind, value = connection.recv()
                except (EOFError, ConnectionError) as error:
                    processes[connection].join(10)
                    code = processes[connection].exitcode
                    raise WorkerError(f"a worker process ended early (exit code {code}); try fewer workers") from error
                if kind == "error":
                    raise WorkerError(value)
                if kind == "crash":
                    raise RuntimeError(f"a worker process failed:\n{value}")
                if kind != "free":
                    emit(kind, value)
                    continue
                about = about or value
                job = waiting.pop() if waiting else None
                # One that ended between its report and this line is noticed by the next `recv`.
                with contextlib.suppress(ConnectionError):
                    connection.send(job)
                if job is None:
                    busy.remove(connection)
    except BaseException:
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for connection, process in processes.items():
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
    return about


def _work(
    connection: Connection, threads: int, load: Callable[[], Engine], settings: Settings, method: Method,
    cache: Path | None,
) -> None:  # fmt: skip
    """A worker process: says that it is free, gets a job, emits results, until it gets None or the parent is gone."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(threads)
    emit: Emit = lambda kind, value: connection.send((kind, value))  # noqa: E731
    with contextlib.suppress(EOFError, ConnectionError):
        try:
            engine = load()
            runner = _Runner(engine, settings, method, cache)
            about = engine.metadata(settings)
            while True:
                emit("free", about)
                job = connection.recv()
                if job is None:
                    return
                runner.run(job, emit)
        except (EOFError, ConnectionError):
            raise
        except (ValueError, ModelError, OSError, ArithmeticError) as error:
            emit("error", (str(error).splitlines() or [type(error).__name__])[0])
        except Exception:
            import traceback

            emit("crash", traceback.format_exc())


@contextlib.contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def table(result: Mapping[str, Any]) -> str:
    """`evaluate_sets`' figures as lines of text: one row a set, then the reliability table."""
    sets: Mapping[str, Any] = result["sets"]
    depth = max((len(entry["acceptance_by_depth"]) for entry in sets.values()), default=0)
    head = ["set", "prompts", "skipped", "tokens", "passes", "tau", "median", "lowest", "highest", "looping", "ECE"]
    rows = [head + [f">={d}" for d in range(1, depth + 1)]]
    for name, entry in sets.items():
        numbers = [entry[key] for key in ("tau", "tau_median", "tau_lowest", "tau_highest", "looping")]
        shares = entry["acceptance_by_depth"] + [0.0] * (depth - len(entry["acceptance_by_depth"]))
        counts = [str(entry[key]) for key in ("prompts", "skipped", "tokens", "target_passes")]
        rows.append([name, *counts, *map(_number, [*numbers, entry["calibration"]["ece"], *shares])])
    if len(sets) > 1:
        rows.append(["mean of tau", "", "", "", "", _number(result["mean_tau"])])
    lines = aligned(rows)
    lines += ["", "accepted at depth d, of the steps that accepted depth d - 1:"]
    given = [[name, *map(_number, entry["acceptance_given_previous"])] for name, entry in sets.items()]
    lines += aligned([["set", *(f"d={d}" for d in range(1, depth + 1))], *given])
    calibration = result["calibration"]
    lines += [
        "",
        f"confidence of {calibration['judged']} draft tokens against the target, ECE {_number(calibration['ece'])}:",
    ]
    bins = [["confidence", "tokens", "mean", "accepted"]]
    for row in calibration["bins"]:
        span = f"{row['low']:.1f}-{row['high']:.1f}"
        bins.append([span, str(row["count"]), _number(row["confidence"]), _number(row["accepted"])])
    return "\n".join([*lines, *aligned(bins)])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    columns = max(map(len, rows))
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(columns)]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
