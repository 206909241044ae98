"""Words for learners: the glossary, the stops of the guided tour, the prediction game.

The browser's half is lessons.js, which fills in the numbers of the step on screen: none stands in these texts.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from visual.tree import Phase

PAPERS = {
    "EAGLE-2": ("EAGLE-2 paper, arXiv 2406.16858", "https://arxiv.org/abs/2406.16858"),
    "EAGLE": ("EAGLE paper, arXiv 2401.15077", "https://arxiv.org/abs/2401.15077"),
    "Leviathan": ("Leviathan et al., arXiv 2211.17192", "https://arxiv.org/abs/2211.17192"),
}


class Entry(NamedTuple):
    """One term, explained in one or two plain sentences."""

    text: str
    paper: str = ""  # a key of `PAPERS`
    section: str = ""
    forms: tuple[str, ...] = ()  # other spellings of it in the page's own texts


class Stop(NamedTuple):
    """One stop of the tour.

    ``lines`` hold placeholders of `FIELDS`, as ``{kept}`` or with a noun to be counted as ``{kept|node}``.  A line is left
    out where one of its placeholders has no value in the step shown; ``{greedy?}`` and the like are empty or no value.
    """

    title: str
    lines: tuple[str, ...]
    phase: Phase
    step: Literal["end", "richest", "loss"]
    target: str  # data-testid of what it points at


GLOSSARY: dict[str, Entry] = {
    "acceptance rate": Entry(
        "The share of the draft tokens checked by the target that were accepted.", "Leviathan", "section 3.1",
    ),
    "accepted": Entry(
        "A draft token that the target agrees with, and all before it on its path too. It becomes part of the text.",
        "Leviathan", "section 2.3",
    ),
    "autoregressive": Entry(
        "Writing one token after the other, each with a pass of its own through the model. The plain lane does this.",
        "Leviathan", "section 1",
    ),
    "bonus token": Entry(
        "The target's own token after a path that was accepted to its end. It comes on top, in the same pass.",
        "Leviathan", "section 2.3", ("bonus",),
    ),
    "confidence": Entry(
        "The probability that the draft head gives a token after its path. It stands on the edge that leads to the token.",
        "EAGLE-2", "section 3.2", ("confidences",),
    ),
    "correction token": Entry(
        "The target's own token where none of the guesses was right. It takes their place, so no pass is without a token.",
        "Leviathan", "section 2.3", ("correction",),
    ),
    "depth": Entry(
        "How many tokens a node is away from the root. As a setting: the number of layers that are drafted.",
        "EAGLE-2", "section 4.1", ("layer", "layers"),
    ),
    "draft head": Entry(
        "A small network that guesses the target's next tokens from what the target computed last. Here it is the drafter.",
        "EAGLE", "section 3.1", ("drafter", "head"),
    ),
    "draft token": Entry(
        "A token that the draft head proposes. It counts only once the target has agreed.",
        "Leviathan", "section 2.1", ("draft tokens", "drafted", "drafted tokens", "drafted token", "drafted nodes"),
    ),
    "dynamic tree": Entry(
        "A draft tree that grows anew at each step where the draft head is confident. This is what EAGLE-2 adds to EAGLE.",
        "EAGLE-2", "section 4", ("draft tree",),
    ),
    "expansion phase": Entry(
        "The draft head grows the tree layer by layer: the top_k nodes of highest value in a layer get top_k children each.",
        "EAGLE-2", "section 4.1",
    ),
    "greedy": Entry("Always taking the most probable token. The same prompt then gives the same text."),
    "lossless": Entry(
        "Drafting changes only the speed: with greedy decoding the text is the target's own, with sampling its odds are.",
        "Leviathan", "appendix A.1",
    ),
    "own clock": Entry(
        "The time that a lane spent computing for itself. Waiting, the other lane and drawing are not in it.",
        forms=("own time", "own clocks"),
    ),
    "position id": Entry(
        "The number of a token's place in the text, as the target is told it. Guesses of one depth share theirs.",
        forms=("position ids",),
    ),
    "prefill": Entry("The first pass of a run, in which the target reads the whole prompt and gives the first token."),
    "rejected": Entry("A draft token that the target does not agree with. All that hangs below it is lost too.",
        "Leviathan", "section 2.3",
    ),
    "reranking phase": Entry(
        "Of all drafted nodes, whatever their layer, the total_tokens of highest value are kept. The others are cut.",
        "EAGLE-2", "section 4.2", ("rerank", "cut"),
    ),
    "root token": Entry(
        "The last token already decided, from which the draft tree grows. It is no guess.", "EAGLE-2", "section 4.1",
        ("root",),
    ),
    "row": Entry(
        "One line of the target's input. Root and kept nodes become one row each, and one pass reads all of them.",
        "EAGLE-2", "section 4.2", ("rows",),
    ),
    "speed-up": Entry(
        "Tokens per second of the EAGLE-2 lane divided by those of the plain lane. Below 1 drafting cost more than it saved.",
        "EAGLE-2", "section 5",
    ),
    "static tree": Entry(
        "A draft tree of one fixed shape, whatever the text: EAGLE's first version drafts so.", "EAGLE-2", "section 3.1",
    ),
    "target": Entry(
        "The language model itself, whose text is wanted. Drafting only makes it faster.", "Leviathan", "section 2.1",
    ),
    "tau": Entry(
        "The mean number of tokens that one pass of the target gives, its own token included. Plain decoding has 1.",
        "EAGLE-2", "section 5", ("τ",),
    ),
    "temperature": Entry(
        "How freely the next token is drawn. 0 is greedy; at 1 the odds are the model's own, above that they even out."
    ),
    "top_k": Entry(
        "How many nodes of a layer get children, and how many children each of them gets.", "EAGLE-2", "section 4.1",
    ),
    "total_tokens": Entry(
        "How many drafted nodes are kept for the target, the root not counted. EAGLE's code counts the root too.",
        "EAGLE-2", "section 4.2",
    ),
    "tree mask": Entry(
        "Says which rows a row may look at: the text so far, its own ancestors and itself, never another branch.",
        "EAGLE-2", "section 4.2",
    ),
    "value": Entry(
        "The product of all confidences from the root to a node: an estimate of how likely the whole path is to be accepted.",
        "EAGLE-2", "section 4.1", ("values",),
    ),
    "verification": Entry(
        "One pass of the target over the root and all kept nodes: at each of them it says which token it would write next.",
        "Leviathan", "section 2.1", ("verify",),
    ),
}  # fmt: skip

# What a phase's sentence speaks of.
PHASE_TERMS: dict[Phase, tuple[str, ...]] = {
    "draft": ("expansion phase", "draft head", "confidence", "value", "top_k"),
    "rerank": ("reranking phase", "value", "total_tokens"),
    "flatten": ("row", "tree mask", "position id", "root token"),
    "verify": ("verification", "target", "draft token"),
    "accept": ("accepted", "rejected", "bonus token", "correction token", "lossless"),
}

# Placeholders of the stops, all computed in the browser from the run and the step on screen.
FIELDS = (
    "accepted", "clock", "cut", "drafted", "fed", "first", "first_position", "firsts", "gained", "highest", "kept",
    "last_position", "lowest", "made", "path", "plain", "plain_ms", "product", "rows", "speedup", "step_ms", "steps", "tau",
)  # fmt: skip
FLAGS = (
    "app", "bonus", "chosen", "correction", "dynamic", "greedy", "guessed", "none", "page", "rounded", "sampled", "slower",
    "some", "static", "uncut",
)  # fmt: skip

TOUR: tuple[Stop, ...] = (
    Stop(
        "One token at a time, or several",
        (
            "A language model writes token by token, and each token (a word or a piece of one) costs one pass through the"
            " whole model.",
            "The plain lane does just that: {plain|token} after the first, {plain|pass}.",
            "In the EAGLE-2 lane a small helper, the draft head, guesses ahead. The model, called the target, then checks"
            " many guesses in one pass: {made|token} after the first took {steps|pass} of it.",
        ),
        "accept", "end", "lane-eagle2",
    ),
    Stop(
        "Guess: the expansion phase",
        (
            "The draft head proposes {first|token} that could come next, then guesses on from there, layer by layer. This is"
            " the expansion phase.",
            "{dynamic?}In a layer only the most promising nodes go on, {fed} of them in the last one.",
            "{static?}In this run the tree has a fixed shape (a static tree), as in the first EAGLE.",
            "An edge shows how sure the head is (confidence). All confidences along a path multiplied give its value.",
            "{path}: {product}.",
        ),
        "draft", "richest", "tree",
    ),
    Stop(
        "Choose: the reranking phase",
        (
            "The head drafted {drafted|token}. The {kept|node} of highest value in the whole tree stay, {cut} are cut.",
            "{uncut?}The head drafted {drafted|token}, and all of them stay. Where more are drafted than may be kept, the"
            " reranking phase keeps those of highest value.",
            "This choice is the reranking phase. The lowest kept value is {lowest}, the highest cut value {highest}.",
            "{chosen?}A node is never worth more than its parent, so what is kept still hangs together.",
        ),
        "rerank", "richest", "values",
    ),
    Stop(
        "Line up: rows and the tree mask",
        (
            "The root (the last token already decided) and the kept nodes become {rows|row} of one input for the target.",
            "Which rows a row may look at is set by the tree mask: the text so far, its own ancestors and itself, never a"
            " rival branch.",
            "Rivals for one place in the text share a position id. Here the ids run from {first_position} to"
            " {last_position}.",
        ),
        "flatten", "richest", "mask",
    ),
    Stop(
        "Check: one pass for all guesses",
        (
            "Verification: in a single pass the target says at each row which token it would write next.",
            "{guessed?}A ring marks a guess that is the target's first choice after its parent: {firsts} of {kept} here."
            " Other branches may have rings too, but only a path from the root counts.",
            "{sampled?}With a temperature the target draws its tokens: it accepts a guess with the probability that it gives"
            " to it.",
        ),
        "verify", "richest", "tree",
    ),
    Stop(
        "Accept: the longest path that agrees",
        (
            "From the root the path goes on as long as the target agrees with a guess: {accepted|token} accepted here.",
            "{bonus?}Nothing is left to check after it, so the target's own token comes on top: the bonus token.",
            "{correction?}Where no guess is right the target's own token takes its place: the correction token.",
            "This step gives {gained|token} for one pass.",
            "{greedy?}The text is what the target alone would write: drafting is lossless.",
            "{rounded?}Drafting is lossless: in exact arithmetic the target alone would write this text. Here rounding made a"
            " difference.",
            "{sampled?}The odds of each text are the target's own: drafting is lossless.",
        ),
        "accept", "richest", "tree",
    ),
    Stop(
        "A step that did not pay",
        (
            "{none?}Here no guess was right: the step gives {gained|token}, the target's own, and drafting was for nothing.",
            "{some?}In this run every step had a right guess. This one had the fewest: {accepted|token} accepted.",
            "The step took {step_ms} ms in all; the plain lane takes {plain_ms} ms for a token (own clocks, {clock}).",
        ),
        "accept", "loss", "clock",
    ),
    Stop(
        "The race, and your turn",
        (
            "Each lane runs on its own clock, which counts its own computing and nothing else.",
            "From these clocks ({clock}) comes the speed-up: {speedup}× in this run, with {tau} tokens per checking pass"
            " (tau).",
            "{slower?}Below 1× the drafting cost more than it saved.",
            "{app?}Now write a prompt of your own above and press Run. Text that is easy to guess gains most.",
            "{page?}Now try Predict beside the phases: guess the path before the target does.",
        ),
        "accept", "end", "race-chart",
    ),
)  # fmt: skip


def placeholders(line: str) -> list[tuple[str, str]]:
    """Of one line of a stop: ``(name, noun)``, or ``(name, "?")`` for a flag."""
    return [(name, "?" if flag else noun) for name, flag, noun in re.findall(r"\{(\w+)(\?)?(?:\|(\w+))?\}", line)]


def source(entry: Entry) -> str:
    """Where a term comes from, in words; empty for everyday words of the trade."""
    return ", ".join(part for part in (PAPERS[entry.paper][0], entry.section) if part) if entry.paper else ""


def setup() -> dict[str, Any]:
    """What the browser needs once."""
    return {
        "glossary": [
            {
                "term": term,
                "text": entry.text,
                "source": source(entry),
                "url": PAPERS[entry.paper][1] if entry.paper else "",
                "forms": [term, *entry.forms],
            }
            for term, entry in GLOSSARY.items()
        ],
        "phases": {phase: list(terms) for phase, terms in PHASE_TERMS.items()},
        "tour": [{**stop._asdict(), "lines": list(stop.lines)} for stop in TOUR],
    }
