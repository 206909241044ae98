"""Recorded runs: plain data, versioned JSON, standard library only.

A trace holds everything that a viewer shows of one run: the prompt, the output, each decoding step with its expanded
tree, rerank cut, target verdict and seconds, and, where the run was a race, the autoregressive lane.  It needs neither
torch nor the models to be opened.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

FORMAT = "eagle2-trace"
VERSION = 2  # 2: `StepTrace.copied`
MAX_JSON_BYTES = 64 * 1024 * 1024  # after decompression; the largest default run takes about 2 MB

STOPPED = "stopped"  # finish reason of a run that a person ended

NextKind = Literal["bonus", "correction"]
Origin = Literal["prefill", "drafted", "bonus", "correction"]


class TraceError(ValueError):
    """The file or the data is not a valid trace; the message is one sentence for a person."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TraceError(message)


def _check_seconds(name: str, *values: float) -> None:
    _require(all(math.isfinite(v) and v >= 0 for v in values), f"{name} must be finite and not negative")


def _check_ids(name: str, values: Sequence[int]) -> None:
    _require(all(v >= 0 for v in values), f"{name} must be token ids, none negative")


@dataclass(frozen=True, slots=True)
class Decision:
    """One accept-or-reject decision of the verifier, in the order in which it was taken.

    ``target_prob`` is what the draw was compared with: the target's probability of the node's token after those already
    rejected at this parent were removed.  Greedy decoding draws nothing: ``draw`` is None and the distribution is all on
    the target's first choice, so the probability is 1 or 0.
    """

    node: int
    target_prob: float
    draw: float | None
    accepted: bool

    def __post_init__(self) -> None:
        _require(0 <= self.target_prob <= 1 + 1e-6, "a decision's target probability must lie between 0 and 1")
        _require(self.draw is None or 0 <= self.draw <= 1, "a decision's draw must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One decoding step.  N = nodes of the expanded tree (node 0 is the root token), K = kept drafted nodes.

    All node numbers are indices into the expanded tree.  Verification row 0 is the root, row ``i + 1`` is ``kept[i]``.
    """

    token_ids: tuple[int, ...]  # [N]
    parents: tuple[int, ...]  # [N], root -1, parent index < child index
    confidence: tuple[float, ...]  # [N], the drafter's probability of the token after its path; root 1
    log_value: tuple[float, ...]  # [N], sum of log confidences from the root; root 0
    # Expansion phase: nodes fed to the draft head, pass by pass. The first pass, which catches up with the committed text
    # and gives the root's children, is not listed.
    selected: tuple[tuple[int, ...], ...]
    kept: tuple[int, ...]  # [K], reranking phase: nodes that the target verifies, in row order
    target_probs: tuple[float, ...]  # [K], the target's probability of each kept token after its parent
    target_ranks: tuple[int, ...]  # [K], 0 = the target's most probable token there
    choice_ids: tuple[int, ...]  # [K + 1], the target's most probable token after each row
    choice_probs: tuple[float, ...]  # [K + 1]
    accepted: tuple[int, ...]  # accepted path without the root
    next_id: int  # the target's own token after the path
    next_kind: NextKind  # bonus: the path reached a leaf; correction: no child of its last node was accepted
    decisions: tuple[Decision, ...]
    emitted: int  # tokens of this step that count: accepted + 1, fewer where a stop or a cap cuts
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    copied: tuple[int, ...] = ()  # nodes whose confidence is prompt lookup's, which proposed their token too or alone

    def __post_init__(self) -> None:
        n, k = len(self.token_ids), len(self.kept)
        _require(n >= 1, "a step needs at least the root node")
        _check_ids("a step's tokens", (*self.token_ids, *self.choice_ids, self.next_id))
        for name in ("parents", "confidence", "log_value"):
            _require(len(getattr(self, name)) == n, f"a step's {name} must have one entry per node")
        _require(self.parents[0] == -1, "node 0 must be the root, with parent -1")
        _require(all(0 <= p < i for i, p in enumerate(self.parents) if i), "a node's parent must come before it")
        _require(all(0 <= c <= 1 + 1e-6 for c in self.confidence), "confidences must lie between 0 and 1")
        _require(all(math.isfinite(v) and v <= 1e-6 for v in self.log_value), "log values must be finite, at most 0")
        _require(all(0 <= i < n for pas in self.selected for i in pas), "a selected node is not in the tree")
        _require(all(1 <= i < n for i in self.copied), "a copied node is not in the tree")
        _require(all(1 <= i < n for i in self.kept) and len(set(self.kept)) == k, "kept nodes must be distinct drafts")
        row = {0: 0} | {node: i + 1 for i, node in enumerate(self.kept)}
        _require(
            all(row.get(self.parents[node], k + 1) < row[node] for node in self.kept),
            "a kept node's parent must be kept and come before it",
        )
        for name in ("target_probs", "target_ranks"):
            _require(len(getattr(self, name)) == k, f"a step's {name} must have one entry per kept node")
        for name in ("choice_ids", "choice_probs"):
            _require(len(getattr(self, name)) == k + 1, f"a step's {name} must have one entry per verified row")
        _require(all(0 <= p <= 1 + 1e-6 for p in (*self.target_probs, *self.choice_probs)), "probabilities lie in 0..1")
        _require(all(r >= 0 for r in self.target_ranks), "target ranks must not be negative")
        at = 0
        for node in self.accepted:
            _require(node in row and node > 0 and self.parents[node] == at, "the accepted path must follow kept nodes")
            at = node
        _require(self.next_kind in ("bonus", "correction"), "next_kind must be 'bonus' or 'correction'")
        _require(
            all(d.node in row and d.node > 0 for d in self.decisions), "a decision is about a node that was not kept"
        )
        _require(1 <= self.emitted <= len(self.accepted) + 1, "emitted must lie between 1 and accepted + 1")
        _check_seconds("a step's seconds", self.draft_seconds, self.verify_seconds, self.commit_seconds)

    @property
    def seconds(self) -> float:
        """Own clock of the step: drafting + verifying + committing."""
        return self.draft_seconds + self.verify_seconds + self.commit_seconds

    @property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node ``[N]``, root 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def emitted_ids(self) -> tuple[int, ...]:
        """Tokens that this step added to the output: accepted ones, then the target's own, cut at the stop."""
        return (*(self.token_ids[i] for i in self.accepted), self.next_id)[: self.emitted]

    @property
    def emitted_origins(self) -> tuple[Origin, ...]:
        """Where each of ``emitted_ids`` came from."""
        drafted: Origin = "drafted"
        return (*((drafted,) * len(self.accepted)), self.next_kind)[: self.emitted]


@dataclass(frozen=True, slots=True)
class LaneTrace:
    """The autoregressive lane of a race: one token per target pass."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]  # what each token adds to the text; "".join(pieces) is the text
    prefill_seconds: float
    step_seconds: tuple[float, ...]  # one per pass after the prefill, which gives the first token
    finish_reason: str

    def __post_init__(self) -> None:
        _check_ids("the lane's tokens", self.token_ids)
        _require(len(self.pieces) == len(self.token_ids), "the lane needs one piece per token")
        _require(
            len(self.step_seconds) == max(len(self.token_ids) - 1, 0), "the lane needs one time per token but the first"
        )
        _check_seconds("the lane's seconds", self.prefill_seconds, *self.step_seconds)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def seconds(self) -> float:
        """Own clock: prefill and all passes."""
        return self.prefill_seconds + sum(self.step_seconds)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0

    @property
    def target_passes(self) -> int:
        """Decoding passes of the target; the prefill is not counted."""
        return len(self.step_seconds)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first output position where the two lanes differ.

    ``logit_gap`` is the target's logit of its own first choice minus that of the other lane's token, both at this
    position, in the autoregressive pass: near 0 means that rounding decided.  None where a lane merely ended earlier, and
    where tokens were sampled.
    """

    index: int
    eagle2_id: int | None
    autoregressive_id: int | None
    logit_gap: float | None

    def __post_init__(self) -> None:
        _require(self.index >= 0, "the first difference must not lie before the output")


@dataclass(frozen=True, slots=True)
class Trace:
    """One recorded run.

    ``metadata`` has at least: ``target``, ``head``, ``dtype``, ``device``, ``threads``, ``seed``, ``sampling``
    (temperature, top_k, top_p), ``tree`` (kind, depth, top_k, total_tokens), ``versions``, ``clock`` ("measured" or
    "modelled") and ``created`` (ISO 8601).  ``costs``, where known, is `eagle2.cost.CostModel.to_dict`; an automatic tree
    has "auto" for ``depth`` or ``total_tokens``.  ``vocabulary`` gives a display text for every token id that occurs.
    """

    metadata: Mapping[str, Any]
    prompt_text: str  # what the user typed
    prompt_ids: tuple[int, ...]  # what the target saw: chat template included
    prompt_pieces: tuple[str, ...]
    output_ids: tuple[int, ...]
    output_pieces: tuple[
        str, ...
    ]  # what each token adds to the text; a character of several tokens comes with its last
    finish_reason: str
    prefill_seconds: float  # target and draft head
    steps: tuple[StepTrace, ...]
    vocabulary: Mapping[int, str]
    autoregressive: LaneTrace | None = None
    difference: Difference | None = None
    REQUIRED_METADATA: ClassVar[tuple[str, ...]] = (
        "target", "head", "dtype", "device", "threads", "seed", "sampling", "tree", "versions", "clock", "created",
    )  # fmt: skip

    def __post_init__(self) -> None:
        missing = [key for key in self.REQUIRED_METADATA if key not in self.metadata]
        _require(not missing, f"the trace's metadata lacks {', '.join(missing)}")
        _require(self.metadata["clock"] in ("measured", "modelled"), "the clock must be 'measured' or 'modelled'")
        _require(len(self.prompt_pieces) == len(self.prompt_ids), "the prompt needs one piece per token")
        _require(len(self.output_pieces) == len(self.output_ids), "the output needs one piece per token")
        _check_ids("the trace's tokens", (*self.prompt_ids, *self.output_ids))
        _check_seconds("the prefill's seconds", self.prefill_seconds)
        made = self.output_ids[:1] + tuple(t for step in self.steps for t in step.emitted_ids)
        _require(made == self.output_ids, "the steps' tokens do not add up to the output")
        root = self.output_ids[:1]
        for step in self.steps:
            _require(step.token_ids[:1] == root, "a step's root must be the token decided before it")
            root = step.emitted_ids[-1:]
        used = {t for s in self.steps for t in (*s.token_ids, *s.choice_ids, s.next_id)} | set(self.output_ids)
        _require(used <= set(self.vocabulary), "the vocabulary lacks a token that occurs in the trace")

    @property
    def text(self) -> str:
        return "".join(self.output_pieces)

    @property
    def tau(self) -> float:
        """Tokens per target pass, the target's own token included, the prefill and its token left out."""
        return (len(self.output_ids) - 1) / len(self.steps) if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """Own clock of the EAGLE-2 lane: prefill and all steps."""
        return self.prefill_seconds + sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return len(self.output_ids) / self.seconds if self.seconds else 0.0

    @property
    def speedup(self) -> float | None:
        """Tokens per second over the autoregressive lane's; None without that lane."""
        if self.autoregressive is None or not self.autoregressive.tokens_per_second:
            return None
        return self.tokens_per_second / self.autoregressive.tokens_per_second

    @property
    def equal(self) -> bool | None:
        """Whether both lanes gave the same ids; None without the autoregressive lane.

        Where a run was stopped, only what both lanes had reached is compared.
        """
        if self.autoregressive is None:
            return None
        ours, plain = self.output_ids, self.autoregressive.token_ids
        if STOPPED in (self.finish_reason, self.autoregressive.finish_reason):
            both = min(len(ours), len(plain))
            return ours[:both] == plain[:both]
        return ours == plain

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each output token came from, ``[len(output_ids)]``."""
        first: tuple[Origin, ...] = ("prefill",) if self.output_ids else ()
        return first + tuple(o for step in self.steps for o in step.emitted_origins)

    def step_of(self, output_index: int) -> int | None:
        """Number of the step that made an output token; None for the first token, which the prefill gave."""
        end = 1
        for number, step in enumerate(self.steps):
            end += step.emitted
            if 1 <= output_index < end:
                return number
        return None

    def summary(self) -> dict[str, Any]:
        """The outcome as plain data: what ``python -m eagle2 race --json`` prints and the app's API returns."""
        lanes = {"eagle2": lane_summary(self, self.output_ids, len(self.steps))}
        if (lane := self.autoregressive) is not None:
            lanes["autoregressive"] = lane_summary(lane, lane.token_ids, lane.target_passes)
        return {
            "lanes": lanes,
            "tau": self.tau,
            "speedup": self.speedup,
            "equal": self.equal,
            "first_difference": None if self.difference is None else _plain(self.difference),
            "settings": dict(self.metadata),
        }

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        for item in dataclasses.fields(self):
            data[item.name] = _plain(getattr(self, item.name))
        return data

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"), allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write JSON, gzipped where the name ends in ``.gz``; the same trace gives the same bytes."""
        raw = self.to_json().encode()
        path = Path(path)
        path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)

    @classmethod
    def from_dict(cls, data: object) -> Trace:
        """Build from parsed JSON; raises `TraceError` with one sentence where it is damaged or too new."""
        _require(isinstance(data, dict) and data.get("format") == FORMAT, "this file is not an EAGLE-2 trace")
        assert isinstance(data, dict)
        version = data.get("version")
        _require(
            isinstance(version, int) and not isinstance(version, bool) and version >= 1, "the trace has no version"
        )
        assert isinstance(version, int)
        _require(
            version <= VERSION,
            f"the trace has version {version}, newer than this program's {VERSION}; update the program to open it",
        )
        body = {key: value for key, value in data.items() if key not in ("format", "version")}
        try:
            body["vocabulary"] = {int(key): _text(value) for key, value in body["vocabulary"].items()}
            body["steps"] = tuple(_build(StepTrace, step) for step in body["steps"])
            if body.get("autoregressive") is not None:
                body["autoregressive"] = _build(LaneTrace, body["autoregressive"])
            if body.get("difference") is not None:
                body["difference"] = _build(Difference, body["difference"])
            return _build(cls, body)
        except TraceError:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise TraceError(f"the trace is damaged: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Trace:
        try:
            data = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"the trace is not valid JSON: {error}") from error
        return cls.from_dict(data)

    @classmethod
    def load(cls, path: str | Path, limit: int = MAX_JSON_BYTES) -> Trace:
        """Read ``.json`` or ``.json.gz`` (told apart by content), refusing more than ``limit`` bytes of JSON."""
        try:
            with open(path, "rb") as file:
                zipped = file.read(2) == b"\x1f\x8b"
            with gzip.open(path, "rb") if zipped else open(path, "rb") as file:
                raw = file.read(limit + 1)
        except (OSError, EOFError) as error:
            raise TraceError(f"the trace cannot be read: {error}") from error
        except Exception as error:  # zlib.error, which is neither
            raise TraceError(f"the trace is damaged: {error}") from error
        _require(len(raw) <= limit, f"the trace is larger than {limit >> 20} MB")
        return cls.from_json(raw)


