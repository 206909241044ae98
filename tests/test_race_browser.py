"""The race under the lanes in a real browser: what it shows equals Python's, and it goes with the player."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from visual_helpers import GOLDEN, exported, synthetic

from eagle2.trace import Difference, LaneTrace, Trace
from visual import player, race, theme

pytestmark = pytest.mark.browser
CHART = "document.querySelector('[data-testid=race-chart]')"


def differing() -> Trace:
    """The autoregressive lane has another token at position 4 and ends three tokens early."""
    trace = synthetic(6, depth=3, top_k=4, total=5, seed=4)
    lane = trace.autoregressive
    assert lane is not None
    ids = list(lane.token_ids[:-3])
    ids[4] = (ids[4] + 1) % 60
    pieces = tuple(trace.vocabulary[i] for i in ids)
    other = LaneTrace(tuple(ids), pieces, 0.05, lane.step_seconds[: len(ids) - 1], "length")
    return dataclasses.replace(
        trace, autoregressive=other, difference=Difference(4, trace.output_ids[4], ids[4], 0.0021)
    )


def uneven() -> Trace:
    """Steps of different lengths, some of which lose time."""
    trace = synthetic(24, depth=3, top_k=4, total=5, seed=4)
    rng = random.Random(5)
    steps = tuple(dataclasses.replace(step, verify_seconds=rng.uniform(0.02, 0.09)) for step in trace.steps)
    return dataclasses.replace(trace, steps=steps)


def made_up(trace: Trace, **changes: Any) -> Trace:
    return dataclasses.replace(trace, **changes)


RUNS = {
    "golden": lambda: Trace.load(GOLDEN),
    "uneven": uneven,
    "differing": differing,
    "alone": lambda: made_up(synthetic(3), autoregressive=None),
    "no-steps": lambda: made_up(
        Trace.load(GOLDEN), output_ids=(10,), output_pieces=("The",), steps=(), autoregressive=LaneTrace((10,), ("The",), 0.2, (), "eos")
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    return exported(tmp_path_factory.mktemp("race"), RUNS)


@contextmanager
def opened(browser: Any, path: Path, width: int = 1440, *, chart: bool = True, **options: Any) -> Iterator[Any]:
    """A page on the run; on leaving, nothing may have been logged."""
    options.setdefault("reduced_motion", "reduce")
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = context.new_page()
    bad: list[str] = []
    page.on("console", lambda line: bad.append(line.text))
    page.on("pageerror", lambda error: bad.append(str(error)))
    page.goto(path.as_uri())
    if chart:
        page.wait_for_selector("[data-chart]")
    try:
        yield page
        assert bad == []
    finally:
        context.close()


def go(page: Any, step: int, phase: str = "accept") -> None:
    page.evaluate(f"window.eagle2.context.go({step}, '{phase}')")


def at(page: Any) -> tuple[str, str]:
    data = page.evaluate("document.querySelector('[data-testid=player]').dataset")
    return data["step"], data["phase"]


def meter(page: Any, lane: str) -> str:
    return str(page.text_content(f"[data-testid=meter-{lane}]"))


def measured(tokens: int, seconds: float) -> str:
    return f"{tokens} token{'s' * (tokens != 1)} · {seconds:.2f} s · {tokens / seconds:.1f} tokens/s"


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [("golden", 1440, "light"), ("uneven", 390, "dark"), ("differing", 1440, "dark"), ("alone", 390, "light")],
)
def test_browser_and_python_draw_the_same_chart(chromium: Any, runs: Any, name: str, width: int, scheme: str) -> None:
    trace, path = runs[name]
    info = race.info(trace)
    with opened(chromium, path, width, color_scheme=scheme) as page:
        for number, phase in ((0, "draft"), (0, "accept"), (len(trace.steps) - 1, "accept")):
            go(page, number, phase)
            drawn = page.evaluate(
                f"({{data: {CHART}.data.map(t => ({{name: t.name, x: t.x, y: t.y, line: t.line, hovertext: t.hovertext,"
                " customdata: t.customdata, size: t.marker && t.marker.size, color: t.marker && t.marker.color})),"
                f" x: {CHART}.layout.xaxis, y: {CHART}.layout.yaxis, labels: {CHART}.layout.annotations,"
                f" width: {CHART}.layout.width}})"
            )
            palette = theme.PALETTES[scheme]
            now = race.position(info, number, done=phase == "accept")
            ours = race.figure(info, palette, now, drawn["width"])
            for mine, theirs in zip(ours.data, drawn["data"], strict=True):
                assert mine.name == theirs["name"]
                for key in ("x", "y"):
                    assert theirs[key] == pytest.approx(list(mine[key]), rel=1e-5), (mine.name, key)
                assert theirs["customdata"] == (None if mine.customdata is None else list(mine.customdata))
                for said, wanted in zip(theirs["hovertext"] or (), mine.hovertext or (), strict=True):
                    # Both round to two decimals, and may do so differently at half a hundredth.
                    assert said.rpartition(" at ")[0] == wanted.rpartition(" at ")[0]
                    if said:
                        assert float(said.split()[-2]) == pytest.approx(float(wanted.split()[-2]), abs=0.0101)
                if mine.name == "eagle2":
                    assert theirs["size"] == list(mine.marker.size)
                    assert (theirs["color"], theirs["line"]["dash"]) == (palette.accepted, "solid")
            assert drawn["x"]["range"] == pytest.approx(list(ours.layout.xaxis.range))
            assert drawn["y"]["range"] == pytest.approx(list(ours.layout.yaxis.range))
            assert drawn["x"]["title"]["text"] == ours.layout.xaxis.title.text == "own time in seconds (measured)"
            for label, theirs in zip(ours.layout.annotations, drawn["labels"], strict=True):
                assert (label.text, label.yshift, label.xanchor) == (
                    theirs["text"],
                    theirs["yshift"],
                    theirs["xanchor"],
                )
                assert theirs["font"]["color"] == label.font.color
        assert page.evaluate("document.scrollingElement.scrollWidth") <= width


def test_markers_stand_on_the_lines(chromium: Any, runs: Any) -> None:
    """They lie over the figure: their pixels are compared with where Plotly puts the same numbers."""
    trace, path = runs["uneven"]
    info = race.info(trace)
    with opened(chromium, path) as page:
        for number, phase in ((3, "verify"), (7, "accept"), (23, "accept")):
            go(page, number, phase)
            now = race.position(info, number, done=phase == "accept")
            assert now.autoregressive is not None
            for selector, (seconds, tokens) in ((".e2-race-own", now.eagle2), (".e2-race-other", now.autoregressive)):
                centre, place = page.evaluate(
                    """([selector, seconds, tokens]) => {
                      const box = document.querySelector(selector).getBoundingClientRect();
                      const chart = document.querySelector('[data-testid=race-chart]'), out = chart.getBoundingClientRect();
                      const {xaxis, yaxis} = chart._fullLayout;
                      return [[box.x + box.width / 2, box.y + box.height / 2],
                        [out.x + xaxis._offset + xaxis.d2p(seconds), out.y + yaxis._offset + yaxis.d2p(tokens)]];
                    }""",
                    [selector, seconds, tokens],
                )
                assert centre == pytest.approx(place, abs=1), (number, selector)


def test_labels_and_chart_fit_on_a_phone(chromium: Any, runs: Any) -> None:
    for name in ("golden", "uneven", "differing"):
        with opened(chromium, runs[name][1], 390) as page:
            boxes = page.evaluate(
                "[...document.querySelectorAll('[data-testid=race-chart] .annotation-text')].map(t => t.getBoundingClientRect())"
                ".map(b => [b.left, b.top, b.right, b.bottom])"
            )
            assert len(boxes) == 2
            (l1, t1, r1, b1), (l2, t2, r2, b2) = boxes
            assert not (l1 < r2 and l2 < r1 and t1 < b2 and t2 < b1), name
            outer = page.evaluate(
                "(b => [b.left, b.top, b.right, b.bottom])(document.querySelector('.e2-race-chart').getBoundingClientRect())"
            )
            assert outer[2] <= 390
            for left, top, right, bottom in boxes:
                assert outer[0] <= left < right <= outer[2], name
                assert outer[1] <= top < bottom <= outer[3], name


def test_a_click_on_the_chart_goes_to_the_step_and_pointing_links(chromium: Any, runs: Any) -> None:
    trace, path = runs["uneven"]
    info = race.info(trace)
    with opened(chromium, path) as page:
        page.locator("[data-testid=race-chart]").scroll_into_view_if_needed()
        x, y = page.evaluate(
            f"""([seconds, tokens]) => {{
              const chart = {CHART}, out = chart.getBoundingClientRect(), {{xaxis, yaxis}} = chart._fullLayout;
              return [out.x + xaxis._offset + xaxis.d2p(seconds), out.y + yaxis._offset + yaxis.d2p(tokens)];
            }}""",
            [info.eagle2.seconds[6], info.eagle2.tokens[6]],
        )
        page.mouse.move(x - 2, y + 1)
        page.wait_for_function("document.querySelector('.e2-race-segment').dataset.step === '5'")
        assert page.evaluate("window.eagle2.state.link.step") == 5
        assert page.evaluate("document.querySelectorAll('.e2-bar')[5].classList.contains('e2-linked')")
        page.mouse.move(x, y)
        page.mouse.click(x, y)
        page.wait_for_function("window.eagle2.state.step === 5")
        assert at(page) == ("5", "accept")
        page.mouse.move(5, 5)
        page.wait_for_function("window.eagle2.state.link === null")
        assert page.evaluate("document.querySelector('.e2-race-segment').getAttribute('d')") == ""
        # The other way: something else points at a step.
        page.evaluate("window.eagle2.context.link({step: 2, node: 0})")
        assert page.evaluate("document.querySelector('.e2-race-segment').dataset.step") == "2"


def test_ledger_equals_the_trace(chromium: Any, runs: Any) -> None:
    trace, path = runs["uneven"]
    rows = race.ledger(trace)
    assert {race.cells(row)[7].split()[-1] for row in rows} >= {"saved", "lost"}
    with opened(chromium, path) as page:
        assert page.locator("[data-testid=ledger] tr").count() == 0  # closed: nothing is built
        page.click("[data-testid=ledger-details] summary")
        page.wait_for_selector("[data-testid=ledger] tbody tr:nth-child(24)")
        shown = page.evaluate(
            "[...document.querySelectorAll('[data-testid=ledger] tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
        )
        assert shown == [list(race.cells(row)) for row in rows]
        rng = random.Random(1)
        for _ in range(10):
            i, column = rng.randrange(len(rows)), rng.randrange(len(race.HEADS))
            wanted = rows[i][column]
            assert wanted is not None
            number = shown[i][column].split()[0].replace("−", "-").rstrip("×")
            assert float(number) == pytest.approx(wanted, abs=0.051 if column < 8 else 0.0051)
        assert page.text_content("[data-testid=ledger-summary]") == race.summary(trace, rows)
        words = [race.cells(row)[7].split()[-1] for row in rows]
        assert f"{words.count('saved')} of 24 steps saved time, {words.count('lost')} lost" in race.summary(trace, rows)
        # The current row is marked and in sight, inside its own box; a step's number goes there.
        top = page.evaluate("scrollY")
        for number in (0, 23, 11):
            go(page, number)
            assert page.locator("[data-testid=ledger] [aria-current]").count() == 1
            assert page.get_attribute("[data-testid=ledger] [aria-current]", "data-step") == str(number)
            assert page.evaluate(
                """() => {
                  const box = document.querySelector('.e2-ledger-box').getBoundingClientRect();
                  const row = document.querySelector('[data-testid=ledger] [aria-current]').getBoundingClientRect();
                  const head = document.querySelector('[data-testid=ledger] thead').getBoundingClientRect();
                  return row.top >= box.top + head.height - 1 && row.bottom <= box.bottom + 1;
                }"""
            )
        assert page.evaluate("scrollY") == top
        page.get_by_role("button", name="Go to step 4", exact=True).press("Enter")
        assert at(page) == ("3", "accept")
        assert page.evaluate("document.activeElement.textContent") == "4"


@pytest.mark.parametrize(("motion", "start"), [("no-preference", 1), ("reduce", 0)])
def test_replay_runs_to_the_final_state(chromium: Any, runs: Any, motion: str, start: int) -> None:
    trace, path = runs["golden"]
    lane = trace.autoregressive
    assert lane is not None
    with opened(chromium, path, reduced_motion=motion) as page:
        go(page, start)
        page.select_option("[data-testid=replay-speed]", "0.125")
        # Every state that a lane passes through: text appears as the recorded steps gave it, several tokens at once.
        page.evaluate(
            """() => {
              window.seen = [];
              new MutationObserver(() => {
                const count = id => document.querySelectorAll(`[data-testid=text-${id}] .e2-token:not(.e2-future)`).length;
                const now = [count('eagle2'), count('autoregressive')].join();
                if (now !== window.seen.at(-1)) window.seen.push(now);
              }).observe(document.querySelector('.e2-lanes'), {subtree: true, attributes: true, childList: true, characterData: true});
            }"""
        )
        page.click("[data-testid=replay]")
        page.wait_for_function("document.querySelector('[data-testid=race-part]').dataset.replaying === 'false'")
        assert page.text_content("[data-testid=replay-status]") == race.outcome(trace)
        assert page.text_content("[data-testid=replay]") == "Replay the race"
        assert at(page) == ("1", "accept")
        assert page.locator(".e2-lanes .e2-future").count() == 0
        assert meter(page, "eagle2") == measured(6, trace.seconds)
        assert meter(page, "autoregressive") == measured(6, lane.seconds)
        seen = [tuple(map(int, pair.split(","))) for pair in page.evaluate("window.seen")]
        assert {pair[0] for pair in seen} <= {0, 1, 4, 6}
        assert seen[-1] == (6, 6)
        assert any(own + other < 12 for own, other in seen)


def test_replay_stops_when_the_player_moves(chromium: Any, runs: Any) -> None:
    trace, path = runs["uneven"]
    info = race.info(trace)
    playing = "document.querySelector('[data-testid=race-part]').dataset.replaying"
    with opened(chromium, path) as page:
        page.select_option("[data-testid=replay-speed]", "0.125")

        def start() -> None:
            go(page, 9)
            page.click("[data-testid=replay]")
            assert page.evaluate(playing) == "true"
            assert page.text_content("[data-testid=replay]") == "Stop the replay"
            page.wait_for_function(
                "document.querySelector('[data-testid=meter-eagle2]').textContent.startsWith('0 tokens')"
            )

        def marked(step: int) -> bool:
            now = race.position(info, step, done=True)
            assert now.autoregressive is not None
            return (
                page.evaluate(playing) == "false"
                and meter(page, "eagle2") == measured(now.eagle2[1], now.eagle2[0])
                and meter(page, "autoregressive") == measured(now.autoregressive[1], now.autoregressive[0])
                and page.evaluate(f"{CHART}.data.slice(-2).map(t => t.y[0])") == [now.autoregressive[1], now.eagle2[1]]
            )

        start()
        page.click("[data-testid=replay]")  # Stop: the player's own marking comes back
        assert marked(9)
        start()
        page.click("[data-testid=next-step]")
        assert at(page)[0] == "10"
        assert marked(10)
        start()
        page.click("[data-testid=play]")
        assert page.evaluate(playing) == "false"
        page.click("[data-testid=play]")
        # A redraw of the same step is no move.
        start()
        page.set_viewport_size({"width": 1200, "height": 900})
        page.wait_for_function(f"{CHART}.layout.width < 900")
        assert page.evaluate(playing) == "true"
        # Nor does a replay keep on when another state is shown.
        page.evaluate("window.eagle2.show(Object.assign({}, window.eagle2.state.message))")
        assert page.evaluate(playing) == "false"


def test_a_difference_is_told_and_marked(chromium: Any, runs: Any) -> None:
    trace, path = runs["differing"]
    found = race.difference(trace)
    marked = "[...document.querySelectorAll('.e2-differs')].map(s => [s.dataset.i, s.title])"
    with opened(chromium, path) as page:
        assert page.text_content("[data-testid=difference]") == found.said
        assert found.at == 4
        assert "logits of these two are 0.0021 apart" in found.said
        assert page.evaluate(marked) == [["4", "First token in which the lanes differ"]] * 2
        page.click("[data-testid=ledger-details] summary")
        page.wait_for_selector("[data-testid=ledger] tbody tr:nth-child(6)")
        last = page.locator("[data-testid=ledger] tbody tr").last.locator("td").all_inner_texts()
        assert last[-3:] == ["–", "–", "–"]
        assert "a dash stands where a step goes beyond them" in page.text_content("[data-testid=ledger-details]")
        # Another run in the same page: no mark is left over.
        page.evaluate(f"window.eagle2.show({player.to_json(player.payload(runs['uneven'][0]))})")
        assert page.evaluate(marked) == []
        assert page.get_attribute("[data-testid=difference]", "data-state") == "equal"


def test_a_live_state_shows_no_stale_race(chromium: Any, runs: Any) -> None:
    trace, path = runs["golden"]
    lane = {"pieces": ["The"], "origins": "f", "seconds": 0.03}
    live = {
        "kind": "live", "step": None, "number": 0, "tokens": [], "lanes": {"eagle2": lane, "autoregressive": lane},
        "speedup": None, "tau": None, "equal": None, "same": "", "note": "",
    }  # fmt: skip
    with opened(chromium, path) as page:
        page.click("[data-testid=replay]")
        page.evaluate(f"window.eagle2.show({player.to_json(live)})")
        assert not page.is_visible("[data-testid=race-part]")
        assert meter(page, "eagle2").startswith("1 token · 0.03 s")
        page.wait_for_timeout(200)
        assert meter(page, "eagle2").startswith("1 token · 0.03 s")
        page.evaluate(f"window.eagle2.show({player.to_json(player.payload(trace))})")
        assert page.is_visible("[data-testid=race-chart]")


def test_runs_without_steps_or_without_the_other_lane(chromium: Any, runs: Any) -> None:
    trace, path = runs["alone"]
    with opened(chromium, path) as page:
        page.select_option("[data-testid=replay-speed]", "2")
        page.click("[data-testid=replay]")
        page.wait_for_function("document.querySelector('[data-testid=replay-status]').textContent.includes('finished')")
        assert page.text_content("[data-testid=replay-status]") == race.outcome(trace)
        assert page.text_content("[data-testid=difference]") == "There is no autoregressive lane to compare with."
    trace, path = runs["no-steps"]
    with opened(chromium, path) as page:
        assert not page.is_visible("[data-testid=ledger-details]")
        page.click("[data-testid=replay]")
        page.wait_for_function("document.querySelector('[data-testid=replay-status]').textContent.includes('finished')")
        assert meter(page, "autoregressive") == measured(1, 0.2)
        assert page.locator(".e2-lanes .e2-future").count() == 0


def test_the_chart_follows_the_colour_scheme_and_folding(chromium: Any, runs: Any) -> None:
    _, path = runs["golden"]
    color = f"{CHART}.data.find(t => t.name === 'eagle2').line.color"
    with opened(chromium, path) as page:
        assert page.evaluate(color) == theme.LIGHT.accepted
        page.evaluate("document.body.classList.add('dark')")
        page.wait_for_function(f"{color} === '{theme.DARK.accepted}'")
        # Folded, another run comes: nothing is drawn, but a saved picture would be of the new run.
        page.click("[data-testid=race-more] > summary")
        assert not page.is_visible("[data-testid=race-chart]")
        other = runs["uneven"][0]
        page.evaluate(f"window.eagle2.show({player.to_json(player.payload(other))})")
        count = f"{CHART}.data.find(t => t.name === 'eagle2').x.length"
        assert page.evaluate(count) == len(other.steps) + 2
        before = page.get_attribute("[data-testid=race-chart]", "data-chart")
        page.click("[data-testid=race-more] > summary")
        page.wait_for_function(f"{CHART}.querySelectorAll('.tracee2race-eagle2 .point').length >= {len(other.steps)}")
        assert page.get_attribute("[data-testid=race-chart]", "data-chart") == before
        assert page.get_attribute("[data-testid=race-chart]", "aria-label") == race.spoken(other)
        with page.expect_download() as saved:
            page.click("[data-testid=save]")
            page.click("[data-testid=save-race-chart-svg]")
        drawing = Path(saved.value.path()).read_text(encoding="utf-8")
        assert "own time in seconds (measured)" in drawing
        assert "Autoregressive" in drawing


def test_time_split_in_words(chromium: Any, runs: Any) -> None:
    trace, path = runs["uneven"]
    with opened(chromium, path) as page:
        parts = race.split(trace)
        shown = page.locator("[data-testid=time-split] li").all_inner_texts()
        assert [" ".join(text.split()) for text in shown] == [f"{part.name} {race.split_words(part)}" for part in parts]
        widths = page.evaluate(
            "[...document.querySelectorAll('.e2-split-bar span')].map(s => s.getBoundingClientRect().width)"
        )
        for width, part in zip(widths, parts, strict=True):
            assert width / sum(widths) == pytest.approx(part.share, abs=0.02)
