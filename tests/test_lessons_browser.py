"""Terms, tour and prediction game in a real browser: what they say equals the trace, by keyboard and by pointer."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_a11y_browser import serious
from test_player_browser import PLAYER, opened, settled, state
from test_visual import HOSTILE
from visual_helpers import GOLDEN, exported, synthetic

from eagle2.trace import StepTrace, Trace
from visual import lessons, theme, tree
from visual.player import payload, to_json

pytestmark = pytest.mark.browser
RUNS = {
    "golden": lambda: Trace.load(GOLDEN),
    "default": lambda: synthetic(8, depth=3, top_k=4, total=5, seed=4),
    "paper": lambda: synthetic(4),
    "sampled": lambda: synthetic(6, depth=3, top_k=4, total=5, seed=4, temperature=1.0),
    "hostile": lambda: synthetic(4, depth=2, top_k=3, total=6, words=HOSTILE),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    return exported(tmp_path_factory.mktemp("lessons"), RUNS)


def by(name: str) -> str:
    return f"[data-testid={name}]"


def go(page: Any, step: int, phase: str) -> None:
    page.evaluate(f"window.eagle2.context.go({step}, '{phase}')")
    settled(page)


def box(page: Any, selector: str) -> dict[str, float]:
    return dict(page.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()"))


# ---- the tour ----


def tour_steps(trace: Trace) -> dict[str, int]:
    steps = list(enumerate(trace.steps))
    cut = [i for i, step in steps if len(step.token_ids) - 1 > len(step.kept)] or [i for i, _ in steps]
    drafted = [i for i, step in steps if step.kept] or [i for i, _ in steps]
    return {
        "end": len(steps) - 1,
        "richest": max(cut, key=lambda i: (len(trace.steps[i].accepted), -i)),
        "loss": min(drafted, key=lambda i: (len(trace.steps[i].accepted), i)),
    }


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun == 'pass' else 's'}"


def expected(trace: Trace, number: int) -> list[list[str]]:
    """Per stop, the words with numbers that it must hold for a step."""
    step, lane = trace.steps[number], trace.autoregressive
    assert lane is not None
    values = [math.exp(min(value, 0.0)) for value in step.log_value]
    drafted, kept = len(step.token_ids) - 1, len(step.kept)
    cut = [values[i] for i in range(1, drafted + 1) if i not in step.kept]
    position = tree.root_positions(trace)[number]
    depths = step.depths
    deep = max((i for i in step.kept if depths[i] > 1), key=lambda i: values[i], default=None)
    product = []
    while deep:
        product.insert(0, theme.digits(step.confidence[deep]))
        deep = step.parents[deep]
    layers = tree.passes(step)
    made, plain = len(trace.output_ids) - 1, len(lane.token_ids) - 1
    own = "bonus token" if step.next_kind == "bonus" else "correction token"
    return [
        [
            f"{plural(plain, 'token')} after the first, {plural(plain, 'pass')}.",
            f"{plural(made, 'token')} after the first took {plural(len(trace.steps), 'pass')}",
        ],
        [
            f"proposes {plural(depths.count(1), 'token')} that",
            *([f"{len(layers[-1])} of them in the last"] if len(layers) > 1 else []),
            *([" × ".join(product)] if product else []),
        ],
        [
            f"drafted {plural(drafted, 'token')}",
            *(
                [
                    f"The {plural(kept, 'node')} of highest value in the whole tree stay, {len(cut)} are cut",
                    f"lowest kept value is {theme.digits(min(values[i] for i in step.kept))},"
                    f" the highest cut value {theme.digits(max(cut))}.",
                ]
                if cut
                else ["all of them stay"]
            ),
        ],
        [
            f"become {plural(kept + 1, 'row')} of",
            f"from {position} to {position + max(depths[i] for i in step.kept)}.",
        ],
        [f"{step.target_ranks.count(0)} of {kept} here"],
        [f"{plural(len(step.accepted), 'token')} accepted here", own, f"gives {plural(step.emitted, 'token')} for"],
        [
            f"gives {plural(step.emitted, 'token')}, the target's own"
            if not step.accepted
            else f"the fewest: {plural(len(step.accepted), 'token')} accepted",
            f"took {1000 * step.seconds:.1f} ms",
            f"takes {1000 * sum(lane.step_seconds) / plain:.1f} ms for a token",
        ],
        [f"speed-up: {trace.speedup:.2f}×", f"with {trace.tau:.2f} tokens", "(measured)"],
    ]


@pytest.mark.parametrize(
    ("name", "width", "scheme"),
    [
        ("golden", 390, "dark"), ("default", 1440, "light"), ("paper", 1440, "dark"), ("sampled", 390, "light"),
        ("hostile", 390, "light"),
    ],
)  # fmt: skip
def test_the_tour_by_keyboard_alone(chromium: Any, runs: Any, name: str, width: int, scheme: str) -> None:
    trace, path = runs[name]
    where = tour_steps(trace)
    with opened(chromium, path, width, color_scheme=scheme) as page:
        for _ in range(60):
            page.keyboard.press("Shift+Tab")
            if page.evaluate("document.activeElement.dataset.testid") == "tour-start":
                break
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.dataset.testid") == "tour"
        assert page.get_attribute(by("tour"), "role") == "dialog"
        page.keyboard.press("Tab")  # Back cannot be pressed yet
        assert page.evaluate("document.activeElement.dataset.testid") == "tour-next"
        for number, stop in enumerate(lessons.TOUR):
            page.wait_for_selector(".e2-explained")
            settled(page)
            step = where[stop.step]
            assert (state(page)["step"], state(page)["phase"]) == (str(step), stop.phase), stop.title
            text = page.inner_text(by("tour-text"))
            for words in expected(trace, step)[number]:
                assert words in text, (stop.title, words)
            assert not re.search(r"[{}]|undefined|null|NaN|Infinity", text.replace("${1+1}", ""))
            assert ("With a temperature" in text) == (name == "sampled" and stop.phase == "verify")
            assert page.inner_text(by("tour-progress")) == f"{number + 1} of {len(lessons.TOUR)}"
            assert page.inner_text(".e2-tour-title") == stop.title
            # What is explained has its outline and can be seen beside or above the card.
            assert page.locator(".e2-explained").count() == 1
            assert page.evaluate(
                f"(() => {{ const e = document.querySelector('.e2-explained');"
                f" const t = document.querySelector('{by(stop.target)}');"
                " return e.contains(t); })()"
            )
            card, shown = box(page, by("tour")), box(page, ".e2-explained")
            assert card["left"] >= 0
            assert card["right"] <= width
            assert card["top"] >= 0
            assert card["bottom"] <= 900
            beside = card["left"] >= shown["right"] or card["right"] <= shown["left"]
            assert shown["bottom"] > 0
            assert shown["top"] < (900 if beside else card["top"]), stop.title
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width
            assert page.evaluate("document.activeElement.dataset.testid") == "tour-next"
            page.keyboard.press("Enter")
        assert page.locator(by("tour")).is_hidden()
        assert page.evaluate("document.activeElement.dataset.testid") == "tour-start"
        assert page.locator(".e2-explained").count() == 0
        assert page.evaluate("document.querySelector('.e2').style.paddingBottom") == ""


def test_back_and_escape(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        page.click(by("tour-start"))
        page.click(by("tour-next"))
        page.click(by("tour-next"))
        assert state(page)["phase"] == "rerank"
        page.focus(by("tour-back"))
        page.keyboard.press("Enter")
        assert (state(page)["phase"], page.inner_text(by("tour-progress"))) == ("draft", "2 of 8")
        page.keyboard.press("Enter")
        assert page.is_disabled(by("tour-back"))
        assert page.evaluate("document.activeElement.dataset.testid") == "tour-next"  # not lost with the button
        page.keyboard.press("Enter")
        page.hover(f"{by('terms')} .e2-term >> visible=true")  # a tip is closed first, then the tour
        assert page.locator(by("tip")).is_visible()
        page.keyboard.press("Escape")
        assert page.locator(by("tip")).is_hidden()
        assert page.locator(by("tour")).is_visible()
        page.keyboard.press("Escape")
        assert page.locator(by("tour")).is_hidden()
        assert page.evaluate("document.activeElement.dataset.testid") == "tour-start"
        page.click(by("tour-start"))
        assert page.inner_text(by("tour-progress")) == "1 of 8"
        page.click(by("tour-end"))
        assert page.locator(by("tour")).is_hidden()


def test_the_text_follows_a_person_who_moves_on(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        page.click(by("tour-start"))
        for _ in range(5):
            page.click(by("tour-next"))
        for number in range(len(trace.steps)):
            go(page, number, "accept")
            text = page.inner_text(by("tour-text"))
            for words in expected(trace, number)[5]:
                assert words in text


def test_runs_that_have_less_to_tell(chromium: Any, runs: Any) -> None:
    """Lines without their number are left out: no plain lane, one drafted token, other tokens than the plain lane's."""
    lone = replace(synthetic(1, depth=1, top_k=1, total=1), autoregressive=None)
    rounded = payload(runs["default"][0]) | {"equal": False}
    static = synthetic(2, depth=2, top_k=3, total=12)
    static = replace(static, metadata={**static.metadata, "tree": {**static.metadata["tree"], "kind": "static"}})
    nothing = replace(lone, steps=(), output_ids=lone.output_ids[:1], output_pieces=lone.output_pieces[:1])

    def texts(page: Any, message: dict[str, Any]) -> list[str]:
        page.evaluate(f"window.eagle2.show({to_json(message)})")
        page.click(by("tour-start"))
        found = []
        for _ in lessons.TOUR:
            found.append(page.inner_text(by("tour-text")))
            page.click(by("tour-next"))
        return found

    with opened(chromium, runs["default"][1]) as page:
        alone = texts(page, payload(lone))
        assert all(alone)
        assert not re.search(r"[{}]|undefined|null|NaN|Infinity", " ".join(alone))
        assert "The plain lane does just that" not in alone[0]
        assert "ms" not in alone[6]
        assert "speed-up" not in alone[7]
        assert "The head drafted 1 token, and all of them stay." in alone[2]
        other = texts(page, rounded)
        assert "Here rounding made a difference." in other[5]
        assert "The text is what the target alone would write" not in other[5]
        fixed = texts(page, payload(static))
        assert "fixed shape" in fixed[1]
        assert "most promising" not in fixed[1]
        page.evaluate(f"window.eagle2.show({to_json(payload(nothing))})")
        for name in ("tour-start", "predict"):
            assert page.locator(by(name)).is_hidden()


