"""The drafter's side of a step: the protocol, and the drafter that drafts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .tree import DraftTree


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """The expanded tree, its nodes that the target is to verify, and how it was grown.

    ``kept`` are indices into ``expanded`` (root not counted), parents first; ``selected`` are, pass by pass of the
    expansion phase, the nodes that were fed to the draft head.  ``copied`` are the nodes whose confidence is prompt
    lookup's, since it proposed their token too or alone.  ``laid_out`` is `verified` where the drafter has it at hand, made
    on its device.
    """

    expanded: DraftTree
    kept: tuple[int, ...]
    selected: tuple[tuple[int, ...], ...] = ()
    copied: tuple[int, ...] = ()
    laid_out: DraftTree | None = None

    @property
    def verified(self) -> DraftTree:
        """What the target sees: the root and the kept nodes."""
        return self.expanded.select(self.kept) if self.laid_out is None else self.laid_out


class Drafter(Protocol):
    """Proposes draft trees for one sequence at a time."""

    needs_hidden: bool  # whether `observe` wants the target's features

    def reset(self, capacity: int) -> None:
        """Forget the sequence; at most ``capacity`` tokens will be committed in the next one."""

    def resume(self, length: int, capacity: int) -> None:
        """Go on with the sequence as it was after its first ``length`` tokens; in all ``capacity`` will be committed.

        The token that comes next must be the one that came next before: a head's rows were computed with it.
        """

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Newly committed tokens and the target's features of them ``[n, H]`` (None unless ``needs_hidden``)."""

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        """A tree under ``root`` with at most ``max_nodes`` kept nodes, none deeper than ``max_depth`` (0: no drafting)."""


class RootOnly:
    """Drafts nothing: through the same loop this is plain autoregressive decoding."""

    needs_hidden = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = device

    def reset(self, capacity: int) -> None:
        pass

    def resume(self, length: int, capacity: int) -> None:
        pass

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        pass

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        return Proposal(DraftTree.root_only(root, self.device), ())
