"""Verification: which draft tokens the target accepts, and its own next token.

Words, as in the literature (Leviathan et al. 2023; SpecInfer, Miao et al. 2024; EAGLE-2 paper, section 3.1):

- accepted tokens: draft tokens that the target lets stand;
- correction token (elsewhere: recovered token): the target's token in place of a rejected draft token;
- bonus token: the target's token after a path that was accepted down to a leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .native import top
from .trace import Decision, NextKind
from .tree import DraftTree


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's tokens are chosen: temperature, then top-k, then top-p, the order that Hugging Face uses.

    ``temperature=0`` is greedy decoding, ``top_k=0`` and ``top_p=1`` switch those filters off.  These alone decide: what
    the model's ``generation_config`` says of sampling (``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``,
    ``typical_p``, ``epsilon_cutoff``, ...) is not read.  Its penalties and bans are, in both modes: they are in the logits
    already (`eagle2.processors`).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 10):
            raise ValueError(f"temperature must lie between 0 (greedy) and 10, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"sampling top-k must be 0 (off) or more, not {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must lie above 0 and at most at 1, not {self.top_p}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def warpers(self) -> LogitsProcessorList:
        """transformers' own processors, so that both lanes and ``generate`` mean the same by each setting."""
        warpers = LogitsProcessorList()
        if not self.greedy and self.temperature != 1:
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            warpers.append(TopPLogitsWarper(float(self.top_p)))
        return warpers


def target_probs(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The distribution ``[..., V]`` in float32 that the target's token is drawn from; greedy: plain softmax."""
    rows = logits.float().reshape(-1, logits.shape[-1])
    if not sampling.greedy:
        rows = sampling.warpers()(None, rows)  # the warpers do not look at input ids
    return rows.softmax(-1).reshape(logits.shape)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target makes of a tree. Nodes are rows of the verified tree; the root (row 0) is not in ``accepted``."""

    accepted: tuple[int, ...]
    next_token: int
    kind: NextKind
    decisions: tuple[Decision, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows whose KV stay: the root and the accepted path."""
        return (0, *self.accepted)


def verify(
    tree: DraftTree, logits: Tensor, sampling: SamplingParams, generator: torch.Generator | None = None,
    choices: Sequence[int] | None = None,
) -> Verdict:  # fmt: skip
    """Walk down the tree as far as the target agrees.

    ``logits [N, V]`` are the target's, row i after node i.  Greedy: follow the child that equals the argmax.  Sampling:
    at each node try the children in order of value; accept x with the target's probability of x, else remove x,
    renormalise and go on; if none is accepted, draw from what is left.  For a deterministic tree this leaves the
    target's distribution as it is.  Children that were *drawn* (``tree.draft_probs``) are tried in the order of the
    draws and accepted with min(1, target / draft), the residual being the positive part of the difference.

    ``choices``: the rows' argmax, where it is known.
    """
    children = tree.children()
    tokens = tree.token_ids.tolist()
    if sampling.greedy:
        return _verify_greedy(children, tokens, logits.argmax(-1).tolist() if choices is None else choices)
    log_value = tree.log_value.tolist()
    accepted: list[int] = []
    decisions: list[Decision] = []
    at = 0
    while True:
        probs = target_probs(logits[at], sampling)  # [V]
        order = children[at]
        if tree.draft_probs is None:
            order = sorted(order, key=lambda node: (-log_value[node], node))
        taken = None
        for node in order:
            token = tokens[node]
            target_prob = float(probs[token])
            draw = float(torch.rand((), generator=generator, device=_device(generator)))
            if tree.draft_probs is None:
                residual = probs.clone()
                residual[token] = 0
                chance = target_prob
            else:
                drawn_from = tree.draft_probs[at]
                residual = (probs - drawn_from.to(probs.device)).clamp_min(0)
                draft_prob = float(drawn_from[token])
                chance = min(1.0, target_prob / draft_prob) if draft_prob > 0 else 1.0
            left = float(residual.sum())
            # Nothing left to draw from means that the token's probability is 1 up to rounding.
            ok = draw < chance or left <= 0
            decisions.append(Decision(node, min(target_prob, 1.0), draw, ok))
            if ok:
                taken = node
                break
            probs = residual / left
        if taken is None:
            token = int(torch.multinomial(probs.to(_device(generator)), 1, generator=generator))
            return Verdict(tuple(accepted), token, "correction" if order else "bonus", tuple(decisions))
        accepted.append(taken)
        at = taken


def _verify_greedy(children: Sequence[Sequence[int]], tokens: Sequence[int], choices: Sequence[int]) -> Verdict:
    # Probabilities are for looking at; only rows on the path are needed, and only where something was decided.
    accepted: list[int] = []
    decisions: list[Decision] = []
    at = 0
    while True:
        best = choices[at]
        taken = next((node for node in children[at] if tokens[node] == best), None)
        for node in children[at]:
            decisions.append(Decision(node, 1.0 if node == taken else 0.0, None, node == taken))
        if taken is None:
            return Verdict(tuple(accepted), best, "correction" if children[at] else "bonus", tuple(decisions))
        accepted.append(taken)
        at = taken


def _device(generator: torch.Generator | None) -> torch.device:
    return torch.device("cpu") if generator is None else generator.device


class NonFiniteLogitsError(ArithmeticError):
    """A model gave NaN or infinite logits."""


def check_finite(logits: Tensor, who: str, step: int) -> list[int]:
    """The token of the highest logit of each row of ``logits [N, V]``; `NonFiniteLogitsError`, which names the step, where
    that is no number.  ``-inf`` for single tokens is allowed (a masked vocabulary).
    """
    values, ids = top(logits, 1)
    check_numbers(values, who, step)
    return [row[0] for row in ids]


def check_numbers(logits: Sequence[Sequence[float]], who: str, step: int) -> None:
    """As `check_finite` for each row's highest logits, or their logarithms of probabilities."""
    if not all(math.isfinite(row[0]) for row in logits):
        raise NonFiniteLogitsError(
            f"the {who} gave logits that are not numbers at step {step}; try another dtype (float32), or check the weights"
        )
