"""The gallery: runs described in an index file, and their recordings beside it.  Torch only where one is recorded."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .trace import Trace, TraceError

if TYPE_CHECKING:
    from .engine import Settings
    from .race import RaceUpdate

INDEX = "index.toml"
FOLDER = Path(__file__).parent.parent / "assets" / "traces"
MAX_TITLE, MAX_LOOK, MAX_PROMPT = 40, 240, 2000
RESERVED = "your-"  # ids of a visitor's own runs

_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
}


class GalleryError(ValueError):
    """The index or a recording cannot be used; the message is one sentence for a person."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One run of the index.  ``against``: this is a static tree's run, shown beside the dynamic one of that id."""

    id: str
    title: str
    look: str  # what to look at there
    prompt: str
    against: str = ""
    max_new_tokens: int = 96
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    tree: str = "dynamic"
    depth: int = 3
    top_k: int = 4
    total_tokens: int = 5

    def __post_init__(self) -> None:
        def require(good: bool, message: str) -> None:
            if not good:
                raise GalleryError(message)

        for item in fields(self):
            kind, called = _KINDS[str(item.type)]
            value = getattr(self, item.name)
            require(isinstance(value, kind) and not isinstance(value, bool), f"{item.name} must be {called}")
        require(
            len(self.id) <= 40 and _SLUG.fullmatch(self.id) is not None and not self.id.startswith(RESERVED),
            f"an id has up to 40 small letters, digits and single dashes and does not begin with {RESERVED!r}: {self.id!r}",
        )
        for name, most in (("title", MAX_TITLE), ("look", MAX_LOOK), ("prompt", MAX_PROMPT)):
            text = getattr(self, name)
            require(bool(text.strip()), f"{self.id} has an empty {name}")
            require(len(text) <= most, f"the {name} of {self.id} has {len(text)} characters; the limit is {most:,}")
        require(self.tree in ("dynamic", "static"), f"the tree of {self.id} must be dynamic or static")
        require(
            not self.against or self.tree == "static", f"{self.id} stands against a run, so its tree must be static"
        )
        numbers = (self.max_new_tokens, self.depth, self.top_k, self.total_tokens)
        require(min(numbers) >= 1 and self.seed >= 0, f"a whole number of {self.id} is too small")
        require(
            0 <= self.temperature <= 2 and 0 < self.top_p <= 1, f"temperature or top_p of {self.id} is out of range"
        )

    @property
    def file(self) -> str:
        return f"{self.id}.json.gz"

    @property
    def budget(self) -> tuple[Any, ...]:
        """What a static run must share with the dynamic one beside it."""
        return (
            self.prompt, self.max_new_tokens, self.temperature, self.top_p, self.seed, self.depth, self.top_k,
            self.total_tokens,
        )  # fmt: skip

    def settings(self) -> Settings:
        from .engine import Settings

        return Settings(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed,
            tree=self.tree, depth=self.depth, top_k=self.top_k, total_tokens=self.total_tokens,  # type: ignore[arg-type]
        )  # fmt: skip

    def differs(self, trace: Trace) -> str:
        """The first setting in which a recording is not this run; empty where it is."""
        meta = trace.metadata
        wanted: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "sampling": {"temperature": self.temperature, "top_k": 0, "top_p": self.top_p},
            "tree": {
                "kind": self.tree, "depth": self.depth, "top_k": self.top_k, "total_tokens": self.total_tokens,
                "lookup": False,
            },
        }  # fmt: skip
        if isinstance(tree := meta.get("tree"), Mapping):
            meta = {**meta, "tree": {"lookup": False, **tree}}  # runs of version 1 do not say
        if trace.prompt_text != self.prompt:
            return "prompt"
        return next((name for name, value in wanted.items() if meta.get(name) != value), "")


@dataclass(frozen=True, slots=True)
class Recording:
    """A run of the gallery that can be shown."""

    entry: Entry
    path: Path
    trace: Trace


