"""The app's wiring with an engine that replays a trace; no browser, no model."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gallery_helpers import ENTRIES, HOSTILE, made_gallery, trace_of
from visual_helpers import FakeEngine, FakeSettings, in_loop, synthetic

from eagle2.trace import Trace

app = in_loop(lambda: importlib.import_module("app"))

GOOD = {
    "max_new_tokens": 96, "temperature": 0, "top_p": 1, "seed": 0, "tree": "dynamic", "depth": 3, "top_k": 4,
    "total_tokens": 5, "size": "by hand",
}  # fmt: skip


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(synthetic(6, depth=3, top_k=4, total=5))


@pytest.fixture
def host(engine: FakeEngine) -> Any:
    return app.EngineHost(lambda progress: engine)


class Visitor:
    session_hash = "a"


def event(host: Any, name: str) -> Any:
    bound = getattr(app.Actions(host, FakeSettings), name)
    return partial(bound, Visitor(), None, None) if name == "run" else bound


def messages(updates: Iterator[Any]) -> list[dict[str, Any]]:
    return [json.loads(update[0]) for update in updates if isinstance(update[0], str)]


def test_a_run_ends_with_the_whole_trace(host: Any, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "YIELD_SECONDS", 0.0)  # as where a step takes longer than that
    updates = list(event(host, "run")("Hello", *GOOD.values()))
    kinds = [message["kind"] for message in messages(iter(updates))]
    assert kinds[:2] == ["note", "clear"]
    assert kinds[-1] == "run"
    assert "live" in kinds
    assert engine.prompts == [("Hello", FakeSettings())]
    steps = engine.trace.steps
    assert [step["a"] for step in messages(iter(updates))[-1]["steps"]] == [list(step.accepted) for step in steps]
    # One yield per (slow) decoding step at least: only there does Gradio notice a closed tab.
    assert len(updates) >= len(steps) + len(engine.trace.autoregressive.step_seconds)  # type: ignore[union-attr]
    file = updates[-1][3].value
    path = file if isinstance(file, str) else file["path"]
    assert path.endswith(".json.gz")
    assert Trace.load(path) == engine.trace


def test_closing_the_generator_ends_the_race(host: Any, engine: FakeEngine) -> None:
    updates = event(host, "run")("Hello", *GOOD.values())
    for update in updates:
        if isinstance(update[0], str) and '"live"' in update[0]:
            break
    assert not engine.closed.is_set()
    updates.close()
    assert engine.closed.is_set()


def test_a_stopped_run_is_handed_to_its_own_visitor_only(host: Any, engine: FakeEngine) -> None:
    actions = app.Actions(host, FakeSettings)
    one, other = Visitor(), Visitor()
    other.session_hash = "b"
    engine.delay = 0.2  # longer than the pause between two pictures
    updates = actions.run(one, None, None, "Hello", *GOOD.values())
    for update in updates:
        if isinstance(update[0], str) and json.loads(update[0]).get("step"):
            break
    updates.close()
    assert json.loads(actions.stopped(other, None, None, "")[0])["kind"] == "stopped"
    told, _, _, file, row, _, own, current = actions.stopped(one, None, None, "")
    message = json.loads(told)
    assert message["kind"] == "run"
    assert message["note"] == app.STOPPED
    path = file.value if isinstance(file.value, str) else file.value["path"]
    trace = Trace.load(path)
    assert 0 < len(trace.steps) < len(engine.trace.steps)
    assert trace.steps == engine.trace.steps[: len(trace.steps)]
    assert (Trace.load(own.path), current) == (trace, app.YOUR_RUN)
    assert [card["id"] for card in json.loads(row)["cards"]] == [app.YOUR_RUN]
    assert json.loads(actions.stopped(one, own, None, current)[0])["kind"] == "stopped"  # handed out once


@pytest.mark.parametrize(
    ("prompt", "changes", "sentence"),
    [
        ("", {}, "Write a prompt first."),
        (" \n", {}, "Write a prompt first."),
        ("x" * 2001, {}, "The prompt has 2001 characters; the limit is 2,000."),
        ("x", {"max_new_tokens": 0}, "Max new tokens must be a whole number between 1 and 512."),
        ("x", {"max_new_tokens": None}, "Max new tokens must be a whole number between 1 and 512."),
        ("x", {"temperature": 2.5}, "The temperature must be a number between 0 and 2."),
        ("x", {"temperature": float("nan")}, "The temperature must be a number between 0 and 2."),
        ("x", {"depth": 2.5}, "The depth must be a whole number between 1 and 8."),
        ("x", {"top_k": 17}, "Top_k must be a whole number between 1 and 16."),
        ("x", {"total_tokens": True}, "Total_tokens must be a whole number between 1 and 128."),
        ("x", {"seed": -1}, "The seed must be a whole number between 0 and 2147483647."),
        ("x", {"tree": "bonsai"}, "The tree must be dynamic or static."),
        ("x", {"size": "huge"}, "The tree size must be automatic or by hand."),
        ("fail", {}, "The prompt is too long for this model."),
    ],
)
def test_a_mistake_gets_one_sentence(host: Any, prompt: str, changes: dict[str, Any], sentence: str) -> None:
    last = messages(event(host, "run")(prompt, *(GOOD | changes).values()))[-1]
    assert last == {"kind": "note", "note": sentence, "level": "error"}


def test_a_run_waits_for_the_model(engine: FakeEngine) -> None:
    go = threading.Event()

    def load(progress: Any) -> FakeEngine:
        progress("reading weights", 1, 4)
        assert go.wait(10)
        return engine

    host = app.EngineHost(load)
    updates = event(host, "run")("Hello", *GOOD.values())
    next(updates)
    time.sleep(0.05)
    note = json.loads(next(updates)[0])["note"]
    assert note == "Loading the model: reading weights 25 %; your run starts as soon as it is ready."
    go.set()
    assert messages(updates)[-1]["kind"] == "run"
    assert host.status.text == "Ready: fake-target with draft head fake-head, float32 on cpu."


def test_costs_are_measured_while_loading_and_not_in_a_run(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(engine, "calibrate", lambda: go.wait(10))
    host = app.EngineHost(lambda progress: engine)
    updates = event(host, "run")("Hello", *GOOD.values())
    next(updates)
    host.start()
    time.sleep(0.05)
    note = json.loads(next(updates)[0])["note"]
    assert host.engine is None
    assert note == "Measuring what passes cost here; your run starts as soon as it is ready."
    go.set()
    assert messages(updates)[-1]["kind"] == "run"


@pytest.mark.parametrize(
    ("tree", "size", "sizes"),
    [
        ("dynamic", app.AUTOMATIC, {"depth": "auto", "total_tokens": "auto"}),
        ("dynamic", app.BY_HAND, {"depth": 2, "total_tokens": 7}),
        ("static", app.AUTOMATIC, {"depth": 2, "total_tokens": 7}),
    ],
)
def test_the_size_reaches_the_engine(
    host: Any, engine: FakeEngine, tree: str, size: str, sizes: dict[str, Any]
) -> None:
    form = GOOD | {"tree": tree, "size": size, "depth": 2, "total_tokens": 7}
    list(event(host, "run")("Hello", *form.values()))
    event(host, "race")("Hello", tree=tree, **sizes)
    assert engine.prompts == [("Hello", FakeSettings(tree=tree, **sizes))] * 2
    event(host, "race")("Hello", depth="auto")
    assert engine.prompts[-1][1] == FakeSettings(depth="auto")


def test_the_form_shows_sizes_where_they_are_chosen_by_hand() -> None:
    def shown(tree: str, size: str) -> tuple[Any, ...]:
        choice, *sliders = (widget._constructor_args[0] for widget in in_loop(lambda: app.size_widgets(tree, size)))
        assert not any("value" in widget for widget in (choice, *sliders))  # what was chosen stays
        return choice["interactive"], *(slider["visible"] for slider in sliders)

    assert shown("dynamic", app.AUTOMATIC) == (True, "hidden", "hidden")
    assert shown("dynamic", app.BY_HAND) == (True, True, True)
    assert shown("static", app.AUTOMATIC) == shown("static", app.BY_HAND) == (False, True, True)


def test_a_page_begins_automatic_but_not_on_a_gpu(actions: Any, host: Any, engine: FakeEngine) -> None:
    demo = in_loop(lambda: app.build(actions))
    parts = {block.elem_id: block for block in demo.blocks.values() if getattr(block, "elem_id", None)}
    assert parts["tree-size"].value == app.AUTOMATIC
    assert (parts["depth"].visible, parts["top-k"].visible) == ("hidden", True)
    host.engine = engine
    assert skipped(actions.open(Asking())[-1])
    engine.device = "cuda:0"
    *others, size = actions.open(Asking())
    assert (all(map(skipped, others)), size) == (True, app.BY_HAND)


def test_an_automatic_run_fills_the_form_as_such() -> None:
    trace = trace_of(ENTRIES[0])

    def values(**tree: Any) -> dict[str, Any]:
        return app.form_values(replace(trace, metadata={**trace.metadata, "tree": trace.metadata["tree"] | tree}))

    assert values() == values(depth=3)
    assert values()["size"] == app.BY_HAND
    automatic = values(depth="auto", total_tokens="auto", top_k=6)
    assert automatic == values() | {"size": app.AUTOMATIC, "top_k": 6}
    assert values(depth="auto") == {}  # the form has no such choice


def test_a_failed_load_is_told_and_tried_again(engine: FakeEngine) -> None:
    answers: list[Any] = [OSError("no network and no cached model; set EAGLE2_CACHE."), engine]

    def load(progress: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    host = app.EngineHost(load)
    run = event(host, "run")
    last = messages(run("Hello", *GOOD.values()))[-1]
    assert last["note"] == "The model could not be loaded: No network and no cached model; set EAGLE2_CACHE."
    assert messages(run("Hello", *GOOD.values()))[-1]["kind"] == "run"


def test_an_unforeseen_error_shows_no_traceback(host: Any, engine: FakeEngine, monkeypatch: Any) -> None:
    def broken(*_: Any) -> Any:
        raise KeyError("secret")

    monkeypatch.setattr(engine, "race", broken)
    note = messages(event(host, "run")("Hello", *GOOD.values()))[-1]
    assert note["note"] == "Something went wrong in this run; the log has the details."


def test_the_endpoint_returns_what_the_command_line_prints(host: Any, engine: FakeEngine) -> None:
    answer = event(host, "race")("Hello")
    assert set(answer) == {"lanes", "tau", "speedup", "equal", "first_difference", "settings"}
    assert answer["lanes"]["eagle2"]["token_ids"] == list(engine.trace.output_ids)
    assert answer == engine.trace.summary()
    json.dumps(answer)


def test_only_the_race_is_a_public_endpoint(host: Any) -> None:
    demo = in_loop(lambda: app.build(app.Actions(host, FakeSettings)))
    named = demo.get_api_info()["named_endpoints"]
    assert list(named) == ["/race"]
    assert [item["parameter_name"] for item in named["/race"]["parameters"]] == ["prompt", *app.FORM[:-1]]


def test_both_ways_to_run_share_one_device(host: Any) -> None:
    demo = in_loop(lambda: app.build(app.Actions(host, FakeSettings)))
    heavy = [function for function in demo.fns.values() if function.name in ("run", "race")]
    assert [(function.concurrency_id, function.concurrency_limit) for function in heavy] == [("device", 1)] * 2
    assert demo.max_size if hasattr(demo, "max_size") else demo._queue.max_size


def test_old_files_are_removed(tmp_path: Path, engine: FakeEngine) -> None:
    import os

    first = Path(app.save_trace(tmp_path, engine.trace))
    second = Path(app.save_trace(tmp_path, engine.trace))
    assert first.exists()
    long_ago = time.time() - app.KEEP_FILES_SECONDS - 1
    os.utime(first, (long_ago, long_ago))
    app.save_trace(tmp_path, engine.trace)
    assert not first.exists()
    assert second.exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app.main(["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for option in ("--model", "--head", "--dtype", "--host", "--port", "--share"):
        assert option in told


# The gallery


@pytest.fixture
def actions(host: Any, tmp_path: Path) -> Any:
    return app.Actions(host, FakeSettings, made_gallery(tmp_path / "gallery"))


class Asking(Visitor):
    def __init__(self, **query: str) -> None:
        self.query_params = query


class Clicked:
    def __init__(self, data: Any) -> None:
        self._data = data


def skipped(value: Any) -> bool:
    return isinstance(value, dict) and value.get("__type__") == "update" and len(value) == 1


def row_of(value: str) -> tuple[list[str], str]:
    told = json.loads(value)
    return [card["id"] for card in told["cards"]], told["current"]


def path_of(file: Any) -> str:
    return file.value if isinstance(file.value, str) else file.value["path"]


def test_the_page_comes_with_the_first_run_and_no_model(
    actions: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = in_loop(lambda: app.build(actions))
    parts = {block.elem_id: block for block in demo.blocks.values() if getattr(block, "elem_id", None)}
    told = json.loads(parts["theatre"].value)
    assert (told["kind"], told["id"], told["play"], told["at"]) == ("run", "story", True, None)
    assert len(told["steps"]) == len(trace_of(ENTRIES[0]).steps)
    assert row_of(parts["gallery"].value) == (["story", "deep", "hostile"], "story")  # a static run has no card
    assert parts["prompt"].value == "Tell a story."
    assert (parts["max-new-tokens"].value, parts["seed"].value) == (24, 4)
    actions.tick()
    assert host.status.state == "waiting"  # nothing is loaded before a page was answered
    assert all(map(skipped, actions.open(Asking())))
    actions.tick()
    assert host.status.state == "waiting"  # nor before it had time to be drawn
    monkeypatch.setattr(app, "PAINT_SECONDS", 0.0)
    actions.tick()
    assert host.status.state != "waiting"


@pytest.mark.parametrize(
    ("query", "run", "at", "note"),
    [
        ({"run": "deep", "step": "3", "phase": "verify"}, "deep", (2, "verify"), ""),
        ({"run": "deep"}, "deep", (0, ""), ""),
        ({"step": "2"}, "story", (1, ""), ""),
        ({"run": "flat", "step": "6", "phase": "accept"}, "flat", (5, "accept"), ""),
        ({"run": "nix", "step": "3"}, "story", (0, ""), "The link names a run that is not here; this is the first one."),
        ({"run": HOSTILE}, "story", (0, ""), "The link names a run that is not here; this is the first one."),
        ({"run": "your-run"}, "story", (0, ""), "The link names a run that is not here; this is the first one."),
        *(
            (
                {"run": "deep", "step": step, "phase": "draft"}, "deep", (at, "draft"),
                f"The link names a step that this run of 6 does not have; this is step {at + 1}.",
            )
            for step, at in (("7", 5), ("0", 0), ("-1", 0), ("two", 0), ("1e3", 0), ("9" * 999, 0), ("٣", 0))
        ),
        (
            {"run": "deep", "step": "2", "phase": "<b>"}, "deep", (1, ""),
            "The link names a phase that does not exist; this is its step.",
        ),
    ],
)  # fmt: skip
def test_a_link_opens_a_step(actions: Any, query: dict[str, str], run: str, at: tuple[int, str], note: str) -> None:
    told, file, row, current, *form = actions.open(Asking(**query))
    message = json.loads(told)
    assert (message["id"], message["play"], message["note"], current) == (run, False, note, run)
    assert message["at"] == {"step": at[0], "phase": at[1]}
    assert row_of(row)[1] == run
    entry = next(entry for entry in ENTRIES if entry.id == run)
    assert path_of(file).endswith(entry.file)
    if run == "story":
        assert all(map(skipped, form[:-1]))
        assert form[-1] == app.BY_HAND
    else:
        assert form[0] == entry.prompt
        assert dict(zip(app.FORM, form[1:]))["tree"] == entry.tree


def test_a_card_shows_its_run_and_fills_the_form(actions: Any) -> None:
    told, file, row, current, *form = actions.choose(Clicked({"run": "deep"}), None, None)
    message = json.loads(told)
    assert (message["id"], message["play"], current) == ("deep", True, "deep")
    assert row_of(row)[1] == "deep"
    assert Trace.load(path_of(file)) == trace_of(ENTRIES[1])
    assert form == ["Grow deep.", 32, 0.0, 1.0, 5, "dynamic", 6, 3, 12, app.BY_HAND]


@pytest.mark.parametrize(
    "data", [None, "deep", {}, {"run": None}, {"run": ["deep"]}, {"run": "nix"}, {"run": "your-run"}]
)
def test_a_click_on_what_is_not_there_changes_nothing(actions: Any, data: Any) -> None:
    told, *rest = actions.choose(Clicked(data), None, None)
    assert json.loads(told) == {"kind": "note", "note": "There is no such run here.", "level": "error"}
    assert all(map(skipped, rest))


def test_every_committed_run_fits_the_form() -> None:
    from eagle2.gallery import read_gallery

    for made in read_gallery():
        values = app.form_values(made.trace)
        assert values["prompt"] == made.entry.prompt
        assert [values[name] for name in app.FORM[:-1]] == [getattr(made.entry, name) for name in app.FORM[:-1]]
        assert values["size"] == app.BY_HAND


def test_a_visitors_own_run_and_file_have_cards_to_go_back_to(actions: Any, engine: FakeEngine, tmp_path: Path) -> None:
    *_, last = actions.run(Visitor(), None, None, "Hello", *GOOD.values())
    own, current = last[6], last[7]
    assert current == app.YOUR_RUN
    assert row_of(actions.ended(own, None, current)) == (["story", "deep", "hostile", app.YOUR_RUN], app.YOUR_RUN)
    trace_of(ENTRIES[1]).save(tmp_path / "mine.json")
    told, _, row, current, *form, file = actions.upload(str(tmp_path / "mine.json"), own)
    assert json.loads(told)["id"] == ""  # a link cannot name it
    assert row_of(row) == (["story", "deep", "hostile", app.YOUR_RUN, app.YOUR_FILE], app.YOUR_FILE)
    assert form[:2] == ["Grow deep.", 32]
    assert Trace.load(file.path) == trace_of(ENTRIES[1])
    assert "mine" not in file.path
    for run_id, trace in ((app.YOUR_RUN, engine.trace), (app.YOUR_FILE, trace_of(ENTRIES[1]))):
        told, shown, row, current, *_ = actions.choose(Clicked({"run": run_id}), own, file)
        assert len(json.loads(told)["steps"]) == len(trace.steps)
        assert Trace.load(path_of(shown)) == trace
        assert row_of(row)[1] == current == run_id
    # Another visitor has other cards.
    assert row_of(actions.ended(None, None, "story"))[0] == ["story", "deep", "hostile"]
    Path(own.path).unlink()
    told, *rest = actions.choose(Clicked({"run": app.YOUR_RUN}), own, file)
    assert json.loads(told)["note"] == "This run is no longer kept here; run it or open it again."
    assert all(map(skipped, rest))


def test_the_row_is_closed_while_a_run_goes_on_and_open_after_it_however_it_ends(
    actions: Any, engine: FakeEngine
) -> None:
    for prompt in ("Hello", "fail"):
        updates = list(actions.run(Visitor(), None, None, prompt, *GOOD.values()))
        told = [json.loads(update[4]) for update in updates if isinstance(update[4], str)]
        assert [(row["busy"], row["current"]) for row in told] == [(True, app.RACING)]
        *_, own, current = updates[-1]
        assert current == (app.YOUR_RUN if prompt == "Hello" else "")
        after = json.loads(actions.ended(own if prompt == "Hello" else None, None, current))
        assert (after["busy"], after["current"]) == (False, current)
    # Refused before it began: what is on screen stays.
    *_, current = list(actions.run(Visitor(), None, None, "", *GOOD.values()))[-1]
    assert skipped(current)
    # A stopped run's end may be told before Stop is answered, with states from before it.
    assert skipped(actions.ended(None, None, app.RACING))


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"{}", "This file is not an EAGLE-2 trace."),
        (b"<script>alert(1)</script>", "The trace is not valid JSON: Expecting value: line 1 column 1 (char 0)."),
        (b'{"format":"eagle2-trace","version":99}',
         "The trace has version 99, newer than this program's 2; update the program to open it."),
        (None, "No file arrived here; try again."),
    ],
)  # fmt: skip
def test_a_bad_file_changes_nothing(actions: Any, tmp_path: Path, content: bytes | None, note: str) -> None:
    path = None
    if content is not None:
        path = tmp_path / "x.json"
        path.write_bytes(content)
    told, *rest = actions.upload(path and str(path), None)
    assert json.loads(told) == {"kind": "note", "note": note, "level": "error"}
    assert all(map(skipped, rest))
    assert len(rest) == 4 + len(app.FORM) + 1


def test_a_sentence_that_quotes_the_file_stays_short(actions: Any, tmp_path: Path) -> None:
    data = trace_of(ENTRIES[0]).to_dict() | {"<img src=x>" * 9999: 1}
    (tmp_path / "x.json").write_text(json.dumps(data))
    note = json.loads(actions.upload(str(tmp_path / "x.json"), None)[0])["note"]
    assert note.startswith("The trace is damaged: unknown field")
    assert len(note) < 250


def odd_metadata() -> Iterator[dict[str, Any]]:
    good = dict(trace_of(ENTRIES[0]).metadata)
    for key in ("tree", "sampling", "versions", "created", "device", "seed", "threads", "max_new_tokens"):
        for value in (None, 3, "x", [1], {"depth": [1]}, HOSTILE, 1e308 * 10):
            yield good | {key: value}


def test_a_file_with_strange_metadata_is_shown_or_refused_but_never_breaks(actions: Any, tmp_path: Path) -> None:
    for metadata in odd_metadata():
        data = trace_of(ENTRIES[0]).to_dict() | {"metadata": metadata}
        path = tmp_path / "x.json"
        path.write_text(json.dumps(data).replace("Infinity", "1e999"))
        told, *rest = actions.upload(str(path), None)
        message = json.loads(told)
        if message["kind"] == "note":
            assert message["level"] == "error"
            assert all(map(skipped, rest))
        else:
            assert message["kind"] == "run"
            assert HOSTILE not in told  # escaped, so that no HTML parser sees it


def test_a_page_is_answered_before_torch_is_there() -> None:
    """Neither importing the app nor building its page, with the recorded runs in it, imports torch."""
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "import app\n"
        "assert len(app.demo.blocks) > 10 and app.recorded()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=Path(app.__file__).parent, check=True, timeout=120)


def test_both_trees_run_on_the_visitors_prompt(host: Any, engine: FakeEngine, tmp_path: Path) -> None:
    actions = app.Actions(host, FakeSettings, made_gallery(tmp_path))
    form = GOOD | {"max_new_tokens": 300, "tree": "static"}
    updates = list(actions.compare("Hello", *form.values()))
    assert [(prompt, settings.tree, settings.max_new_tokens) for prompt, settings in engine.prompts] == [
        ("Hello", "static", app.COMPARED), ("Hello", "dynamic", app.COMPARED),
    ]  # fmt: skip
    shown = json.loads(updates[-1][0])
    assert (shown["kind"], shown["opened"]) == ("compare", len(shown["pairs"]) - 1)
    assert [pair["title"] for pair in shown["pairs"]] == [pair.title for pair in actions.pairs()] + ["Your prompt"]
    own = shown["pairs"][-1]
    assert [dict(map(tuple, own[kind]["about"]))["tree"].split(",")[0] for kind in ("static", "dynamic")] == [
        "static", "dynamic",
    ]  # fmt: skip
    told = json.loads(updates[-1][1])
    assert told == {
        "state": "ready", "text": "Both trees on your prompt, up to 64 tokens, sized by hand (depth 3, top_k 4, total_tokens 5).",
    }  # fmt: skip
    assert engine.running == 0


def test_a_comparison_is_sized_by_hand_and_says_so(host: Any, engine: FakeEngine) -> None:
    form = GOOD | {"size": app.AUTOMATIC, "depth": 2}
    *_, last = app.Actions(host, FakeSettings).compare("Hello", *form.values())
    assert [(settings.depth, settings.total_tokens) for _, settings in engine.prompts] == [(2, 5)] * 2
    assert json.loads(last[1])["text"].endswith(
        "sized by hand (depth 2, top_k 4, total_tokens 5, a static tree cannot be automatic)."
    )


@pytest.mark.parametrize(
    ("prompt", "said"), [("", "Write a prompt first."), ("fail", "The prompt is too long for this model.")]
)
def test_a_comparison_that_cannot_be_made_says_why(host: Any, prompt: str, said: str) -> None:
    updates = list(app.Actions(host, FakeSettings).compare(prompt, *GOOD.values()))
    assert json.loads(updates[-1][1]) == {"state": "failed", "text": said}
    assert updates[-1][2].interactive
    assert not isinstance(updates[-1][0], str)  # what is on screen stays


def test_a_closed_comparison_ends_at_its_step(host: Any, engine: FakeEngine) -> None:
    updates = app.Actions(host, FakeSettings).compare("Hello", *GOOD.values())
    while engine.running == 0:
        next(updates)
    updates.close()
    assert engine.running == 0


def test_the_recorded_pairs_are_sent_once(host: Any, tmp_path: Path) -> None:
    actions = app.Actions(host, FakeSettings, made_gallery(tmp_path))
    told, opened = actions.compared(False)
    assert opened
    assert len(json.loads(told)["pairs"]) == len(actions.pairs()) == sum(bool(entry.against) for entry in ENTRIES)
    again, _ = actions.compared(True)
    assert not isinstance(again, str)
