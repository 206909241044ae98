"""ZeroGPU: Hugging Face lends a GPU for one call at a time, in a process forked for that call.

There ``spaces.GPU`` runs a generator in a fork of this process: arguments and yields are pickled, and what the fork changes
in memory never comes back.  So this process keeps the models on the CPU and never touches CUDA.  The fork moves them to
the GPU, makes an `Engine` of them, keeps it for as long as the fork is used again, and yields plain data.

Only the standard library is imported, so that the page need not wait for torch.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

SEND_SECONDS = 0.25  # between two updates that the fork sends; each carries the run so far
# What a run is estimated to take, on the generous side: a run that outlasts its estimate is killed.  Nothing was measured
# on ZeroGPU itself.
START_SECONDS = 5.0  # the fork, CUDA's start, the prefill
MOVED_BYTES_PER_SECOND = 4e9
LAYER_SECONDS = 0.001  # of a pass over one layer of the target, its kernels started one by one
DRAFT_SECONDS = 0.003  # of a pass of the head
MEASURE_SECONDS = 5.0  # an automatic tree measures first what passes cost
AUTOMATIC_DEPTH = 8  # the deepest tree that an automatic one becomes

USER_ERRORS = (ValueError, RuntimeError, ArithmeticError)  # with a message for a person


def on_zero_gpu() -> bool:
    """Whether this process runs on ZeroGPU, by the variable and the values that the ``spaces`` package goes by."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


class Parts(Protocol):
    """What an engine is made of, loaded on the CPU: `eagle2.engine.Parts`."""

    name: str
    head_name: str
    dtype: str

    @property
    def layers(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    def engine(self, device: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Kept:
    """The snapshot of an update that was sent: the run as it was then."""

    trace: Any

    def __call__(self) -> Any:
        return self.trace


class LentEngine:
    """What the app needs of an `Engine`, on a GPU that ``lend`` (``spaces.GPU``) gives for the length of each run.

    Made when the program starts, since ZeroGPU asks then for functions that want a GPU; `use` gives it the models later.
    """

    def __init__(self, lend: Callable[..., Any], device: str = "cuda") -> None:
        self._device = device
        self._parts: Any = None
        self._engine: Any = None  # in the fork only
        self._lent = lend(duration=self.seconds)(self._answers)

    def use(self, parts: Parts) -> LentEngine:
        """Run on these from now on."""
        self._parts, self._engine = parts, None
        return self

    @property
    def name(self) -> str:
        return str(self._parts.name)

    @property
    def head_name(self) -> str:
        return str(self._parts.head_name)

    @property
    def dtype(self) -> str:
        return str(self._parts.dtype)

    @property
    def device(self) -> str:
        return f"{self._device}, lent for each run"

    def calibrate(self) -> None:
        """Nothing: costs are those of the GPU, and are measured in the first run that wants them."""

    def race(self, prompt: str, settings: Any) -> Iterator[Any]:
        """`Engine.race`, with an update every `SEND_SECONDS` and the last one."""
        yield from self._asked("race", prompt, settings)

    def follow(self, prompt: str, settings: Any) -> Iterator[Any]:
        """`Engine.follow`, with a None every `SEND_SECONDS`."""
        yield from self._asked("follow", prompt, settings)

    def seconds(self, method: str, prompt: str, settings: Any) -> int:
        """How long a GPU is asked for; the parameters are those of `_answers`."""
        automatic = settings.depth == "auto"
        lanes = 2 if method == "race" else 1
        depth = AUTOMATIC_DEPTH if automatic else settings.depth
        token = lanes * self._parts.layers * LAYER_SECONDS + depth * DRAFT_SECONDS  # as if no draft were accepted
        start = (
            START_SECONDS + self._parts.weight_bytes / MOVED_BYTES_PER_SECOND + (MEASURE_SECONDS if automatic else 0)
        )
        return math.ceil(start + settings.max_new_tokens * token)

    def _asked(self, *request: Any) -> Iterator[Any]:
        """The fork's answers; RuntimeError with its sentence, or the lender's, where there are none."""
        try:
            with closing(self._lent(*request)) as answers:
                for answer in answers:
                    if isinstance(answer, str):
                        raise RuntimeError(answer)
                    yield answer
        except Exception as error:
            said = getattr(error, "message", None)  # the lender's errors are Gradio's
            if said is None and isinstance(error, USER_ERRORS):
                raise
            raise RuntimeError(f"ZeroGPU: {said or error}") from error

    def _answers(self, method: str, prompt: str, settings: Any) -> Iterator[Any]:
        """In the fork: a run as plain data, or one string that says what was wrong (of an exception only the kind gets out)."""
        try:
            if self._engine is None:
                self._engine = self._parts.engine(self._device)
            sent = -math.inf
            with closing(getattr(self._engine, method)(prompt, settings)) as made:
                for item in made:
                    last = item is not None and (method == "follow" or item.trace is not None)
                    if not last and time.monotonic() - sent < SEND_SECONDS:
                        continue
                    yield item if method == "follow" else replace(item, snapshot=Kept(item.trace or item.snapshot()))
                    sent = time.monotonic()
        except USER_ERRORS as error:
            yield str(error) or type(error).__name__


__all__ = ["LentEngine", "on_zero_gpu"]
