"""The app in a real browser with an engine that replays a trace: run, step through phases, Stop, closed tab."""

from __future__ import annotations

import gzip
import importlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gallery_helpers import ENTRIES, HOSTILE, made_gallery, trace_of
from test_a11y_browser import serious
from test_auto import CPU
from tiny import byte_tokenizer, tiny_head, tiny_model
from visual_helpers import FakeEngine, FakeSettings, in_loop, synthetic

from eagle2.engine import Engine
from eagle2.target import Target
from eagle2.trace import Trace
from visual import theme

app = in_loop(lambda: importlib.import_module("app"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # pandas, in Gradio's own statistics
]
PLAYER = "[data-testid=player]"


class Served:
    """A running app; `engine` may be swapped between tests, `gate` holds back the first load."""

    def __init__(self, folder: Path) -> None:
        # Slow enough for a page that is still being built to see it race.
        self.engine = FakeEngine(synthetic(8, depth=3, top_k=4, total=5, seed=4), delay=0.06)
        self.gate = threading.Event()
        self.host = app.EngineHost(self.load)
        self.actions = app.Actions(self.host, FakeSettings, made_gallery(folder))
        self.demo = app.build(self.actions)
        options = app.launch_options()
        self.demo.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **options)

    def load(self, progress: Any) -> FakeEngine:
        progress("reading weights", 1, 2)
        assert self.gate.wait(60)
        return self.engine

    def use(self, engine: FakeEngine) -> FakeEngine:
        self.gate.set()
        self.engine = self.host.engine = engine
        return engine


@pytest.fixture(scope="module")
def served(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("gallery"))
    yield made
    made.demo.close()


@contextmanager
def opened(browser: Any, served: Served, query: str = "", **options: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": options.pop("width", 1280), "height": 900}, **options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text) if line.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.on("dialog", lambda dialog: (bad.append("dialog: " + dialog.message), dialog.dismiss()))
    page.on(
        "request",
        lambda request: (
            None if "127.0.0.1" in request.url or request.url[:5] in ("data:", "blob:") else bad.append(request.url)
        ),
    )
    page.goto(served.demo.local_url + query)
    page.wait_for_selector("[data-testid=run]")
    page.wait_for_selector(".e2[data-kind=run]")
    try:
        yield page
        assert bad == []
    finally:
        context.close()


def card(run: str) -> str:
    return f"[data-testid=gallery] [data-run={run}]"


def finished(page: Any) -> None:
    """A run of this page's own has ended: its card is the current one."""
    page.wait_for_selector(card("your-run") + "[aria-current]")
    page.wait_for_selector(".e2[data-kind=run]")
    page.wait_for_selector("[data-testid=run]:enabled")


def shows(page: Any, trace: Trace) -> None:
    """The player shows this run."""
    page.wait_for_function(
        "([text, most]) => document.querySelector('[data-testid=text-eagle2]').textContent === text"
        " && document.querySelector('[data-testid=step-slider]').max === most",
        arg=["".join(map(theme.plain, trace.output_pieces)), str(len(trace.steps))],
    )


def test_open_wait_for_the_model_run_and_step_through(chromium: Any, served: Served) -> None:
    trace = served.engine.trace
    with opened(chromium, served) as page:
        page.wait_for_function("document.querySelector('[data-testid=model-status]').dataset.state === 'loading'")
        assert page.input_value("[data-testid=prompt]") == ENTRIES[0].prompt
        page.fill("[data-testid=prompt]", "10+2=")
        page.click("[data-testid=run]")
        page.wait_for_function(
            "document.querySelector('[data-testid=note]').textContent.includes('as soon as it is ready')"
        )
        assert page.is_enabled("[data-testid=stop]")
        assert page.get_attribute(".e2[data-kind]", "data-kind") == "run"  # what was on screen stays until then
        served.gate.set()
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
        assert page.get_attribute(card("story"), "aria-disabled") == "true"
        finished(page)
        assert page.get_attribute(card("story"), "aria-disabled") == "false"
        automatic = FakeSettings(max_new_tokens=24, seed=4, depth="auto", total_tokens="auto")
        assert served.engine.prompts[-1] == ("10+2=", automatic)
        page.wait_for_function("document.querySelector('[data-testid=model-status]').dataset.state === 'ready'")
        assert page.text_content("[data-testid=speedup]") == f"{trace.speedup:.2f}×"
        assert page.text_content("[data-testid=tau]") == f"{trace.tau:.2f}"
        assert page.text_content("[data-testid=same-tokens]") == f"yes, all {len(trace.output_ids)}"
        for lane, pieces in (("eagle2", trace.output_pieces), ("autoregressive", trace.autoregressive.pieces)):  # type: ignore[union-attr]
            shown = page.locator(f"[data-testid=lane-{lane}] .e2-token")
            assert shown.count() == len(pieces)
            assert page.text_content(f"[data-testid=text-{lane}]") == "".join(map(theme.plain, pieces))
        assert page.locator("[data-testid=lane-eagle2] [data-origin=drafted]").count() == trace.origins.count("drafted")
        for number, step in enumerate(trace.steps):
            page.fill("[data-testid=step-slider]", str(number + 1))
            for phase in ("draft", "rerank", "flatten", "verify", "accept"):
                page.click(f"[data-testid=phase-{phase}]")
                assert page.get_attribute(PLAYER, "data-phase") == phase
                assert page.text_content("[data-testid=phase]").lower().startswith(phase)
            assert page.get_attribute(PLAYER, "data-accepted") == ",".join(map(str, step.accepted))
            path = ",".join(map(str, sorted(step.accepted)))
            page.wait_for_function(
                "([path, kind]) => [...document.querySelectorAll('.e2-plot [data-verdict=accepted]')].map(p => +p.dataset.node)"
                ".sort((a, b) => a - b).join() === path && document.querySelector(`.e2-plot [data-verdict=${kind}]`)",
                arg=[path, step.next_kind],
            )
        with page.expect_download() as download:
            page.click("[data-testid=download]")
        assert download.value.suggested_filename.endswith(".json.gz")
        assert Trace.load(download.value.path()) == trace
        page.click("[data-testid=run]")  # again, on the same page
        page.wait_for_selector(".e2[data-kind=live]")
        finished(page)


def test_stop_ends_the_run_at_the_next_step(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(200, depth=3, top_k=4, total=5), delay=0.1))
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
        page.click("[data-testid=stop]")
        assert engine.closed.wait(5)
        page.wait_for_selector("[data-testid=run]:enabled")
        assert page.text_content("[data-testid=note]").startswith("Stopped.")
        assert page.text_content("[data-testid=text-eagle2]")
        finished(page)  # what was made is a run like any other: all its steps, and the download
        page.fill("[data-testid=step-slider]", "1")
        page.click("[data-testid=phase-rerank]")
        assert page.get_attribute(PLAYER, "data-phase") == "rerank"
        with page.expect_download() as download:
            page.click("[data-testid=download]")
        stopped = Trace.load(download.value.path())
        assert stopped.finish_reason == "stopped"
        assert 0 < len(stopped.steps) < 200
        served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
        page.click("[data-testid=run]")
        finished(page)


