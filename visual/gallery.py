"""The row of recorded runs: info about each run, and the page part that shows them as buttons."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eagle2.trace import Trace, TraceError
from visual.theme import plain

HERE = Path(__file__).parent
HTML_TEMPLATE = '<div class="e2 e2-gallery-host"></div>'  # no data in it: a template is evaluated
JS_ON_LOAD = """
const gallery = window.Eagle2Gallery.mount(
  element.querySelector(".e2-gallery-host"), run => trigger("click", { run: run })
);
const show = () => { if (props.value) gallery.show(JSON.parse(props.value)); };
watch("value", show);
show();
"""
EXCERPT = 90  # characters of a prompt on its card
# What an opened file may hold: far above any run made here, far below what would hold up the server or the page.
MAX_PACKED, MAX_UNPACKED = 5 << 20, 20 << 20  # bytes
MAX_STEPS, MAX_NODES, MAX_KEPT, MAX_ALL_NODES = 1024, 2048, 512, 300_000
MAX_OUTPUT, MAX_PROMPT, MAX_TEXT, MAX_METADATA = 4096, 32_768, 1000, 20_000


class Card(NamedTuple):
    """What a card says of one run, in plain text."""

    id: str
    title: str
    prompt: str
    facts: tuple[str, ...]
    look: str = ""


def card(run_id: str, title: str, trace: Trace, look: str = "") -> Card:
    """The card of one run; its trace may come from anywhere, so every text is cut and made plain."""
    facts = [f"tau {trace.tau:.2f}"] if trace.steps else []
    if trace.speedup is not None:
        facts.append(f"{trace.speedup:.2f}×")
    facts.append(f"recorded {cut(str(trace.metadata['created']), 40)[:10]}")
    return Card(run_id, plain(title), cut(trace.prompt_text, EXCERPT), tuple(facts), plain(look))


def cut(text: str, most: int) -> str:
    """One line of plain text of at most so many characters."""
    line = plain(" ".join(text[: 4 * most].split()))
    return line if len(line) <= most and len(text) <= 4 * most else line[: most - 1] + "…"


def open_file(path: str | Path) -> Trace:
    """A trace that a visitor brought; `TraceError` with one sentence where it is none, is damaged or too large."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        size = path.stat().st_size
    except OSError as error:
        raise TraceError("the file did not arrive here; try again") from error
    most, kind = (MAX_PACKED, "a packed") if packed else (MAX_UNPACKED, "an unpacked")
    if size > most:
        raise TraceError(f"the file has {size / (1 << 20):.1f} MB; {kind} trace may have {most >> 20} MB")
    trace = Trace.load(path, limit=MAX_UNPACKED)
    lane = trace.autoregressive
    texts = (*trace.vocabulary.values(), *trace.output_pieces, *trace.prompt_pieces, *(lane.pieces if lane else ()))
    for called, amount, limit in (
        ("steps", len(trace.steps), MAX_STEPS),
        ("nodes in one step", max((len(step.token_ids) for step in trace.steps), default=0), MAX_NODES),
        ("nodes for the target in one step", max((len(step.kept) for step in trace.steps), default=0), MAX_KEPT),
        ("nodes in all", sum(len(step.token_ids) for step in trace.steps), MAX_ALL_NODES),
        ("output tokens", max(len(trace.output_ids), len(lane.token_ids) if lane else 0), MAX_OUTPUT),
        ("prompt tokens", len(trace.prompt_ids), MAX_PROMPT),
        ("characters in its prompt", len(trace.prompt_text), MAX_PROMPT),
        ("characters in one token", max(map(len, texts), default=0), MAX_TEXT),
        ("characters of metadata", len(repr(trace.metadata)), MAX_METADATA),
    ):
        if amount > limit:
            raise TraceError(f"the trace has {amount:,} {called}; {limit:,} can be shown")
    return trace


def message(cards: Sequence[Card], current: str = "", *, busy: bool = False) -> dict[str, Any]:
    """The whole state of the row; ``busy``: a run is under way, so no other can be opened."""
    return {"cards": [item._asdict() for item in cards], "current": current, "busy": busy}


def head() -> str:
    """Elements for a page's head; the player's bring the colours."""
    style, script = ((HERE / f"gallery.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return f"<style>{style}</style>\n<script>{script}</script>\n"
