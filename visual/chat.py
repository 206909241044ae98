"""The conversation on the page: what each message shows, and the page part that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from visual.theme import plain

HERE = Path(__file__).parent
HTML_TEMPLATE = '<div class="e2 e2-chat-host"></div>'  # no data in it: a template is evaluated
JS_ON_LOAD = """
const chat = window.Eagle2Chat.mount(
  element.querySelector(".e2-chat-host"), answer => trigger("click", { answer: answer })
);
const show = () => { if (props.value) chat.show(JSON.parse(props.value)); };
watch("value", show);
show();
"""
ENDS = {  # what is said of an answer that the model did not end itself
    "length": "ended at the most new tokens",
    "context": "ended at the model's context",
    "stopped": "stopped",
}


class Message(NamedTuple):
    """One message in plain text: a person's has one piece, the model's one for each token."""

    role: str  # "user" or "assistant"
    pieces: tuple[str, ...]
    origins: tuple[str, ...] = ()  # of the pieces: "prefill", "drafted", "bonus" or "correction"
    facts: tuple[str, ...] = ()
    trees: bool = False  # whether the answer's trees can be opened


def question(text: str) -> Message:
    return Message("user", (plain(text),))


def answer(
    pieces: Sequence[str], origins: Sequence[str], *, tau: float, tokens_per_second: float, reused: int,
    prompt_tokens: int, finish_reason: str | None, trees: bool = False,
) -> Message:  # fmt: skip
    """An answer with its figures; ``finish_reason`` None: it is still being written."""
    facts = [
        f"{len(pieces)} token{'s' * (len(pieces) != 1)}",
        *([f"tau {tau:.2f}"] if tau else []),
        f"{tokens_per_second:.1f} tokens/s",
        f"{reused} of {prompt_tokens} prompt tokens reused",
        *([ENDS[finish_reason]] if finish_reason in ENDS else []),
    ]
    return Message("assistant", tuple(plain(piece) for piece in pieces), tuple(origins), tuple(facts), trees)


def message(
    messages: Sequence[Message], *, start: int = 0, note: str = "", level: str = "info", busy: bool = False
) -> dict[str, Any]:
    """The state of the page part: the messages from number ``start`` on, those before it stay as they are.

    ``level`` of the note is "info" or "error"; ``busy``: an answer is being written.
    """
    shown = [item._asdict() for item in messages[start:]]
    return {"start": start, "messages": shown, "note": note, "level": level, "busy": busy}


def head() -> str:
    """Elements for a page's head; the player's bring the colours."""
    style, script = ((HERE / f"chat.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return f"<style>{style}</style>\n<script>{script}</script>\n"