def test_a_closed_tab_ends_the_run_and_frees_the_device(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(200, depth=3, top_k=4, total=5), delay=0.1))
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        page.wait_for_selector(".e2[data-kind=live] [data-node]")
    assert engine.closed.wait(10)
    assert engine.most_running == 1


def test_one_run_at_a_time_and_visitors_do_not_see_each_other(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(5, depth=3, top_k=4, total=5), delay=0.05))
    with opened(chromium, served) as one, opened(chromium, served) as two:
        one.fill("[data-testid=prompt]", "first")
        two.fill("[data-testid=prompt]", "second")
        one.click("[data-testid=run]")
        one.wait_for_selector(".e2[data-kind=live]")
        assert two.get_attribute(".e2[data-kind]", "data-kind") == "run"  # of the gallery, as before
        two.click("[data-testid=run]")
        finished(one)
        finished(two)
        assert one.locator(card("your-run")).count() == two.locator(card("your-run")).count() == 1
    assert [prompt for prompt, _ in engine.prompts] == ["first", "second"]
    assert engine.most_running == 1


def fill_settings(page: Any, values: dict[str, str]) -> None:
    """Open the settings and type; a widget that is only just being built would put its first value back."""
    page.get_by_text("Settings", exact=True).first.click()
    page.wait_for_selector("[data-testid=top-k]")
    assert page.is_hidden("[data-testid=depth]")  # the machine chooses
    page.get_by_label("by hand").check()
    for name in values:
        page.wait_for_selector(f"[data-testid={name}]")
    settled = 0
    for _ in range(100):
        wrong = [name for name, value in values.items() if page.input_value(f"[data-testid={name}]") != value]
        for name in wrong:
            page.fill(f"[data-testid={name}]", values[name])
            page.press(f"[data-testid={name}]", "Tab")
        settled = 0 if wrong else settled + 1
        if settled == 5:
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"the settings do not keep what is typed: {wrong}")