class _Lane(Protocol):
    @property
    def text(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def tokens_per_second(self) -> float: ...


def lane_summary(lane: _Lane, token_ids: Sequence[int], target_passes: int) -> dict[str, Any]:
    """One lane of `Trace.summary`; a lane that is only followed (`eagle2.race.LaneProgress`) fits too."""
    return {
        "text": lane.text,
        "token_ids": list(token_ids),
        "seconds": lane.seconds,
        "tokens_per_second": lane.tokens_per_second,
        "target_passes": target_passes,
    }


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a token's text is not a string")
    return value


def _plain(value: Any) -> Any:
    """Dataclasses to dicts, tuples to lists, mapping keys to strings; nothing else changes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


_CHECKS: dict[str, Any] = {
    "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "float": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
    "str": lambda v: isinstance(v, str),
    "bool": lambda v: isinstance(v, bool),
    "NextKind": lambda v: isinstance(v, str),
}


def _build(kind: Any, data: Any) -> Any:
    """Make a dataclass from parsed JSON, checking names and the types of plain values and columns."""
    if not isinstance(data, dict):
        raise TypeError(f"{kind.__name__} is not an object")
    fields = {item.name: item for item in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise TypeError(f"unknown field {unknown[0]!r}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        declared = str(fields[name].type)
        optional = declared.endswith(" | None")
        declared = declared.removesuffix(" | None")
        if optional and value is None:
            values[name] = None
        elif declared in _CHECKS:
            if not _CHECKS[declared](value):
                raise TypeError(f"{name} is not of type {declared}")
            values[name] = value
        elif declared == "tuple[tuple[int, ...], ...]":
            values[name] = tuple(_column("int", name, row) for row in value)
        elif declared == "tuple[Decision, ...]":
            values[name] = tuple(_build(Decision, item) for item in value)
        elif declared.startswith("tuple[") and declared[6:-6] in _CHECKS:
            values[name] = _column(declared[6:-6], name, value)
        else:  # metadata, vocabulary and nested dataclasses, which the caller has built
            values[name] = value
    if not isinstance(values.get("metadata", {}), Mapping):
        raise TypeError("metadata is not an object")
    return kind(**values)


def precision(metadata: Mapping[str, Any]) -> str:
    """The weights' dtype, and the sums' where that is another: "bfloat16 (sums in float32)"."""
    dtype, sums = str(metadata["dtype"]), arithmetic(metadata)
    return dtype if sums == dtype else f"{dtype} (sums in {sums})"


def machinery(metadata: Mapping[str, Any]) -> str:
    """What a figure's passes ran on: "float32 on cpu (x86_64), 2 threads, native forward"."""
    forward = metadata.get("forward")  # older recordings do not say
    ran = f", {forward} forward" if forward else ""
    return f"{precision(metadata)} on {metadata['device']}, {metadata['threads']} threads{ran}"


def arithmetic(metadata: Mapping[str, Any]) -> str:
    """The sums' dtype: the weights' where a recording names no other."""
    return str(metadata.get("arithmetic", metadata["dtype"]))


def _column(kind: str, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not all(_CHECKS[kind](item) for item in value):
        raise TypeError(f"{name} is not a list of {kind}")
    return tuple(value)


__all__ = [
    "FORMAT", "MAX_JSON_BYTES", "STOPPED", "VERSION", "Decision", "Difference", "LaneTrace", "NextKind", "Origin", "StepTrace",
    "Trace", "TraceError", "arithmetic", "lane_summary", "machinery", "precision",
]  # fmt: skip
