"""Conversations: turn by turn on one sequence, so that what was said before is neither computed nor tokenised again.

The ids of a turn begin with those of the turns before it, prompts and answers as they were decoded (see
`eagle2.models.encode_turn`).  So the target's KV of them still hold, and so do the draft head's, which were computed with
the same features: only the new rows are computed.  What cannot be reused (another tree, a failed pass, a conversation that
was put aside) is computed again from the ids, with the same result.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from .draft import Drafter, RootOnly
from .engine import Engine, Settings
from .generate import Prefill, Step, generate
from .models import PLAIN_STOP, encode_turn
from .race import LaneProgress, RunRecorder
from .target import ContextLengthError, Target
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Turn:
    """A question on its way: ``prompt_ids`` is all that the model reads, of which the first ``reused`` are computed already.

    ``items`` decodes the answer, as `generate` yields it; closing it ends the answer there.
    """

    prompt_ids: list[int]
    reused: int
    items: Iterator[Prefill | Step]


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as far as it has come.  ``progress`` is live: copy what you keep; ``trace()`` records what there is."""

    turn: Turn
    progress: LaneProgress
    trace: Callable[[], Trace]


class Conversation:
    """One conversation with an engine's model, with caches of its own.

    ``messages`` (role and content) are what was said, ``ids`` all tokens of it, the model's own included.  An answer that is
    ended early, by closing its turn or by an error, counts as far as it came; without a first token the question does not
    count either.  So after any end the next question can be asked.
    """

    def __init__(self, engine: Engine, system: str = "") -> None:
        self.engine = engine
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system.strip() else []
        self.ids: list[int] = []
        self._lane: tuple[tuple[Any, ...], Target, Drafter] | None = None  # what they are good for, and the caches
        self._answering = False

    @property
    def saved(self) -> dict[str, Any]:
        """The conversation as plain values, for `restored`."""
        return {"messages": [dict(message) for message in self.messages], "ids": list(self.ids)}

    @classmethod
    def restored(cls, engine: Engine, saved: dict[str, Any]) -> Conversation:
        """A conversation that goes on from `saved`; its next turn computes all of it again."""
        made = cls(engine)
        made.messages = [dict(message) for message in saved["messages"]]
        made.ids = list(saved["ids"])
        return made

    def ask(self, text: str, settings: Settings, *, drafted: bool = True) -> Turn:
        """The next turn.  Raises, before any pass: ValueError for an empty question or while an answer is under way,
        `ModelError` where the chat template refuses, `ContextLengthError` where the conversation has become too long.
        """
        if not text.strip():
            raise ValueError("the message is empty; write something")
        if self._answering:
            raise ValueError("the last answer is still being written; wait for it or stop it")
        tokenizer = self.engine.tokenizer
        question = {"role": "user", "content": text}
        prompt_ids = encode_turn(tokenizer, [*self.messages, question], self.ids)
        limit = self.engine.target.max_length
        if len(prompt_ids) >= limit:
            raise ContextLengthError(
                f"with this message the conversation has {len(prompt_ids)} tokens, and the model's context is {limit}; "
                "start a new conversation or write less"
            )
        kind = (drafted, settings.tree_settings if drafted else None)
        if self._lane is None or self._lane[0] != kind:
            target = self.engine.target.fork()
            made: Drafter = self.engine.drafter(settings, target) if drafted else RootOnly(target.device)
            self._lane = kind, target, made
        _, target, drafter = self._lane
        # The last token of a turn has no KV yet, or (a stop within accepted tokens) is computed again: see `Drafter.resume`.
        reused = min(target.length, max(len(self.ids) - 1, 0))
        return Turn(prompt_ids, reused, self._answer(question, prompt_ids, reused, settings, target, drafter))

    def follow(self, text: str, settings: Settings) -> Iterator[Reply]:
        """`ask`, recorded: yields the same `Reply` after each pass; closing this ends the answer."""
        turn = self.ask(text, settings)
        recorder = RunRecorder(self.engine.tokenizer, text, turn.prompt_ids, settings.sampling)
        reply = Reply(turn, recorder.lanes["eagle2"], lambda: recorder.trace(self.engine.metadata(settings)))
        with closing(turn.items) as items:  # type: ignore[type-var]
            for item in items:
                recorder.add("eagle2", item)
                yield reply

    def _answer(
        self, question: dict[str, str], prompt_ids: list[int], reused: int, settings: Settings, target: Target,
        drafter: Drafter,
    ) -> Iterator[Prefill | Step]:  # fmt: skip
        tokenizer = self.engine.tokenizer
        plain = not tokenizer.chat_template
        if plain:  # else the model goes on with a question of its own
            settings = dataclasses.replace(settings, stop=(*settings.stop, PLAIN_STOP))
        answer: list[int] = []
        whole = False  # whether target and drafter are between two passes
        self._answering = True
        try:
            items = generate(
                target, drafter, prompt_ids, sampling=settings.sampling, stops=self.engine.stops(settings),
                generator=torch.Generator().manual_seed(settings.seed), max_nodes=settings.tree_settings.total_limit,
                reused=reused,
            )  # fmt: skip
            with closing(items):  # type: ignore[type-var]
                for item in items:
                    answer += (item.token,) if isinstance(item, Prefill) else item.emitted
                    whole = True
                    yield item
                    whole = False
            whole = True
        finally:
            if plain:
                answer = answer[: self._before_stop(answer)]
            if answer:
                text = tokenizer.decode(answer, skip_special_tokens=True)
                self.messages += [question, {"role": "assistant", "content": text}]
                self.ids = [*prompt_ids, *answer]
            if not (whole and answer):
                self._lane = None
            self._answering = False

    def _before_stop(self, answer: list[int]) -> int:
        """How many of the answer's tokens come before the question that the model began to write."""
        decode = self.engine.tokenizer.decode
        if PLAIN_STOP not in decode(answer):
            return len(answer)
        return next(n for n in range(len(answer), -1, -1) if not _ends_in(decode(answer[:n]), PLAIN_STOP))


