"""A gallery of made-up runs in a folder of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from visual_helpers import synthetic

from eagle2.gallery import INDEX, Entry, Recording, read_gallery
from eagle2.trace import Trace

HOSTILE = "${1+1} <img src=x onerror=alert(1)> {{value}}"
ENTRIES = (
    Entry("story", "A story", "Step 2 is worth a look.", "Tell a story.", max_new_tokens=24, seed=4),
    Entry("deep", "A deep tree", "Step 3 is deep.", "Grow deep.", max_new_tokens=32, seed=5, depth=6, top_k=3, total_tokens=12),
    Entry("hostile", "<b>${1+1}</b>", HOSTILE, HOSTILE, seed=6),
    Entry("flat", "Static", "It is static.", "Tell a story.", "story", max_new_tokens=24, seed=4, tree="static"),
)  # fmt: skip


def trace_of(entry: Entry, steps: int = 6) -> Trace:
    """A run that could have been recorded for the entry."""
    made = synthetic(steps, depth=entry.depth, top_k=entry.top_k, total=entry.total_tokens, seed=entry.seed)
    tree = {"kind": entry.tree, "depth": entry.depth, "top_k": entry.top_k, "total_tokens": entry.total_tokens}
    metadata = dict(made.metadata) | {"max_new_tokens": entry.max_new_tokens, "tree": tree}
    return replace(made, metadata=metadata, prompt_text=entry.prompt)


def index_text(*entries: Entry) -> str:
    """TOML of entries; a JSON string or number is a TOML one too."""
    names = Entry.__dataclass_fields__
    return "".join(
        "[[run]]\n" + "".join(f"{name} = {json.dumps(getattr(entry, name))}\n" for name in names) for entry in entries
    )


def made_gallery(folder: Path) -> tuple[Recording, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(index_text(*ENTRIES), encoding="utf-8")
    for entry in ENTRIES:
        trace_of(entry).save(folder / entry.file)
    return read_gallery(folder)