def test_settings_reach_the_engine(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(2, depth=3, top_k=4, total=5)))
    with opened(chromium, served) as page:
        fill_settings(page, {"max-new-tokens": "48", "temperature": "0.7", "depth": "2", "seed": "11"})
        page.get_by_label("static (EAGLE-1)").check()
        page.wait_for_function("document.querySelector('#tree-size input').disabled")
        page.click("[data-testid=run]")
        finished(page)
    chosen = FakeSettings(max_new_tokens=48, temperature=0.7, seed=11, tree="static", depth=2)
    assert engine.prompts == [(ENTRIES[0].prompt, chosen)]


def test_a_mistake_is_told_in_the_page(chromium: Any, served: Served) -> None:
    served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
    with opened(chromium, served, width=390, color_scheme="dark") as page:
        page.fill("[data-testid=prompt]", "fail")
        page.click("[data-testid=run]")
        page.wait_for_selector("[data-testid=note][data-level=error]")
        assert page.text_content("[data-testid=note]") == "The prompt is too long for this model."
        page.fill("[data-testid=prompt]", "${1+1} <img src=x onerror=alert(1)>")
        page.click("[data-testid=run]")
        finished(page)
        assert page.get_attribute(".e2[data-kind]", "data-scheme") == "dark"
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_hostile_tokens_do_nothing(chromium: Any, served: Served) -> None:
    words = [
        "<b>bold</b>",
        "${1+1}",
        "<img src=x onerror=alert(1)>",
        "{{value}}",
        "</script><script>alert(1)</script>",
        "`",
    ]
    trace = served.use(FakeEngine(synthetic(4, depth=2, top_k=3, total=6, words=words), delay=0.02)).trace
    with opened(chromium, served) as page:
        page.click("[data-testid=run]")
        finished(page)
        assert page.text_content("[data-testid=text-eagle2]") == trace.text
        assert page.locator("[data-testid=player] img, [data-testid=lane-eagle2] b").count() == 0