def _ends_in(text: str, stop: str) -> bool:
    """Whether a text holds ``stop``, or ends with a beginning of it."""
    return stop in text or any(text.endswith(stop[:n]) for n in range(1, len(stop)))


class Conversations:
    """The few conversations whose caches are kept, each under a key that only its owner has.

    Beyond ``most`` the one that rested longest is forgotten, and each after ``seconds``: whoever comes back with what was
    `Conversation.saved` goes on all the same, after its prefill.  Any thread may call.
    """

    def __init__(self, most: int = 4, seconds: float = 600.0) -> None:
        self.most, self.seconds = most, seconds
        self._kept: OrderedDict[str, tuple[float, Conversation]] = OrderedDict()  # key -> when last used; oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, key: str, engine: Engine, saved: dict[str, Any]) -> Conversation:
        """The conversation of ``key`` where it stands as ``saved`` says, else that one made anew.  `put` it back."""
        with self._lock:
            self._forget()
            _, kept = self._kept.pop(key, (0.0, None))
        if kept is not None and kept.engine is engine and kept.saved == saved:
            return kept
        return Conversation.restored(engine, saved)

    def put(self, key: str, conversation: Conversation) -> None:
        with self._lock:
            self._kept[key] = time.monotonic(), conversation
            self._kept.move_to_end(key)
            self._forget()

    def drop(self, key: str) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def _forget(self) -> None:
        oldest_allowed = time.monotonic() - self.seconds
        while self._kept and (len(self._kept) > self.most or next(iter(self._kept.values()))[0] < oldest_allowed):
            self._kept.popitem(last=False)


__all__ = ["Conversation", "Conversations", "Reply", "Turn"]