def test_another_run_ends_the_tour_and_the_game(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    other = to_json(payload(runs["golden"][0]))
    live = to_json(
        {
            "kind": "live", "step": None, "number": 0, "tokens": [], "speedup": None, "tau": None, "equal": None, "same": "",
            "note": "", "lanes": {
                name: {"pieces": [], "origins": "", "seconds": 0.0} for name in ("eagle2", "autoregressive")
            },
        }
    )  # fmt: skip
    run = to_json(payload(trace))
    with opened(chromium, path) as page:
        for message in (other, live, '{"kind": "clear", "note": "", "level": "info"}'):
            page.evaluate(f"window.eagle2.show({run})")
            page.click(by("tour-start"))
            page.click(by("tour-next"))
            page.evaluate(f"window.eagle2.show({message})")
            page.wait_for_selector(by("tour"), state="hidden")
            assert page.locator(".e2-explained").count() == 0
            page.evaluate(f"window.eagle2.show({run})")
            page.click(by("predict"))
            page.evaluate(f"window.eagle2.show({message})")
            page.wait_for_selector(by("predict-panel"), state="hidden")
            assert page.get_attribute(by("predict"), "aria-pressed") == "false"
            assert page.locator(".e2-game, .e2-guessing, .e2-ahead").count() == 0


def test_drafting_is_played_unless_motion_is_reduced(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    last = len(tree.passes(trace.steps[tour_steps(trace)["richest"]])) - 1
    assert last == 2
    for motion in ("reduce", "no-preference"):
        with opened(chromium, path, reduced_motion=motion) as page:
            page.click(by("tour-start"))
            page.click(by("tour-next"))
            assert state(page)["beat"] == str(last if motion == "reduce" else 0)
            page.wait_for_function(
                f"document.querySelector('[data-testid=player]').dataset.beat === '{last}'", timeout=20_000
            )
            assert state(page)["phase"] == "draft"
            assert state(page)["playing"] == "false"


# ---- terms ----


def test_terms_explain_themselves(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    for width, scheme in ((1440, "light"), (390, "dark")):
        with opened(chromium, path, width, color_scheme=scheme) as page:
            page.wait_for_selector(".e2-legend .e2-term")
            seen = set()
            terms = page.locator(".e2-term >> visible=true")
            assert terms.count() > 15
            for term in terms.all():
                term.scroll_into_view_if_needed()
                name = term.get_attribute("data-term")
                seen.add(name)
                term.focus()
                tip = page.locator(by("tip"))
                assert tip.is_visible()
                assert term.get_attribute("aria-describedby") == tip.get_attribute("id")
                entry = lessons.GLOSSARY[name]
                assert tip.text_content() == name + entry.text + lessons.source(entry)
                at = box(page, by("tip"))
                assert at["left"] >= 0
                assert at["right"] <= width
                assert at["top"] >= 0
                assert at["bottom"] <= 900
                own = term.bounding_box()
                assert at["bottom"] <= own["y"] or at["top"] >= own["y"] + own["height"]  # not over the term itself
            assert {
                "target",
                "value",
                "accepted",
                "rejected",
                "draft head",
                "speed-up",
                "tau",
                "autoregressive",
            } <= seen
            page.keyboard.press("Escape")
            assert page.locator(by("tip")).is_hidden()
            assert page.locator("[aria-describedby$=-tip]").count() == 0
            assert page.evaluate("document.scrollingElement.scrollWidth") <= width


def test_terms_by_pointer_and_by_tap(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        page.hover(".e2-legend .e2-term[data-term=rejected]")
        tip = page.locator(by("tip"))
        assert tip.is_visible()
        at = tip.bounding_box()
        page.mouse.move(at["x"] + 20, at["y"] + at["height"] - 4, steps=4)  # into the tip, which stays
        page.wait_for_timeout(350)
        assert tip.is_visible()
        page.mouse.move(5, 5)
        page.wait_for_timeout(350)
        assert tip.is_hidden()
    with opened(chromium, path, 390, has_touch=True) as page:
        page.locator(".e2-legend .e2-term[data-term=rejected]").scroll_into_view_if_needed()
        page.tap(".e2-legend .e2-term[data-term=rejected]")
        assert page.locator(by("tip")).is_visible()
        page.tap(".e2-meaning")
        assert page.locator(by("tip")).is_hidden()


@pytest.mark.parametrize("name", ["golden", "hostile"])
def test_only_fixed_words_become_terms(chromium: Any, runs: Any, name: str) -> None:
    trace, path = runs[name]
    with opened(chromium, path) as page:
        page.wait_for_selector(".e2-legend .e2-term")
        assert page.text_content("[aria-label='Legend of the tree'] li") == "accepted"
        for number in range(len(trace.steps)):
            for phase in tree.PHASES[1:]:
                go(page, number, phase)
                said = tree.sentences(tree.info(trace, number))[phase]
                assert page.text_content(by("phase")) == said
                assert page.inner_text(by("terms")) == "Terms here: " + ", ".join(lessons.PHASE_TERMS[phase])
        inside = (
            "button .e2-term, a .e2-term, summary .e2-term, tbody .e2-term, [aria-live] .e2-term, .e2-text .e2-term"
        )
        assert page.locator(inside).count() == 0
        assert page.locator(f"{by('phase')} *").count() == 0  # read aloud in one piece
        assert page.text_content(by("text-eagle2")) == "".join(map(theme.plain, trace.output_pieces))
        assert page.locator("img").count() == 0


def test_a_focused_term_that_goes_away_leaves_the_focus_in_the_player(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        go(page, 1, "rerank")
        page.focus(f"{by('terms')} .e2-term[data-term='reranking phase']")
        page.keyboard.press("ArrowRight")
        assert state(page)["phase"] == "flatten"
        assert page.evaluate("document.activeElement.dataset.testid") == "player"
        page.keyboard.press("ArrowRight")
        assert state(page)["phase"] == "verify"
        assert page.locator(by("tip")).is_hidden()


def test_the_glossary_lists_all_terms(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        assert page.locator(by("glossary")).evaluate(
            "node => node === document.querySelector('.e2').lastElementChild"
        ) or (page.locator(by("glossary")).evaluate("node => !node.nextElementSibling.getClientRects().length"))
        page.click(f"{by('glossary')} summary")
        names = page.locator(f"{by('glossary')} dt").all_inner_texts()
        assert names == list(lessons.GLOSSARY)
        for name, item in zip(names, page.locator(f"{by('glossary')} dl > div").all(), strict=True):
            entry = lessons.GLOSSARY[name]
            assert item.text_content() == name + entry.text + lessons.source(entry)
            if entry.paper:
                assert item.locator("a").get_attribute("href") == lessons.PAPERS[entry.paper][1]


# ---- the prediction game ----


def accepted_end(step: StepTrace) -> int:
    return step.accepted[-1] if step.accepted else 0


def path_of(step: StepTrace, node: int) -> list[int]:
    path = []
    while node > 0:
        path.insert(0, node)
        node = step.parents[node]
    return path


def result(step: StepTrace, node: int) -> tuple[int, bool]:
    path = path_of(step, node)
    return len(set(path) & set(step.accepted)), tuple(path) == step.accepted


def predicted(page: Any) -> list[int]:
    return list(
        page.evaluate("[...document.querySelectorAll('.e2-plot .point.e2-predicted')].map(p => +p.dataset.node).sort((a, b) => a - b)")
    )  # fmt: skip


def test_predictions_are_scored_once(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    exact = hits = made = 0
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        page.click(by("predict"))
        assert page.get_attribute(by("predict"), "aria-pressed") == "true"
        assert page.is_disabled(by("predict-reveal"))
        for number, step in enumerate(trace.steps):
            right = accepted_end(step)
            others = [0, *step.kept]
            # In turn: right, none, and the last kept node, right or wrong.
            node = (right, 0, others[-1])[number % 3]
            go(page, number, "flatten")
            page.select_option(by("predict-path"), str(node))
            assert predicted(page) == [0, *path_of(step, node)]
            page.click(by("predict-reveal"))
            settled(page)
            assert (state(page)["step"], state(page)["phase"]) == (str(number), "accept")
            got, whole = result(step, node)
            exact, hits, made = exact + whole, hits + got, made + len(step.accepted)
            guess = len(path_of(step, node))
            start = (
                f"You predicted {plural(guess, 'token') if guess else 'none'}, the target accepted"
                f" {len(step.accepted) or 'none'}: "
            )
            end = (f"{got} right, the exact path." if got else "exactly right.") if whole else f"{got} right."
            assert page.inner_text(by("predict-status")) == start + end
            score = f"Exact {exact} of {plural(number + 1, 'step')}, {hits} of {plural(made, 'token')}"
            assert page.inner_text(by("predict-score")) == score
            assert predicted(page) == [0, *path_of(step, node)]  # still to be compared
        assert 0 < exact < len(trace.steps)
        # Back at a step that was scored: nothing can be changed any more.
        go(page, 0, "flatten")
        assert page.is_disabled(by("predict-path"))
        assert page.locator(by("predict-reveal")).is_hidden()
        go(page, 0, "accept")
        assert page.inner_text(by("predict-score")) == score
        page.click(by("predict-reset"))
        assert page.inner_text(by("predict-score")) == "No step scored yet"
        assert (state(page)["step"], state(page)["phase"]) == ("0", "rerank")
        page.click(by("predict"))
        assert page.locator(by("predict-panel")).is_hidden()
        assert predicted(page) == []


def test_a_click_on_a_node_predicts_its_path(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    number = tour_steps(trace)["richest"]
    step = trace.steps[number]
    deep = max(step.kept, key=lambda node: step.depths[node])

    def click(page: Any, node: int) -> None:
        point = page.locator(f".e2-plot .point[data-node='{node}']").bounding_box()
        page.mouse.move(point["x"] + point["width"] / 2, point["y"] + point["height"] / 2)
        page.wait_for_timeout(150)
        page.mouse.down()
        page.mouse.up()

    with opened(chromium, path) as page:
        go(page, number, "rerank")
        page.click(by("predict"))
        page.locator(by("predict-panel")).scroll_into_view_if_needed()
        click(page, deep)
        page.wait_for_function(f"document.querySelector('[data-testid=predict-path]').value === '{deep}'")
        assert predicted(page) == sorted([0, *path_of(step, deep)])
        assert page.locator(".e2-game-path polyline").count() == step.depths[deep]
        assert page.locator(".hoverlayer").first.is_hidden()  # it would tell the verdict
        cut = next(i for i in range(1, len(step.token_ids)) if i not in step.kept)
        click(page, cut)
        page.wait_for_function("document.querySelector('[data-testid=predict-status]').textContent.includes('was cut')")
        assert predicted(page) == sorted([0, *path_of(step, deep)])
        # Other phases, another zoom and colour scheme draw the tree anew.
        go(page, number, "draft")
        go(page, number, "flatten")
        page.click(by("zoom-in"))
        page.evaluate("document.body.classList.add('dark')")
        page.wait_for_function("document.querySelector('.e2').dataset.scheme === 'dark'")
        settled(page)
        page.wait_for_timeout(50)
        assert predicted(page) == sorted([0, *path_of(step, deep)])
        drawn = page.evaluate(
            "(() => { const line = document.querySelector('.e2-game-path polyline').getBoundingClientRect();"
            " const root = document.querySelector('.e2-plot .point[data-node=\"0\"]').getBoundingClientRect();"
            " return Math.abs(line.left - (root.left + root.right) / 2); })()"
        )
        assert drawn < 4  # the dashed line begins at the root, at any zoom
        page.click(by("zoom-reset"))
        settled(page)
        click(page, 0)
        page.wait_for_function("document.querySelector('[data-testid=predict-path]').value === '0'")
        assert page.inner_text(by("predict-status")) == "You predict that nothing is accepted."
        page.click(by("predict-skip"))
        assert page.inner_text(by("predict-status")) == "Skipped: this step does not count."
        assert page.inner_text(by("predict-score")) == "No step scored yet"
        page.click(by("predict"))  # out of the game a click points at a node again
        settled(page)
        click(page, deep)
        page.wait_for_function(f"(eagle2.context.state.pin || {{}}).node === {deep}")


def test_nothing_tells_the_answer_before_it_is_revealed(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    number = next(i for i, step in enumerate(trace.steps) if step.accepted)
    step = trace.steps[number]
    ends = tree.root_positions(trace)[number] - len(trace.prompt_ids) + 1
    shown = (
        "(name) => [...document.querySelectorAll(`[data-testid=text-${name}] .e2-token`)]"
        ".filter(e => getComputedStyle(e).visibility === 'visible').length"
    )
    with opened(chromium, path) as page:
        go(page, number, "draft")
        assert page.evaluate(shown, "eagle2") == len(trace.output_ids)
        page.click(by("predict"))
        for phase in ("draft", "rerank", "flatten"):
            go(page, number, phase)
            assert page.evaluate(shown, "eagle2") == ends
            assert page.evaluate(shown, "autoregressive") <= ends
            for secret in (by("clock"), "details:has([data-testid=node-table])", f".e2-bar:nth-child({number + 1})"):
                assert page.locator(secret).evaluate("node => getComputedStyle(node).visibility") == "hidden", secret
            assert page.locator(by("race-part")).is_hidden()
        page.select_option(by("predict-path"), str(accepted_end(step)))
        page.click(by("predict-reveal"))
        assert page.evaluate(shown, "eagle2") == ends + step.emitted
        assert page.locator(by("clock")).evaluate("node => getComputedStyle(node).visibility") == "visible"
        page.click(by("predict"))
        assert page.evaluate(shown, "eagle2") == len(trace.output_ids)
        assert page.evaluate(shown, "autoregressive") == len(trace.output_ids)
        assert page.locator(by("race-chart")).is_visible()


def test_play_waits_for_the_prediction_and_a_hand_does_not(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    stopped = "document.querySelector('[data-testid=player]').dataset.playing === 'false'"
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        page.click(by("predict"))
        page.select_option(by("speed"), "4")
        page.click(by("play"))
        page.wait_for_function(f"{stopped} && eagle2.context.phase() === 'flatten'", timeout=20_000)
        assert state(page)["step"] == "0"
        page.click(by("predict-skip"))
        page.click(by("play"))
        page.wait_for_function(
            f"{stopped} && eagle2.context.phase() === 'flatten' && eagle2.context.state.step === 1", timeout=20_000
        )
        # By hand, with a path chosen: that counts as revealing.
        page.select_option(by("predict-path"), "0")
        page.focus(PLAYER)
        page.keyboard.press("ArrowRight")
        assert state(page)["phase"] == "verify"
        assert page.inner_text(by("predict-score")).startswith("Exact ")
        assert " of 1 step, " in page.inner_text(by("predict-score"))
        # By hand, without one: the answer was seen, so the step does not count.
        go(page, 2, "flatten")
        page.focus(PLAYER)
        page.keyboard.press("ArrowRight")
        assert "does not count" in page.inner_text(by("predict-status"))
        go(page, 2, "flatten")
        assert page.is_disabled(by("predict-path"))
        assert " of 1 step, " in page.inner_text(by("predict-score"))


def test_the_game_by_keyboard_alone(chromium: Any, runs: Any) -> None:
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        page.keyboard.press("Home")
        page.focus(by("predict"))
        page.keyboard.press("Enter")
        for number in (0, 1):
            go(page, number, "rerank")
            page.focus(by("predict-path"))
            page.keyboard.press("ArrowDown")
            page.keyboard.press("ArrowDown")
            first = trace.steps[number].kept[0]
            page.wait_for_function(f"document.querySelector('[data-testid=predict-path]').value === '{first}'")
            assert state(page)["phase"] == "rerank"  # the arrow keys were the list's
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.dataset.testid") == "predict-reveal"
            page.keyboard.press("Enter")
            assert state(page)["phase"] == "accept"
            assert page.evaluate("document.activeElement.dataset.testid") == "predict-next"
            page.keyboard.press("Enter")
            assert (state(page)["step"], state(page)["phase"]) == (str(number + 1), "rerank")
            assert page.evaluate("document.activeElement.dataset.testid") == "predict-path"
        assert " of 2 steps, " in page.inner_text(by("predict-score"))


@pytest.mark.parametrize("name", ["golden", "hostile"])
def test_hostile_tokens_are_text_in_the_list(chromium: Any, runs: Any, name: str) -> None:
    trace, path = runs[name]
    with opened(chromium, path, 390) as page:
        page.keyboard.press("Home")
        page.click(by("predict"))
        for number, step in enumerate(trace.steps):
            go(page, number, "flatten")
            options = page.evaluate(
                "[...document.querySelector('[data-testid=predict-path]').options].map(o => [o.value, o.textContent])"
            )
            assert [value for value, _ in options] == ["", "0", *map(str, step.kept)]
            for node, (_, text) in zip(step.kept, options[2:], strict=True):
                names = [theme.label(trace.vocabulary[step.token_ids[i]]) for i in path_of(step, node)]
                value = theme.digits(math.exp(step.log_value[node]))
                assert text == " → ".join(map(theme.isolate, names)).replace("\u2068\u2068", "\u2068").replace(
                    "\u2069\u2069", "\u2069"
                ) + (f" (value {value})")
            page.select_option(by("predict-path"), str(step.kept[-1]))
            assert page.locator(f"{by('predict-status')} *").count() == 0
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
        assert page.locator("img").count() == 0


def test_tour_and_game_exclude_each_other(chromium: Any, runs: Any) -> None:
    _, path = runs["default"]
    with opened(chromium, path) as page:
        page.click(by("predict"))
        page.click(by("tour-start"))
        assert page.get_attribute(by("predict"), "aria-pressed") == "false"
        assert page.locator(by("predict-panel")).is_hidden()
        page.click(by("predict"))
        assert page.locator(by("tour")).is_hidden()
        assert page.locator(by("predict-panel")).is_visible()


# ---- all of it ----


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")])
def test_nothing_serious_for_axe(chromium: Any, runs: Any, width: int, scheme: str) -> None:
    _, path = runs["default"]
    # Not `opened`: axe itself fetches nothing, but its script is put into the page.
    with opened(chromium, path, width, color_scheme=scheme) as page:
        page.wait_for_selector(".e2-legend .e2-term")
        page.click(f"{by('glossary')} summary")
        page.click(by("tour-start"))
        page.click(by("tour-next"))
        page.wait_for_selector(".e2-explained")
        page.focus(f"{by('terms')} .e2-term >> visible=true")
        assert page.locator(by("tip")).is_visible()
        assert serious(page) == []
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.click(by("predict"))
        page.select_option(by("predict-path"), index=2)
        assert serious(page) == []
        page.click(by("predict-reveal"))
        assert serious(page) == []


def test_another_step_builds_nothing_anew(chromium: Any, runs: Any) -> None:
    """In the same phase the terms stay as they are, and out of the game its list does."""
    trace, path = runs["default"]
    with opened(chromium, path) as page:
        go(page, 0, "accept")
        page.evaluate(
            "window.changes = 0; new MutationObserver(l => { window.changes += l.length; }).observe("
            f"document.querySelector('{by('terms')}'), {{childList: true, subtree: true, attributes: true}});"
            f"new MutationObserver(l => {{ window.changes += l.length; }}).observe(document.querySelector('{by('predict-panel')}'),"
            "{childList: true, subtree: true, attributes: true})"
        )
        for number in range(1, len(trace.steps)):
            go(page, number, "accept")
        assert page.evaluate("window.changes") == 0
        assert state(page)["step"] == str(len(trace.steps) - 1)