def test_the_endpoint_answers(served: Served) -> None:
    from urllib.request import Request, urlopen

    engine = served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5)))
    base = served.demo.local_url + "gradio_api/call/race"
    ask = Request(
        base,
        json.dumps({"data": ["Hello", 96, 0, 1, 0, "dynamic", 3, 4, 5]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(ask, timeout=30) as answer:
        event = json.load(answer)["event_id"]
    with urlopen(f"{base}/{event}", timeout=30) as answer:
        told = answer.read().decode()
    assert told.startswith("event: complete"), told
    assert json.loads(told.split("data: ", 1)[1])[0]["lanes"]["eagle2"]["token_ids"] == list(engine.trace.output_ids)


def test_a_card_opens_its_run_and_run_repeats_it(chromium: Any, served: Served) -> None:
    engine = served.use(FakeEngine(synthetic(3, depth=3, top_k=4, total=5, seed=9)))
    with opened(chromium, served) as page:
        shows(page, trace_of(ENTRIES[0]))
        page.wait_for_selector("[data-testid=play][aria-label^=Pause]")  # it plays by itself
        assert page.locator("[data-testid=gallery] button").count() == 3
        assert page.locator("[data-testid=gallery] [aria-current]").get_attribute("data-run") == "story"
        assert page.text_content("[data-testid=look]") == f"What to look at: {ENTRIES[0].look}"
        page.focus(card("deep"))
        page.keyboard.press("Enter")
        shows(page, trace_of(ENTRIES[1]))
        page.wait_for_selector(card("deep") + "[aria-current]")
        assert page.evaluate("document.activeElement.dataset.run") == "deep"
        page.wait_for_function("document.querySelector('[data-testid=prompt]').value === 'Grow deep.'")
        with page.expect_download() as download:
            page.click("[data-testid=download]")
        assert download.value.suggested_filename == "deep.json.gz"
        assert Trace.load(download.value.path()) == trace_of(ENTRIES[1])
        page.click("[data-testid=run]")
        finished(page)
        assert engine.prompts[-1] == (
            "Grow deep.", FakeSettings(max_new_tokens=32, seed=5, depth=6, top_k=3, total_tokens=12),
        )  # fmt: skip
        shows(page, engine.trace)
        page.click(card("story"))
        shows(page, trace_of(ENTRIES[0]))
        page.click(card("your-run"))  # nothing is lost
        shows(page, engine.trace)
        page.reload()
        page.wait_for_selector(card("story") + "[aria-current]")
        assert page.locator(card("your-run")).count() == 0


def test_a_link_opens_a_run_at_a_step_and_phase(chromium: Any, served: Served) -> None:
    with opened(chromium, served, "?run=deep&step=4&phase=rerank") as page:
        shows(page, trace_of(ENTRIES[1]))
        page.wait_for_selector(PLAYER + "[data-phase=rerank]")
        assert page.input_value("[data-testid=step-slider]") == "4"
        assert page.get_attribute(card("deep"), "aria-current") == "true"
        page.wait_for_timeout(1500)  # it does not play
        assert page.get_attribute(PLAYER, "data-phase") == "rerank"
        assert page.is_hidden("[data-testid=note]")
        page.click(card("story"))
        shows(page, trace_of(ENTRIES[0]))
    with opened(chromium, served, "?run=nix&step=4") as page:
        shows(page, trace_of(ENTRIES[0]))
        page.wait_for_selector("[data-testid=note]:visible")
        told = page.text_content("[data-testid=note]")
        assert told == "The link names a run that is not here; this is the first one."
        assert page.input_value("[data-testid=step-slider]") == "1"


def test_a_file_is_opened_and_a_bad_one_is_told(chromium: Any, served: Served, tmp_path: Path) -> None:
    trace = trace_of(ENTRIES[1], steps=4)
    good, bad = tmp_path / "<b>${1+1}.json.gz", tmp_path / "bad.json.gz"
    trace.save(good)
    bad.write_bytes(good.read_bytes()[:-40])
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(trace.to_dict() | {"version": 99}))
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b" " * (21 << 20)))
    with opened(chromium, served) as page:
        page.wait_for_selector("[data-testid=upload]", state="attached")
        page.set_input_files("[data-testid=upload]", good)
        shows(page, trace)
        page.wait_for_selector(card("your-file") + "[aria-current]")
        for path, told in (
            (bad, "The trace cannot be read: Compressed file ended before the end-of-stream marker was reached."),
            (newer, "The trace has version 99, newer than this program's 2; update the program to open it."),
            (bomb, "The trace is larger than 20 MB."),
        ):
            page.set_input_files("[data-testid=upload]", path)
            page.wait_for_function(
                "told => document.querySelector('[data-testid=note][data-level=error]')?.textContent === told", arg=told
            )
            shows(page, trace)
        page.click(card("story"))
        shows(page, trace_of(ENTRIES[0]))
        page.click(card("your-file"))
        shows(page, trace)


def test_hostile_texts_of_a_run_do_nothing(chromium: Any, served: Served) -> None:
    with opened(chromium, served, "?run=hostile") as page:
        page.wait_for_selector(card("hostile") + "[aria-current]")
        assert page.text_content(card("hostile") + " .e2-card-title") == ENTRIES[2].title
        assert page.text_content(card("hostile") + " .e2-card-prompt") == HOSTILE
        assert page.text_content("[data-testid=look]") == f"What to look at: {HOSTILE}"
        assert page.locator("#gallery img, #gallery b, #theatre img").count() == 0
        page.wait_for_function("told => document.querySelector('[data-testid=prompt]').value === told", arg=HOSTILE)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_the_cards_and_not_the_page(chromium: Any, served: Served, scheme: Any) -> None:
    with opened(chromium, served, width=390, color_scheme=scheme) as page:
        page.wait_for_selector(card("hostile"))
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        tops = {page.locator(card(run)).bounding_box()["y"] for run in ("story", "deep", "hostile")}
        assert len(tops) == 1
        row = "document.querySelector('[data-testid=gallery]')"
        assert page.evaluate(f"{row}.scrollWidth > {row}.clientWidth")
        page.click(card("hostile"))
        page.wait_for_selector(card("hostile") + "[aria-current]")
        box = page.locator(card("hostile")).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_nothing_serious(chromium: Any, served: Served, width: int, scheme: str) -> None:
    served.use(FakeEngine(synthetic(8, depth=3, top_k=4, total=5, seed=4)))
    with opened(chromium, served, width=width, color_scheme=scheme, reduced_motion="reduce") as page:
        page.wait_for_selector("[data-drawn]")
        assert serious(page) == []
        if width > 600:  # on a phone the tab is in a menu
            page.get_by_role("tab", name="Static against dynamic").click()
            page.wait_for_selector("[data-testid=compare][data-drawn]")
            assert serious(page) == []


