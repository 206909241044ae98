"""The learners' texts: complete, short, and with placeholders that the browser knows."""

from __future__ import annotations

import re

import pytest

from visual import lessons, tree
from visual.player import setup, to_json

TERMS = (
    "target", "draft head", "root token", "draft token", "confidence", "value", "expansion phase", "reranking phase",
    "tree mask", "position id", "row", "verification", "acceptance rate", "accepted", "rejected", "correction token",
    "bonus token", "tau", "speed-up", "own clock", "prefill", "autoregressive", "dynamic tree", "static tree", "top_k",
    "depth", "total_tokens", "greedy", "temperature", "lossless",
)  # fmt: skip


def sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])\s+(?=[A-Z0-9])", text) if part]


def test_the_glossary_covers_the_terms() -> None:
    assert sorted(lessons.GLOSSARY) == sorted(TERMS)
    assert list(lessons.GLOSSARY) == sorted(lessons.GLOSSARY, key=str.lower)


@pytest.mark.parametrize("term", TERMS)
def test_an_entry_is_short_and_says_where_it_comes_from(term: str) -> None:
    entry = lessons.GLOSSARY[term]
    assert 1 <= len(sentences(entry.text)) <= 2
    assert len(entry.text) <= 240
    assert entry.text[0].isupper()
    assert entry.text.endswith(".")
    assert bool(entry.paper) == bool(entry.section)
    if entry.paper:
        assert lessons.source(entry) == f"{lessons.PAPERS[entry.paper][0]}, {entry.section}"
        assert re.fullmatch(r"(section [1-9](\.[1-9])?|appendix [A-Z]\.[1-9])", entry.section)
    else:
        assert lessons.source(entry) == ""


def test_papers_name_their_number_and_link_to_it() -> None:
    for name, url in lessons.PAPERS.values():
        number = re.search(r"arXiv (\d{4}\.\d{5})$", name)
        assert number
        assert url == f"https://arxiv.org/abs/{number[1]}"
    assert {lessons.PAPERS[name][1][-10:] for name in ("EAGLE-2", "Leviathan")} == {"2406.16858", "2211.17192"}


def test_a_word_of_the_page_means_one_term() -> None:
    forms = [form.lower() for term, entry in lessons.GLOSSARY.items() for form in (term, *entry.forms)]
    assert len(forms) == len(set(forms))


def test_each_phase_has_its_terms() -> None:
    assert tuple(lessons.PHASE_TERMS) == tree.PHASES
    for terms in lessons.PHASE_TERMS.values():
        assert set(terms) <= set(lessons.GLOSSARY)
    assert "expansion phase" in lessons.PHASE_TERMS["draft"]
    assert "reranking phase" in lessons.PHASE_TERMS["rerank"]
    assert {"tree mask", "position id", "row"} <= set(lessons.PHASE_TERMS["flatten"])


def test_the_tour_is_short_and_in_order() -> None:
    assert len(lessons.TOUR) <= 8
    phases = [stop.phase for stop in lessons.TOUR if stop.step == "richest"]
    assert phases == list(tree.PHASES)
    assert [stop.step for stop in lessons.TOUR] == ["end", *["richest"] * 5, "loss", "end"]
    titles = [stop.title for stop in lessons.TOUR]
    assert len(set(titles)) == len(titles)
    for stop in lessons.TOUR:
        for line in stop.lines:
            assert len(line) <= 240, line
            assert len(sentences(re.sub(r"\{\w+\?\}", "", line))) <= 2, line
            assert line[-1] in ".", line


def test_placeholders_are_those_that_the_browser_fills_in() -> None:
    used = [pair for stop in lessons.TOUR for line in stop.lines for pair in lessons.placeholders(line)]
    assert {name for name, kind in used if kind != "?"} == set(lessons.FIELDS)
    assert {name for name, kind in used if kind == "?"} == set(lessons.FLAGS)
    assert not set(lessons.FIELDS) & set(lessons.FLAGS)
    assert {kind for _, kind in used} <= {"", "?", "token", "node", "pass", "row"}
    for stop in lessons.TOUR:
        for line in stop.lines:
            assert "{" not in re.sub(r"\{\w+(\?|\|\w+)?\}", "", line)


def test_no_number_of_a_run_is_written_down() -> None:
    """All figures come from the step on screen; what is left is EAGLE-2, 1× and phrases."""
    for stop in lessons.TOUR:
        for line in stop.lines:
            assert re.findall(r"\d+", line.replace("EAGLE-2", "").replace("Below 1×", "")) == []


def test_setup_is_plain_data() -> None:
    made = lessons.setup()
    assert setup()["lessons"] == made
    assert to_json(made)
    assert made["glossary"][0] == {
        "term": "acceptance rate",
        "text": "The share of the draft tokens checked by the target that were accepted.",
        "source": "Leviathan et al., arXiv 2211.17192, section 3.1",
        "url": "https://arxiv.org/abs/2211.17192",
        "forms": ["acceptance rate"],
    }
    assert [stop["target"] for stop in made["tour"]] == [stop.target for stop in lessons.TOUR]
    assert made["phases"]["rerank"] == ["reranking phase", "value", "total_tokens"]
