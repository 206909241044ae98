"""The gallery: its index, recording, the committed runs, its cards, and files that visitors bring."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gallery_helpers import ENTRIES, HOSTILE, index_text, made_gallery, trace_of
from visual_helpers import FakeEngine, synthetic

from eagle2 import __main__ as cli
from eagle2 import gallery
from eagle2.gallery import GalleryError, read_gallery, read_index
from eagle2.trace import Trace, TraceError
from visual import gallery as page
from visual import player

GOOD: dict[str, Any] = {"id": "a-run", "title": "A run", "look": "At this.", "prompt": "Hello"}


def toml(*runs: dict[str, Any]) -> str:
    return "".join("[[run]]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in run.items()) for run in runs)


STATIC = GOOD | {"id": "b", "tree": "static", "against": "a-run"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no \\[\\[run\\]\\]"),
        ("run = 3", "no \\[\\[run\\]\\]"),
        ("run = [1]", "no \\[\\[run\\]\\]"),
        ("[[run]", "not valid TOML"),
        ("colour = 1\n" + toml(GOOD), "unknown key 'colour'"),
        (toml(GOOD | {"max_tokens": 3}), "run 1: unknown key 'max_tokens'"),
        (toml({k: v for k, v in GOOD.items() if k != "look"}), "run 1: look is missing"),
        (toml(GOOD, GOOD), "run 2: the id 'a-run' is used twice"),
        (toml(GOOD | {"id": "A run"}), "small letters"),
        (toml(GOOD | {"id": "../a"}), "small letters"),
        (toml(GOOD | {"id": "your-run"}), "small letters"),
        (toml(GOOD | {"id": 3}), "id must be text"),
        (toml(GOOD | {"seed": True}), "seed must be a whole number"),
        (toml(GOOD | {"depth": 2.5}), "depth must be a whole number"),
        (toml(GOOD | {"depth": 0}), "too small"),
        (toml(GOOD | {"temperature": "hot"}), "temperature must be a number"),
        (toml(GOOD | {"temperature": 3}), "out of range"),
        (toml(GOOD | {"tree": "oak"}), "dynamic or static"),
        (toml(GOOD | {"look": "x" * 241}), "the limit is 240"),
        (toml(GOOD | {"prompt": " "}), "empty prompt"),
        (toml(GOOD, STATIC | {"against": "c"}), "stands against 'c'"),
        (toml(GOOD, STATIC | {"against": "b"}), "stands against 'b'"),
        (toml(GOOD, STATIC | {"depth": 2}), "the same prompt, settings and budget"),
        (toml(GOOD, STATIC | {"tree": "dynamic"}), "must be static"),
        (toml(STATIC, GOOD), "the first run is the one that opens"),
    ],
)
def test_a_bad_index_is_told_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "index.toml"
    path.write_text(text)
    with pytest.raises(GalleryError, match=message) as told:
        read_index(path)
    assert "\n" not in str(told.value)
    assert str(path) in str(told.value)


def test_an_index_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GalleryError, match="cannot be read"):
        read_index(tmp_path / "index.toml")


def test_an_index_gives_its_entries_in_order(tmp_path: Path) -> None:
    path = tmp_path / "index.toml"
    path.write_text(index_text(*ENTRIES), encoding="utf-8")
    assert read_index(path) == ENTRIES


def test_a_gallery_must_be_whole(tmp_path: Path) -> None:
    assert [made.entry for made in made_gallery(tmp_path)] == list(ENTRIES)
    path = tmp_path / ENTRIES[0].file
    for change in ({"prompt_text": "Other."}, {"metadata": dict(trace_of(ENTRIES[0]).metadata) | {"seed": 9}}):
        replace(trace_of(ENTRIES[0]), **change).save(path)
        with pytest.raises(GalleryError, match=r"another (prompt|seed) than the index says; .*--only story"):
            read_gallery(tmp_path)
    path.write_bytes(b"{}")
    with pytest.raises(GalleryError, match="not an EAGLE-2 trace"):
        read_gallery(tmp_path)
    path.unlink()
    with pytest.raises(GalleryError, match="is missing; make it with"):
        read_gallery(tmp_path)


def test_recording_replaces_a_run_only_by_a_whole_one(tmp_path: Path) -> None:
    entry = ENTRIES[0]
    told: list[int] = []
    made = gallery.record(FakeEngine(trace_of(entry)), entry, tmp_path, told.append)
    assert made.trace == Trace.load(made.path) == trace_of(entry)
    assert sum(told) == 2 * len(made.trace.output_ids)
    before = made.path.read_bytes()

    class Ended(FakeEngine):
        def race(self, prompt: str, settings: Any) -> Iterator[Any]:
            updates = super().race(prompt, settings)
            yield next(updates)

    class Interrupted(FakeEngine):
        def race(self, prompt: str, settings: Any) -> Iterator[Any]:
            yield next(super().race(prompt, settings))
            raise KeyboardInterrupt

    with pytest.raises(GalleryError, match="without a result"):
        gallery.record(Ended(trace_of(entry)), entry, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gallery.record(Interrupted(trace_of(entry)), entry, tmp_path)
    with pytest.raises(GalleryError, match="another prompt"):
        gallery.record(FakeEngine(trace_of(ENTRIES[1])), entry, tmp_path)
    assert made.path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == [entry.file]


def test_a_recording_says_whether_copies_joined_its_tree() -> None:
    entry = ENTRIES[1]
    trace = trace_of(entry)
    tree = trace.metadata["tree"]
    for lookup, differs in ((None, ""), (False, ""), (True, "tree")):
        said = {**tree, "lookup": lookup} if lookup is not None else tree
        made = replace(trace, metadata={**trace.metadata, "tree": said})
        assert entry.differs(made) == differs


class Engine(FakeEngine):
    """Races whatever entry it is asked for."""

    costs: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__(synthetic(1))

    def calibrate(self) -> None:
        self.costs = {"format": "eagle2-costs"}

    def race(self, prompt: str, settings: Any) -> Iterator[Any]:
        assert self.costs, "the runs hold what passes cost"
        entry = next(item for item in ENTRIES if item.prompt == prompt and item.tree == settings.tree)
        self.trace = trace_of(entry)
        return super().race(prompt, settings)

    def metadata(self, settings: Any) -> dict[str, Any]:
        return dict(self.trace.metadata)


def test_the_command_records_all_or_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_engine", lambda args: Engine())
    (tmp_path / "index.toml").write_text(index_text(*ENTRIES), encoding="utf-8")
    assert cli.main(["gallery", "--folder", str(tmp_path), "--only", "deep", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in answer["runs"]] == ["deep"]
    assert answer["runs"][0]["tau"] == trace_of(ENTRIES[1]).tau
    assert answer["runs"][0]["bytes"] == (tmp_path / "deep.json.gz").stat().st_size
    assert sorted(item.name for item in tmp_path.iterdir()) == ["deep.json.gz", "index.toml"]
    assert cli.main(["gallery", "--folder", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert all(entry.id in told for entry in ENTRIES)
    assert "4 runs" in told
    assert [made.entry for made in read_gallery(tmp_path)] == list(ENTRIES)
    assert cli.main(["gallery", "--folder", str(tmp_path), "--only", "shallow"]) == 1
    assert capsys.readouterr().err == "error: the index has no run 'shallow'; it has deep, flat, hostile, story\n"
    assert cli.main(["gallery", "--folder", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


# The committed runs


def test_the_committed_runs_are_whole_small_and_of_their_index() -> None:
    made = read_gallery()  # loads each, and compares prompt and settings
    assert len({recording.entry.id for recording in made}) == len(made) >= 8
    assert sum(item.stat().st_size for item in gallery.FOLDER.iterdir()) < 1_500_000
    files = {item.name for item in gallery.FOLDER.iterdir()}
    assert files == {"index.toml"} | {recording.entry.file for recording in made}
    for recording in made:
        trace = recording.trace
        assert trace.steps
        assert trace.autoregressive is not None
        assert trace.metadata["clock"] == "measured"
        if trace.metadata["dtype"] == "float32" and not recording.entry.temperature:
            assert trace.equal, recording.entry.id
        for number in map(int, _steps_named(recording.entry.look)):
            assert 1 <= number <= len(trace.steps), recording.entry.id


def _steps_named(look: str) -> list[str]:
    return [number for part in re.findall(r"[Ss]teps? ([\d, and to]+)", look) for number in re.findall(r"\d+", part)]


def test_what_the_committed_runs_are_said_to_show_is_there() -> None:
    runs = {recording.entry.id: recording.trace for recording in read_gallery()}

    def emitted(run: str) -> list[int]:
        return [step.emitted for step in runs[run].steps]

    def firsts(run: str, step: int) -> int:
        kept = runs[run].steps[step - 1]
        return sum(kept.parents[node] == 0 for node in kept.kept)

    def deepest(run: str, step: int) -> int:
        kept = runs[run].steps[step - 1]
        return max(kept.depths[node] for node in kept.kept)

    assert emitted("lighthouse")[10] == 4
    assert emitted("lighthouse")[2] == 1
    assert emitted("code")[:6] == [4] * 6
    assert "42" not in runs["arithmetic"].text
    assert emitted("arithmetic")[2] == emitted("arithmetic")[6] == 1
    assert emitted("list")[9:27] == [4] * 18
    assert deepest("paper-tree", 13) < deepest("paper-tree", 17) == 6
    assert emitted("french")[:8] == [1] * 8
    assert [emitted("french")[step - 1] for step in (24, 29, 33)] == [4] * 3
    sampled = runs["temperature"].steps[15]
    draws = [(runs["temperature"].vocabulary[sampled.token_ids[d.node]], d.accepted) for d in sampled.decisions]
    assert draws[:2] == [(" the", False), (" a", True)]
    assert runs["temperature"].vocabulary[sampled.choice_ids[0]] == " the"
    assert (firsts("sum-open", 1), firsts("sum-open", 2)) == (3, 1)
    assert (firsts("sum-asked", 1), firsts("sum-asked", 2), emitted("sum-asked")[1]) == (8, 2, 6)
    for run in ("sum-open-static", "sum-asked-static"):
        assert len({(step.parents, step.kept) for step in runs[run].steps[:2]}) == 1
        assert firsts(run, 1) == 3
    assert (len(emitted("sum-asked")), len(emitted("sum-asked-static"))) == (4, 6)
    assert runs["sum-open"].output_ids == runs["sum-open-static"].output_ids


# Cards


def test_a_card_says_what_the_run_is() -> None:
    trace = trace_of(ENTRIES[0])
    card = page.card("story", "A story", trace, "Look.")
    assert card == page.Card(
        "story", "A story", "Tell a story.",
        (f"tau {trace.tau:.2f}", f"{trace.speedup:.2f}×", "recorded 2026-11-29"), "Look.",
    )  # fmt: skip
    alone = page.card("x", "X", replace(trace, autoregressive=None))
    assert alone.facts == (f"tau {trace.tau:.2f}", "recorded 2026-11-29")


def test_a_card_of_a_strange_trace_stays_small_and_plain() -> None:
    trace = trace_of(ENTRIES[0])
    odd = {"created": {"a": ["<b>"] * 999}, "device": "\u202ecpu\n\n" * 999}
    card = page.card("x", "X", replace(trace, prompt_text="a\n\n" * 9999, metadata=dict(trace.metadata) | odd))
    assert len(card.prompt) == page.EXCERPT
    assert card.prompt.startswith("a a a")
    assert len(card.facts[-1]) < 80
    assert "\u202e" not in card.facts[-1]


def test_the_rows_message_is_json_without_markup() -> None:
    cards = [page.card(entry.id, entry.title, trace_of(entry), entry.look) for entry in ENTRIES]
    text = player.to_json(page.message(cards, "story", busy=True))
    assert "<" not in text
    told = json.loads(text)
    assert (told["current"], told["busy"]) == ("story", True)
    assert told["cards"][2]["prompt"] == HOSTILE
    assert "${" not in page.HTML_TEMPLATE + page.head().split("<script>")[0]


# Files that visitors bring


def test_a_good_file_opens_packed_or_not(tmp_path: Path) -> None:
    trace = trace_of(ENTRIES[0])
    for name in ("a.json", "a.json.gz"):
        trace.save(tmp_path / name)
        assert page.open_file(tmp_path / name) == trace


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"hello", "not valid JSON"),
        (b"\x89PNG\r\n\x1a\n", "not valid JSON"),
        (b"{}", "not an EAGLE-2 trace"),
        (b'{"format":"eagle2-trace","version":99}', "version 99, newer than this program"),
        (b"[" * 100_000, "not valid JSON"),
        (b"\x1f\x8bgarbage", "cannot be read|damaged"),
        (b"9" * 5000, "not valid JSON"),
        (b" " * (page.MAX_UNPACKED + 1), "an unpacked trace may have 20 MB"),
        (b"\x1f\x8b" + b"0" * page.MAX_PACKED, "a packed trace may have 5 MB"),
        (gzip.compress(b" " * (page.MAX_UNPACKED + 1)), "larger than 20 MB"),
    ],
    ids=["empty", "text", "image", "other", "new", "nested", "broken", "number", "large", "packed", "bomb"],
)
def test_a_bad_file_is_told_in_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "<img src=x onerror=alert(1)>.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message) as told:
        page.open_file(path)
    assert len(str(told.value)) < 300
    assert "<img" not in str(told.value)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="did not arrive"):
        page.open_file(tmp_path / "a.json")


def test_a_file_may_not_hold_more_than_can_be_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = trace_of(ENTRIES[0])
    path = tmp_path / "a.json.gz"
    trace.save(path)
    step = trace.steps[0]
    for name, amount, called in (
        ("MAX_STEPS", len(trace.steps), "steps"),
        ("MAX_NODES", len(step.token_ids), "nodes in one step"),
        ("MAX_KEPT", len(step.kept), "nodes for the target in one step"),
        ("MAX_ALL_NODES", sum(len(step.token_ids) for step in trace.steps), "nodes in all"),
        ("MAX_OUTPUT", len(trace.output_ids), "output tokens"),
        ("MAX_PROMPT", len(trace.prompt_text), "characters in its prompt"),
        ("MAX_TEXT", max(map(len, trace.vocabulary.values())), "characters in one token"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(page, name, amount)
            page.open_file(path)
            patch.setattr(page, name, amount - 1)
            with pytest.raises(TraceError, match=f"the trace has {amount} {called}; {amount - 1} can be shown"):
                page.open_file(path)
    replace(trace, metadata=dict(trace.metadata) | {"note": "x" * page.MAX_METADATA}).save(path)
    with pytest.raises(TraceError, match="characters of metadata"):
        page.open_file(path)
