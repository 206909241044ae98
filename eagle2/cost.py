"""What passes cost on this machine, and how large a draft tree they make worth verifying.  Standard library only.

The expected tokens of a step are 1 (the target's own) + the sum of the kept nodes' values, since a node's value is the
draft head's probability that the whole path to it is accepted (EAGLE-2 paper, arXiv 2406.16858, section 4.2).  So the best
number of nodes is the argmax of (1 + sum of values) / (draft seconds + verify seconds).  OPT-Tree (arXiv 2406.17276) grows
trees by expected acceptance and Sequoia (arXiv 2402.12374) sizes them for the hardware; here both are decided anew at
every step from values that are at hand anyway.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

FORMAT, VERSION = "eagle2-costs", 1
TABLE = 129  # row counts whose seconds are looked up instead of computed

Size = int | Literal["auto"]
"""A depth or a number of nodes: fixed, or chosen at every step by the cost model."""


class CostError(ValueError):
    """The data is no valid cost model; the message is one sentence for a person."""


@dataclass(frozen=True)
class CostModel:
    """Seconds of passes by their number of rows: straight lines between the measured points, and on beyond the last.

    ``verify_*``: one target pass with all that a step does around it.  ``draft_*``: one pass of the draft head with LM head,
    top-k and the growth of the tree.  ``overhead``: what a drafted step takes apart from its passes (building and ranking
    the tree).  A plain autoregressive step thus takes ``verify(1)``.
    """

    verify_rows: tuple[int, ...]
    verify_seconds: tuple[float, ...]
    draft_rows: tuple[int, ...]
    draft_seconds: tuple[float, ...]
    overhead: float = 0.0

    def __post_init__(self) -> None:
        for name, rows, seconds in (
            ("verify", self.verify_rows, self.verify_seconds),
            ("draft", self.draft_rows, self.draft_seconds),
        ):
            if not rows or len(rows) != len(seconds):
                raise CostError(f"the {name} curve needs as many seconds as rows, and at least one")
            if rows[0] != 1 or any(a >= b for a, b in itertools.pairwise(rows)):
                raise CostError(f"the rows of the {name} curve must begin with 1 and increase")
            if not all(math.isfinite(s) and s >= 0 for s in seconds):
                raise CostError(f"the seconds of the {name} curve must be finite and not negative")
            if any(a > b for a, b in itertools.pairwise(seconds)):
                raise CostError(f"the seconds of the {name} curve must not fall")
        if self.verify_seconds[0] <= 0:
            raise CostError("a target pass must take more than 0 seconds")
        if not (math.isfinite(self.overhead) and self.overhead >= 0):
            raise CostError("the overhead must be finite and not negative")

    @cached_property
    def _verify_table(self) -> tuple[float, ...]:
        return tuple(_on_curve(self.verify_rows, self.verify_seconds, n) for n in range(TABLE))

    def verify(self, rows: int) -> float:
        """Seconds of one target pass over ``rows`` rows, the root's included."""
        if rows < TABLE:
            return self._verify_table[rows]
        return _on_curve(self.verify_rows, self.verify_seconds, rows)

    def draft(self, rows: int) -> float:
        """Seconds of one pass of the draft head over ``rows`` rows."""
        return _on_curve(self.draft_rows, self.draft_seconds, rows)

    def step(self, draft_seconds: float, nodes: int) -> float:
        """Seconds of a step that drafted for ``draft_seconds`` and verifies ``nodes`` drafted nodes."""
        return draft_seconds + self.verify(1 + nodes) + self.overhead

    def rate(self, expected_tokens: float, draft_seconds: float, nodes: int) -> float:
        """Expected tokens per second of such a step."""
        return expected_tokens / self.step(draft_seconds, nodes)

    @property
    def plain_rate(self) -> float:
        """Tokens per second of autoregressive decoding."""
        return 1 / self.verify(1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: curves as lists of ``[rows, seconds]``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "verify": [list(point) for point in zip(self.verify_rows, self.verify_seconds)],
            "draft": [list(point) for point in zip(self.draft_rows, self.draft_seconds)],
            "overhead": self.overhead,
        }

    @classmethod
    def from_dict(cls, data: object) -> CostModel:
        """From parsed JSON; raises `CostError` with one sentence where it is damaged or of another version."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise CostError("this is not a cost model")
        if data.get("version") != VERSION:
            raise CostError(f"the cost model has version {data.get('version')!r}, this program reads {VERSION}")
        verify, draft = (_points(data.get(name), name) for name in ("verify", "draft"))
        overhead = data.get("overhead")
        if not _is_number(overhead):
            raise CostError("the overhead of the cost model is not a number")
        return cls(*verify, *draft, float(overhead))  # type: ignore[arg-type]


def _points(data: object, name: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if not isinstance(data, Sequence) or isinstance(data, str):
        raise CostError(f"the {name} curve of the cost model is not a list")
    for point in data:
        if not (isinstance(point, Sequence) and len(point) == 2 and type(point[0]) is int and _is_number(point[1])):
            raise CostError(f"the {name} curve of the cost model is not a list of rows and seconds")
    return tuple(point[0] for point in data), tuple(float(point[1]) for point in data)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _on_curve(rows: Sequence[int], seconds: Sequence[float], at: int) -> float:
    if at <= rows[0] or len(rows) == 1:
        return seconds[0]
    right = min(bisect_left(rows, at), len(rows) - 1)  # beyond the last point: the last segment's line
    left = right - 1
    slope = (seconds[right] - seconds[left]) / (rows[right] - rows[left])
    return seconds[left] + slope * (at - rows[left])


def best_cut(values: Sequence[float], draft_seconds: float, costs: CostModel, limit: int | None = None) -> int:
    """Number of nodes n that maximises (1 + sum of the n largest values) / seconds of the step; of equals the smallest.

    ``values``: those of all drafted nodes in descending order.  ``draft_seconds`` are spent whatever is kept.  The cost
    curve need not be convex, so every n up to ``limit`` is looked at.
    """
    count = len(values) if limit is None else min(len(values), limit)
    besides = draft_seconds + costs.overhead  # `rate`, with one call instead of three: this runs often
    best, best_rate, expected = 0, 1 / (besides + costs.verify(1)), 1.0
    for n in range(1, count + 1):
        expected += values[n - 1]
        rate = expected / (besides + costs.verify(1 + n))
        if rate > best_rate:
            best, best_rate = n, rate
    return best


def another_layer_pays(
    values: Sequence[float], fed: Sequence[float], child_confidences: Sequence[float], draft_seconds: float,
    costs: CostModel, *, limit: int | None = None, fixed: int | None = None,
) -> bool:  # fmt: skip
    """Whether one more pass over nodes of values ``fed`` raises the expected rate of the step.

    The children are not known yet; a fed node of value v is taken to get children of values v x ``child_confidences``.
    Both trees, with them and without, are then cut at their best (``fixed``: at this number of nodes).  ``values``: of
    the drafted nodes so far, in descending order.
    """

    def best_rate(ordered: Sequence[float], seconds: float) -> float:
        n = best_cut(ordered, seconds, costs, limit) if fixed is None else min(fixed, len(ordered))
        return costs.rate(1 + sum(ordered[:n]), seconds, n)

    grown = sorted([*values, *(value * share for value in fed for share in child_confidences)], reverse=True)
    return best_rate(grown, draft_seconds + costs.draft(len(fed))) > best_rate(values, draft_seconds)


class Pace:
    """When to draft at all: a running estimate of what a drafted step gives against the plain pass.

    After each drafted step, tokens and seconds enter two averages (the newest counts ``NEWEST``, while there are few all
    count alike).  From ``WARM_UP`` drafted steps on, wherever their ratio falls below ``LOSS`` of the plain rate, 4 steps
    are skipped; then one step is drafted as a probe, and while drafting still loses, the pause doubles to 8, 16 and at
    most 32 steps.  Where it no longer loses, all steps are drafted and the next pause is of 4 steps.  What was seen before
    a pause counts as ``KEPT`` steps after it, since the text may have changed.

    The averages are slow and the bar is low since a pause can save little, the draft passes of its steps (an unsure
    draft is cut to nothing anyway), and can cost a lot, the tokens of those in which drafting would have paid.
    """

    WARM_UP, NEWEST, LOSS, SHORTEST, LONGEST, KEPT = 16, 0.03, 0.95, 4, 32, 8

    def __init__(self, plain_rate: float) -> None:
        self.plain_rate = plain_rate
        self.tokens = self.seconds = 0.0  # averages over the drafted steps
        self._count = self._left = 0  # steps that the averages stand for; steps still to skip
        self._warm = False
        self._pause = self.SHORTEST

    def drafts(self) -> bool:
        """Whether the step that now begins is drafted."""
        if self._left:
            self._left -= 1
            return False
        return True

    def drafted(self, tokens: int, seconds: float) -> None:
        """A drafted step gave ``tokens``, the target's own included, in ``seconds``."""
        self._count += 1
        weight = max(1 / self._count, self.NEWEST)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)
        self._warm = self._warm or self._count >= self.WARM_UP
        if not self._warm:
            return
        if self.tokens < self.LOSS * self.seconds * self.plain_rate:
            self._left = self._pause
            self._count = self.KEPT
            self._pause = min(2 * self._pause, self.LONGEST)
        else:
            self._pause = self.SHORTEST


