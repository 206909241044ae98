"""What a corpus consists of, for a head's card: counts, kinds of text, repetition."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .train import CorpusData

# Each rule looks at a decoded answer alone. They are rough on purpose: anyone can check them by eye.
_CODE_LINE = re.compile(
    r"^\s*(def |class |import |from \w[\w.]* import |return\b|for .*:$|if .*:$|while .*:$|#include|public |function |"
    r"const |let |var |SELECT |</?\w+[^>]*>$|.*[;{}]$)"
)
_LIST_LINE = re.compile(r"^\s*([-*•]|\d+[.)])\s+\S")
_ARITHMETIC = re.compile(r"\d[)%]?\s*(?:=|×|÷|\s[-+*/x]\s)\s*[($]*\d")


def kinds_of_text(answer: str) -> set[str]:
    """What an answer looks like; prose is what is none of the others.

    code: a fence, or two lines that look like code; arithmetic: two numbers with an operator (blanks around it) or an
    equals sign between them; list: three lines with a bullet or a number.
    """
    lines = answer.splitlines()
    found = set()
    if "```" in answer or sum(bool(_CODE_LINE.match(line.rstrip())) for line in lines) >= 2:
        found.add("code")
    if _ARITHMETIC.search(answer):
        found.add("arithmetic")
    if sum(bool(_LIST_LINE.match(line)) for line in lines) >= 3:
        found.add("list")
    return found or {"prose"}


def distinct_ngrams(tokens: NDArray[np.int64], owner: NDArray[np.int64], n: int) -> tuple[float, float]:
    """``(distinct, repeated)`` of the n-grams of ``tokens [T]``; none crosses from one ``owner [T]`` to the next.

    distinct: different n-grams by all, over the corpus (distinct-n, arXiv 1510.03055); repeated: share of n-grams that
    occurred before in the same answer.  Compared by a 64-bit hash.
    """
    count = len(tokens) - n + 1
    if count < 1:
        return 0.0, 0.0
    mixed = np.zeros(count, dtype=np.uint64)
    for at in range(n):
        mixed = (mixed + tokens[at : at + count].astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    inside = owner[:count] == owner[n - 1 :]
    mixed, own = mixed[inside], owner[:count][inside].astype(np.uint64)
    if not len(mixed):
        return 0.0, 0.0
    within = mixed ^ ((own + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F))
    return len(np.unique(mixed)) / len(mixed), 1 - len(np.unique(within)) / len(within)


def corpus_stats(data: CorpusData, tokenizer: Any, heldout: float) -> dict[str, Any]:
    """Plain values for JSON: counts in conversations and tokens, shares in 0..1 of the distinct conversations."""
    train, held = data.split(heldout)
    rows = sorted(train + held)
    answers = []
    looks: Counter[str] = Counter()
    for row in rows:
        start = int(data.offsets[row])
        ids = data.token_ids[start + int(data.answer_starts[row]) : start + int(data.lengths[row])]
        answers.append(ids.numpy())
        looks.update(kinds_of_text(tokenizer.decode(ids, skip_special_tokens=True)))
    tokens = np.concatenate(answers)
    owner = np.repeat(np.arange(len(answers)), [len(a) for a in answers])
    ngrams = {n: distinct_ngrams(tokens, owner, n) for n in range(1, 5)}

    def shares(counts: Counter[str]) -> dict[str, float]:
        return {key: round(number / len(rows), 4) for key, number in counts.most_common()}

    lengths = data.lengths - data.answer_starts
    return {
        "shards": len(data.shards),
        "conversations": len(data.lengths),
        "distinct_conversations": len(rows),
        "tokens": int(data.lengths.sum()),
        "answer_tokens": data.answer_tokens,
        "distinct_answer_tokens": len(tokens),
        "mean_answer": round(len(tokens) / len(rows), 2),
        "greedy_share": round(float(data.greedy[rows].float().mean()), 4),
        "prompt_kinds": shares(Counter(data.kinds[row] for row in rows)),
        "answers_look_like": shares(looks),
        "distinct_ngrams": {str(n): round(both[0], 4) for n, both in ngrams.items()},
        "repeated_ngrams_within_answers": {str(n): round(both[1], 4) for n, both in ngrams.items()},
        "heldout_conversations": len(held),
        "heldout_answer_tokens": int(lengths[held].sum()),
    }
