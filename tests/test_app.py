"""The app's wiring with an engine that replays a trace; no browser, no model."""

from __future__ import annotations

import importlib
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from visual_helpers import FakeEngine, FakeSettings, in_loop, synthetic

from eagle2.trace import Trace

app = in_loop(lambda: importlib.import_module("app"))

GOOD = {
    "max_new_tokens": 96, "temperature": 0, "top_p": 1, "seed": 0, "tree": "dynamic", "depth": 3, "top_k": 4,
    "total_tokens": 5,
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
    return partial(bound, Visitor()) if name == "run" else bound


def messages(updates: Iterator[Any]) -> list[dict[str, Any]]:
    return [json.loads(update[0]) for update in updates if isinstance(update[0], str)]


def test_a_run_ends_with_the_whole_trace(host: Any, engine: FakeEngine) -> None:
    updates = list(event(host, "run")("Hello", *GOOD.values()))
    kinds = [message["kind"] for message in messages(iter(updates))]
    assert kinds[0] == "clear"
    assert kinds[-1] == "run"
    assert "live" in kinds
    assert engine.prompts == [("Hello", FakeSettings())]
    steps = engine.trace.steps
    assert [step["a"] for step in messages(iter(updates))[-1]["steps"]] == [list(step.accepted) for step in steps]
    # One yield per decoding step at least: only there does Gradio notice a closed tab.
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
    updates = actions.run(one, "Hello", *GOOD.values())
    for update in updates:
        if isinstance(update[0], str) and json.loads(update[0]).get("step"):
            break
    updates.close()
    assert json.loads(actions.stopped(other)[0])["kind"] == "stopped"
    told, _, _, file = actions.stopped(one)
    message = json.loads(told)
    assert message["kind"] == "run"
    assert message["note"] == app.STOPPED
    path = file.value if isinstance(file.value, str) else file.value["path"]
    trace = Trace.load(path)
    assert 0 < len(trace.steps) < len(engine.trace.steps)
    assert trace.steps == engine.trace.steps[: len(trace.steps)]
    assert json.loads(actions.stopped(one)[0])["kind"] == "stopped"  # handed out once


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
    assert [item["parameter_name"] for item in named["/race"]["parameters"]] == ["prompt", *app.FORM]


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