def test_both_trees_side_by_side(chromium: Any, served: Served) -> None:
    """The recorded pair opens with the tab; a visitor's own prompt becomes one more pair and stays."""
    engine = served.use(FakeEngine(synthetic(8, depth=3, top_k=4, total=5, seed=4), delay=0.02))
    with opened(chromium, served) as page:
        page.wait_for_selector("[data-drawn]")
        page.get_by_role("tab", name="Static against dynamic").click()
        page.wait_for_selector("[data-testid=compare][data-drawn]")
        assert page.text_content("[data-testid=compare-pair-0]") == "A story"
        page.fill("[data-testid=prompt]", "My own")
        page.click("[data-testid=compare-run]")
        page.wait_for_selector("[data-testid=compare-pair-1][aria-pressed=true]")
        assert page.text_content("[data-testid=compare-prompt]") == engine.trace.prompt_text
        assert [settings.tree for _, settings in engine.prompts] == ["static", "dynamic"]
        page.get_by_role("tab", name="Step by step").click()
        page.get_by_role("tab", name="Static against dynamic").click()
        page.wait_for_timeout(500)
        assert page.is_visible("[data-testid=compare-pair-1][aria-pressed=true]")
        page.fill("[data-testid=prompt]", "fail")
        page.click("[data-testid=compare-run]")
        page.wait_for_function(
            "document.querySelector('[data-testid=compare-status]').textContent === 'The prompt is too long for this model.'"
        )


def test_a_conversation(chromium: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile message, a second turn, Stop, an answer's trees, Clear; on a tiny model, whose text is as bad as any."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    engine = Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head", costs=CPU)
    monkeypatch.setattr(served.actions, "settings", app.make_settings)
    served.use(engine)  # type: ignore[arg-type]
    answer = "[data-testid=chat] [data-role=assistant]"

    def send(page: Any, text: str) -> None:
        page.fill("[data-testid=chat-message]", text)
        page.press("[data-testid=chat-message]", "Enter")

    def rest(page: Any, answers: int) -> None:
        page.wait_for_selector(f"{answer} >> nth={answers - 1}")
        page.wait_for_selector("[data-testid=chat-send]:enabled")
        page.wait_for_selector("[data-testid=chat][aria-busy=false]")

    with opened(chromium, served, reduced_motion="reduce") as page:
        page.get_by_role("tab", name="Chat").click()
        page.fill("[data-testid=chat-system]", "Be brief.")
        send(page, "<img src=x onerror=alert(1)> ${1+1} </s>")
        rest(page, 1)
        talk = next(iter(served.actions.chats._kept.values()))[1]
        assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
        assert page.text_content("[data-testid=chat] .e2-said") == "<img src=x onerror=alert(1)> ${1+1} </s>"
        shown = page.text_content(f"{answer} .e2-said")
        assert shown == "".join(map(theme.plain, talk.messages[-1]["content"]))
        assert page.locator(f"{answer} .e2-token").count() == 24
        assert page.locator("[data-testid=chat-system]").is_disabled()
        assert page.input_value("[data-testid=chat-message]") == ""
        assert serious(page) == []
        first = list(talk.ids)
        commit = Target.commit

        def slow(self: Target, rows: Any) -> None:
            commit(self, rows)
            time.sleep(0.15)

        monkeypatch.setattr(Target, "commit", slow)
        send(page, "And then?")
        page.wait_for_selector(f"{answer} >> nth=1")
        page.click("[data-testid=chat-stop]")
        rest(page, 2)
        page.wait_for_function("document.querySelector('[data-testid=chat-note]').textContent === 'Stopped.'")
        assert talk.ids[: len(first)] == first  # the same conversation, with its caches
        assert 0 < page.locator(f"{answer} >> nth=1").locator(".e2-token").count() < 24
        page.get_by_role("button", name="Show its trees").first.click()
        page.wait_for_selector(card("your-run") + "[aria-current]")
        page.wait_for_selector("[data-drawn]")
        assert page.get_by_role("tab", name="Step by step").get_attribute("aria-selected") == "true"
        assert page.text_content("[data-testid=text-eagle2]") == shown
        page.get_by_role("tab", name="Chat").click()
        assert page.locator(answer).count() == 2
        page.click("[data-testid=chat-clear]")
        page.wait_for_selector("[data-testid=chat-system]:enabled")
        assert page.locator(answer).count() == 0
        assert len(served.actions.chats) == 0