def read_index(path: str | Path) -> tuple[Entry, ...]:
    """The runs of an index file, in its order; `GalleryError` names what is wrong in it."""
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GalleryError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise GalleryError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(set(data) - {"run"})
    runs = data.get("run")
    if unknown:
        raise GalleryError(f"{path} has an unknown key {unknown[0]!r}; it holds [[run]] tables only")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise GalleryError(f"{path} has no [[run]] tables")
    known = {item.name for item in fields(Entry)}
    entries: dict[str, Entry] = {}
    for number, run in enumerate(runs, start=1):
        where = f"{path}, run {number}"
        if strange := sorted(set(run) - known):
            raise GalleryError(f"{where}: unknown key {strange[0]!r}")
        if missing := [name for name in ("id", "title", "look", "prompt") if name not in run]:
            raise GalleryError(f"{where}: {missing[0]} is missing")
        try:
            entry = Entry(**run)
        except GalleryError as error:
            raise GalleryError(f"{where}: {error}") from error
        if entry.id in entries:
            raise GalleryError(f"{where}: the id {entry.id!r} is used twice")
        entries[entry.id] = entry
    for entry in entries.values():
        if entry.against:
            other = entries.get(entry.against)
            if other is None or other.tree != "dynamic":
                raise GalleryError(f"{path}: {entry.id} stands against {entry.against!r}, which is no dynamic run here")
            if other.budget != entry.budget:
                raise GalleryError(f"{path}: {entry.id} and {other.id} must have the same prompt, settings and budget")
    if next(iter(entries.values())).against:
        raise GalleryError(f"{path}: the first run is the one that opens, so it cannot stand against another")
    return tuple(entries.values())


def read_gallery(folder: str | Path = FOLDER) -> tuple[Recording, ...]:
    """Every run of the index with its recording; `GalleryError` where one is missing, damaged or of other settings."""
    folder = Path(folder)
    recordings = []
    for entry in read_index(folder / INDEX):
        path = folder / entry.file
        if not path.exists():
            raise GalleryError(f"{path} is missing; make it with `python -m eagle2 gallery --only {entry.id}`")
        try:
            trace = Trace.load(path)
        except TraceError as error:
            raise GalleryError(f"{path}: {error}") from error
        if differs := entry.differs(trace):
            raise GalleryError(
                f"{path} was recorded with another {differs} than the index says; make it again with "
                f"`python -m eagle2 gallery --only {entry.id}`"
            )
        recordings.append(Recording(entry, path, trace))
    return tuple(recordings)


class Racer(Protocol):
    """What is needed of an `eagle2.engine.Engine` to record."""

    def race(self, prompt: str, settings: Any, /) -> Iterator[RaceUpdate]: ...


def chosen(entries: Sequence[Entry], only: Sequence[str]) -> tuple[Entry, ...]:
    """The entries of these ids, all without any."""
    known = {entry.id for entry in entries}
    if unknown := [name for name in only if name not in known]:
        raise GalleryError(f"the index has no run {unknown[0]!r}; it has {', '.join(sorted(known))}")
    return tuple(entry for entry in entries if not only or entry.id in only)


def record(
    engine: Racer, entry: Entry, folder: str | Path, made: Callable[[int], object] = lambda tokens: None
) -> Recording:
    """Race one entry and keep it; a recording that is there is replaced only by a whole new one.

    ``made`` is told of new tokens, of both lanes together.
    """
    trace, before = None, 0
    with closing(engine.race(entry.prompt, entry.settings())) as updates:  # type: ignore[type-var]
        for update in updates:
            tokens = len(update.eagle2.token_ids) + len(update.autoregressive.token_ids)
            made(tokens - before)
            before, trace = tokens, update.trace
    if trace is None:
        raise GalleryError(f"the run {entry.id} ended without a result")
    if differs := entry.differs(trace):
        raise GalleryError(f"the engine ran {entry.id} with another {differs} than the index says")
    path = Path(folder) / entry.file
    partial = path.with_name(f"{entry.id}.partial.gz")  # the name decides whether it is packed
    try:
        trace.save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return Recording(entry, path, trace)


def row(recording: Recording) -> dict[str, Any]:
    """What the command prints of one recording."""
    trace = recording.trace
    return {
        "id": recording.entry.id,
        "tokens": len(trace.output_ids),
        "steps": len(trace.steps),
        "tau": trace.tau,
        "speedup": trace.speedup,
        "equal": trace.equal,
        "finish_reason": trace.finish_reason,
        "bytes": recording.path.stat().st_size,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as text with a line of totals."""
    lines = [f"{'run':<26}{'tokens':>7}{'steps':>7}{'tau':>7}{'speed-up':>10}{'same':>6}{'end':>9}{'bytes':>10}"]
    lines += [
        f"{r['id']:<26}{r['tokens']:>7}{r['steps']:>7}{r['tau']:>7.2f}{r['speedup'] or 0:>9.2f}x"
        f"{'yes' if r['equal'] else 'no':>6}{r['finish_reason']:>9}{r['bytes']:>10,}"
        for r in rows
    ]
    lines.append(f"{len(rows)} run{'s' * (len(rows) != 1)}, {sum(r['bytes'] for r in rows):,} bytes")
    return "\n".join(lines)
