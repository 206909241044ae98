"""Prompt lookup: the draft is copied from what was read or written before; there is no draft head.

After Saxena, "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding), which Hugging Face
``generate`` offers as ``prompt_lookup_num_tokens``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .draft import Proposal
from .tree import DraftTree

MAX_DRAFT = 10  # tokens copied at most, as Hugging Face's examples set it

# How often the token after the latest earlier occurrence of the last 1, 2, 3, 4 or more tokens is right: shares of 7,688
# greedy steps of SmolLM2-135M-Instruct (bfloat16, 12 prompts of each of six question sets, 128 new tokens).  A draft token
# that is right makes the match longer by one, so token k of a copy has the confidence of a match of k - 1 tokens more:
# that gives .21, .11, .07 for a match of one, where .21, .11, .07 were counted, and .51, .33, .28 for .51, .34, .26.
CONFIDENCE = (0.21, 0.51, 0.64, 0.85)
# A copy ends where its value falls below this: a verified row costs about 5.5 % of an autoregressive step on a CPU, times
# the speed-up that it competes with.  A match of one token so gives two draft tokens.
MIN_VALUE = 0.1


class PromptLookup:
    """Drafts a chain: what followed the latest earlier occurrence of the last few tokens, in the prompt or the output.

    The longest match counts, of ``len(CONFIDENCE)`` tokens down to one.  A copy that reaches the end of the text goes on
    in itself, so a line that repeats is drafted as repeating.
    """

    needs_hidden = False

    def __init__(self, device: torch.device | str = "cpu", draft_tokens: int = MAX_DRAFT) -> None:
        if draft_tokens < 1:
            raise ValueError(f"draft_tokens must be at least 1, not {draft_tokens}")
        self.device, self.draft_tokens = device, draft_tokens
        self.reset(0)

    def reset(self, capacity: int) -> None:
        self._ids: list[int] = []  # committed tokens; the root is not among them
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence

    def resume(self, length: int, capacity: int) -> None:
        """As after the first ``length`` tokens; the n-grams that ended later are forgotten."""
        if length < len(self._ids):
            kept = self._ids[:length]
            self.reset(capacity)
            self.observe(kept, None)

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        """Index the n-grams that end at the newly committed tokens; ``hidden`` is not used."""
        for token in token_ids:
            self._ids.append(token)
            end = len(self._ids)
            for size in range(1, min(len(CONFIDENCE), end) + 1):
                self._after[tuple(self._ids[end - size :])] = end

    def copy(self, root: int, limit: int) -> list[tuple[int, float]]:
        """Tokens to draft after ``root``, at most ``limit``, each with its confidence; empty where nothing matches."""
        copied: list[tuple[int, float]] = []
        text = [*self._ids[-len(CONFIDENCE) :], root]
        at, matched = self._match(text)
        value = 1.0
        while matched and len(copied) < min(self.draft_tokens, limit):
            sure = CONFIDENCE[min(matched, len(CONFIDENCE)) - 1]
            value *= sure
            if value < MIN_VALUE:
                break
            beyond = at - len(self._ids)  # the root, then what has just been copied
            token = self._ids[at] if beyond < 0 else root if beyond == 0 else copied[beyond - 1][0]
            copied.append((token, sure))
            at, matched = at + 1, matched + 1
        return copied

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        tokens, confidence, log_value = [root], [1.0], [0.0]
        for token, sure in self.copy(root, min(max_depth, max_nodes)):
            tokens.append(token)
            confidence.append(sure)
            log_value.append(log_value[-1] + math.log(sure))
        n = len(tokens)
        tree = DraftTree(
            torch.tensor(tokens, device=self.device),
            (-1, *range(n - 1)),
            torch.tensor(confidence, device=self.device),
            torch.tensor(log_value, device=self.device),
        )
        return Proposal(tree, tuple(range(1, n)))

    def _match(self, text: list[int]) -> tuple[int, int]:
        """Where to copy from, and how many tokens before it match the end of ``text``; 0: none."""
        for size in range(min(len(CONFIDENCE), len(text)), 0, -1):
            start = self._after.get(tuple(text[-size:]))
            if start is not None:
                return start, size
        return 0, 0
