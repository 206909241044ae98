"""Acceptance figures over question files: tau and acceptance by depth."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .corpus import loop_start
from .engine import Engine, Settings
from .generate import Prefill, Step


class QuestionError(ValueError):
    """The question file cannot be used; the message names the line."""


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
                prompts.append(turn)
    except (OSError, UnicodeDecodeError) as error:
        raise QuestionError(f"{path} cannot be read: {error}") from error
    if not prompts:
        raise QuestionError(f"{path} holds no questions")
    return prompts


@dataclass(slots=True)
class Acceptance:
    """Counts over the steps of many runs. tau leaves out the prefill and the token that it gives."""

    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    at_least: list[int] = field(default_factory=list)  # [d]: steps that accepted more than d draft tokens

    def add(self, step: Step) -> None:
        self.tokens += len(step.emitted)
        self.passes += 1
        self.drafted += len(step.proposal.kept)
        accepted = len(step.verdict.accepted)
        self.accepted += accepted
        self.at_least += [0] * (accepted - len(self.at_least))
        for depth in range(accepted):
            self.at_least[depth] += 1

    @property
    def tau(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def by_depth(self) -> list[float]:
        """Share of the steps that accepted at least 1, 2, ... draft tokens."""
        return [count / self.passes for count in self.at_least]


def evaluate(engine: Engine, prompts: Iterable[str], settings: Settings, *, progress: bool = True) -> dict[str, Any]:
    """Run EAGLE-2 on each prompt; plain values for a table or JSON.

    ``tau`` is over all steps together; ``tau_by_prompt`` lists each prompt's, and ``looping`` is the share of outputs
    that end in a loop: small models repeat themselves, and repetition is easy to draft.
    """
    total = Acceptance()
    by_prompt: list[float] = []
    loops = 0
    prompts = list(prompts)
    with tqdm(prompts, unit="prompt", disable=not progress) as bar:
        for prompt in bar:
            one = Acceptance()
            ids: list[int] = []
            for item in engine.run(engine.encode(prompt), settings):
                if isinstance(item, Prefill):
                    ids.append(item.token)
                else:
                    one.add(item)
                    total.add(item)
                    ids += item.emitted
            by_prompt.append(round(one.tau, 4))
            loops += loop_start(ids) is not None
            bar.set_postfix(tau=f"{total.tau:.3f}")
    return {
        "tau": total.tau,
        "prompts": len(prompts),
        "acceptance_by_depth": total.by_depth,
        "acceptance_rate": total.accepted / total.drafted if total.drafted else 0.0,
        "tokens": total.tokens,
        "target_passes": total.passes,
        "looping": loops / len(prompts),
        "tau_by_prompt": by_prompt,
        "settings": engine.metadata(settings),
    }