class TreePlanner:
    """Sizes the trees of one run by the cost model: whether to draft, how deep, and how many nodes to keep.

    With ``depth`` "auto" a step is drafted where that pays (see `Pace`; never where even accepting everything would lose
    against the plain pass), and expansion stops where another layer cannot pay.  With ``nodes`` "auto" the best cut is
    kept.  Seconds are the model's, not the clock's, so the same costs and the same prompt give the same trees.

    ``width``: nodes fed per layer and children of each.
    """

    FADE = 0.95  # per pass, of what was seen of confidences
    PRIOR, PRIOR_DECAY = 0.5, 0.35  # before anything was seen: the best child's confidence, and that of each next one

    def __init__(
        self, costs: CostModel, *, width: int, depth: Size, nodes: Size, depth_limit: int, node_limit: int
    ) -> None:
        self.costs, self.width = costs, width
        self.choose_depth, self.choose_nodes = depth == "auto", nodes == "auto"
        self.depth_limit, self.node_limit = depth_limit, node_limit
        self.pace = Pace(costs.plain_rate)
        self._seen = [self.PRIOR * self.PRIOR_DECAY**rank for rank in range(width)]  # sums of value x confidence
        self._weight = 1.0  # sum of values
        self._can_win = self._can_pay()
        self._spent = 0.0  # draft seconds of the step under way
        self._budget = node_limit
        self._awaited: float | None = None  # seconds of a drafted step whose tokens are still to come

    @property
    def child_confidences(self) -> tuple[float, ...]:
        """Running mean confidence of a node's children, best first, each node weighted by its value."""
        return tuple(seen / self._weight for seen in self._seen)

    @property
    def may_draft(self) -> bool:
        """Whether any step of this run can be drafted."""
        return self._can_win or not self.choose_depth

    def _can_pay(self) -> bool:
        """Whether any depth would win if every layer had a token accepted."""
        layers = [self.costs.draft(1)] + [self.costs.draft(self.width)] * (self.depth_limit - 1)
        for depth in range(1, self.depth_limit + 1):
            pool = self.width + (depth - 1) * self.width**2
            nodes = depth if self.choose_nodes else min(self.node_limit, pool)
            if self.costs.rate(1 + min(depth, nodes), sum(layers[:depth]), nodes) > self.costs.plain_rate:
                return True
        return False

    def begin(self, pending_rows: int, max_nodes: int) -> bool:
        """A step begins with ``pending_rows`` committed tokens that the head has not seen; False: do not draft."""
        self._awaited = None
        self._budget = min(self.node_limit, max_nodes)
        if self.choose_depth and not (self._can_win and self.pace.drafts()):
            return False
        # More rows than one step commits are left from the prompt or from skipped steps: they are owed once, whatever
        # this step's tree, and would only make drafting look dear.
        self._spent = self.costs.draft(min(pending_rows, self.depth_limit + 1))
        return True

    def saw(self, parent_values: Sequence[float], confidences: Sequence[Sequence[float]]) -> None:
        """A pass gave each fed node, of value ``parent_values[i]``, children of ``confidences[i]``, best first."""
        self._weight = self.FADE * self._weight + sum(parent_values)
        for rank in range(self.width):
            new = sum(value * row[rank] for value, row in zip(parent_values, confidences))
            self._seen[rank] = self.FADE * self._seen[rank] + new

    def goes_on(self, values: Sequence[float], fed: Sequence[float]) -> bool:
        """Whether the nodes of values ``fed`` are worth a pass; ``values``: of all drafted nodes so far, in any order."""
        if self.choose_depth and not another_layer_pays(
            sorted(values, reverse=True), fed, self.child_confidences, self._spent, self.costs, limit=self._budget,
            fixed=None if self.choose_nodes else self._budget,
        ):  # fmt: skip
            return False
        self._spent += self.costs.draft(len(fed))
        return True

    def cut_undrafted(self, values: Sequence[float]) -> int:
        """How many nodes of ``values`` are kept in a step that `begin` does not draft, where they came at no cost."""
        return best_cut(sorted(values, reverse=True), 0.0, self.costs, self._budget)

    def cut(self, values: Sequence[float]) -> int:
        """How many of the drafted nodes of ``values`` (in any order) are kept; the step's drafting ends with it."""
        nodes = min(len(values), self._budget)
        if self.choose_nodes:
            nodes = best_cut(sorted(values, reverse=True), self._spent, self.costs, self._budget)
        self._awaited = self.costs.step(self._spent, nodes)
        return nodes

    def observe(self, tokens: int) -> None:
        """``tokens`` were committed: after a drafted step, what it gave."""
        if self._awaited is not None:
            self.pace.drafted(tokens, self._awaited)
            self._awaited = None


__all__ = ["CostError", "CostModel", "Pace", "Size", "TreePlanner", "another_layer_pays", "best_cut"]
