"""The race's info is compared literally with the golden trace; its figure is merely rendered."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path

import pytest
from visual_helpers import GOLDEN, synthetic

from eagle2.trace import STOPPED, Difference, LaneTrace, Trace
from visual import player, race, theme

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def golden() -> Trace:
    """Prefill 30 ms, steps of 25 and 26 ms with 3 and 2 tokens; the other lane 28 ms, then 18 ms a token."""
    return Trace.load(GOLDEN)


def plain(trace: Trace, tokens: int, finish: str = "eos", **changes: int) -> Trace:
    """The trace with an autoregressive lane of so many tokens; ``changes``: p3=99 puts token 99 at position 3."""
    lane = trace.autoregressive
    assert lane is not None
    ids = list(trace.output_ids) + [0] * 9
    for name, token in changes.items():
        ids[int(name[1:])] = token
    times = tuple(0.018 for _ in range(max(tokens - 1, 0)))
    pieces = tuple(trace.vocabulary.get(i, f"piece {i}") for i in ids[:tokens])
    lane = LaneTrace(tuple(ids[:tokens]), pieces, lane.prefill_seconds, times, finish)
    return dataclasses.replace(trace, autoregressive=lane, difference=None)


def rounded(row: race.LedgerRow) -> tuple[float | None, ...]:
    return tuple(value if value is None else round(value, 6) for value in row)


def test_ledger_of_the_golden_trace(golden: Trace) -> None:
    assert [rounded(row) for row in race.ledger(golden)] == [
        (1, 4, 20, 1, 25, 3, 54, 29, round(0.082 / 0.055, 6)),
        (2, 4, 21, 1, 26, 2, 36, 10, round(0.118 / 0.081, 6)),
    ]
    # The last row ends where the run's own speed-up stands, since both lanes have as many tokens.
    assert race.ledger(golden)[-1].speedup == pytest.approx(golden.speedup)


def test_ledger_where_the_autoregressive_lane_is_missing_or_short(golden: Trace) -> None:
    bare = dataclasses.replace(golden, autoregressive=None)
    assert [row[6:] for row in race.ledger(bare)] == [(None, None, None)] * 2
    rows = race.ledger(plain(golden, 5))
    assert (rounded(rows[0])[6:], rows[1][6:]) == ((54, 29, round(0.082 / 0.055, 6)), (None, None, None))
    assert race.cells(rows[1]) == ("2", "4.0", "21.0", "1.0", "26.0", "2", "–", "–", "–")
    # Exactly long enough for the first step, one too few, and not even a first token.
    assert [race.ledger(plain(golden, count))[0].plain_ms is None for count in (4, 3, 0)] == [False, True, True]


@pytest.mark.parametrize(
    ("saved", "shown"),
    [(29.04, "+29.0 saved"), (-0.3, "−0.3 lost"), (0.04, "0.0 even"), (-0.04, "0.0 even"), (0.06, "+0.1 saved")],
)
def test_what_was_lost_has_a_sign_and_a_word(golden: Trace, saved: float, shown: str) -> None:
    assert race.cells(race.ledger(golden)[0]._replace(saved_ms=saved))[7] == shown


def test_cells(golden: Trace) -> None:
    first = race.cells(race.ledger(golden)[0])
    assert first == ("1", "4.0", "20.0", "1.0", "25.0", "3", "54.0", "+29.0 saved", "1.49×")
    assert len(first) == len(race.HEADS)


def test_ledger_in_words(golden: Trace) -> None:
    def said(trace: Trace) -> str:
        return race.summary(trace, race.ledger(trace))

    assert said(golden) == (
        "2 of 2 steps saved time, 0 lost; in all 39.0 ms saved."
        " The prefill took 2.0 ms longer than the autoregressive lane's."
    )
    lane = golden.autoregressive
    assert lane is not None
    quick = dataclasses.replace(lane, prefill_seconds=0.5, step_seconds=(0.001, 0.011, 0.013, 0.06, 0.06))
    assert said(dataclasses.replace(golden, autoregressive=quick)) == (
        "1 of 2 steps saved time, 0 lost, 1 even; in all 94.0 ms saved."
        " The prefill took 0.47 s shorter than the autoregressive lane's."
    )
    slow = dataclasses.replace(golden, steps=tuple(dataclasses.replace(s, verify_seconds=0.2) for s in golden.steps))
    assert said(slow).startswith("0 of 2 steps saved time, 2 lost; in all 0.32 s lost.")
    assert said(plain(golden, 4)).startswith("1 of 1 step saved time, 0 lost; in all 29.0 ms saved.")
    assert said(plain(golden, 2)) == "The autoregressive lane is too short to compare any step with."
    assert said(dataclasses.replace(golden, autoregressive=None)) == (
        "There is no autoregressive lane to compare the steps with."
    )


def test_the_steps_and_the_prefill_add_up_to_the_lanes() -> None:
    """What the summary says is all of the difference between the lanes' own times: nothing is counted twice or lost."""
    for trace in (synthetic(20), Trace.load(GOLDEN)):
        lane = trace.autoregressive
        assert lane is not None
        saved = sum(row.saved_ms or 0.0 for row in race.ledger(trace)) / 1000
        assert saved - (trace.prefill_seconds - lane.prefill_seconds) == pytest.approx(lane.seconds - trace.seconds)


def test_remarks_say_what_the_ledger_cannot_tell(golden: Trace) -> None:
    def said(trace: Trace) -> str:
        return race.remarks(trace, race.ledger(trace))

    assert said(golden).startswith("Each lane's own clock, measured; drawing is outside of it. Plain ms: ")
    assert "dash" not in said(golden)
    assert "differ" not in said(golden)
    assert "The autoregressive lane has 5 tokens: a dash stands where" in said(plain(golden, 5, STOPPED))
    assert "The texts differ from token 4 on" in said(plain(golden, 6, p3=99))
    modelled = dataclasses.replace(golden, metadata={**golden.metadata, "clock": "modelled"}, autoregressive=None)
    assert said(modelled) == "Each lane's own clock, modelled; drawing is outside of it."


def test_time_split(golden: Trace) -> None:
    parts = [(p.name, round(p.seconds, 6), round(p.share, 4), p.median_ms) for p in race.split(golden)]
    assert parts == [
        ("prefill", 0.03, 0.3704, None), ("draft", 0.008, 0.0988, 4.0), ("verify", 0.041, 0.5062, 20.5),
        ("commit", 0.002, 0.0247, 1.0),
    ]  # fmt: skip
    assert [race.split_words(part) for part in race.split(golden)] == [
        "37 %, 30.0 ms", "10 %, 4.0 ms", "51 %, 20.5 ms", "2 %, 1.0 ms",
    ]  # fmt: skip
    assert race.split_words(race.PartInfo("commit", 0.0001, 0.004, 0.1)) == "<1 %, 0.1 ms"
    assert sum(part.share for part in race.split(synthetic(5))) == pytest.approx(1)


def test_equal_lanes_say_how_they_were_compared(golden: Trace) -> None:
    assert race.difference(golden) == race.DifferenceInfo(
        "equal", None, None, None, None, "All 6 token ids of the two lanes, compared one by one, are equal."
    )
    stopped = race.difference(plain(golden, 4, STOPPED))
    assert (stopped.state, stopped.said) == (
        "equal",
        "The run was stopped; the 4 token ids that both lanes had reached, compared one by one, are equal.",
    )
    assert race.difference(dataclasses.replace(golden, autoregressive=None)).state == "none"


def test_a_difference_is_explained(golden: Trace) -> None:
    other = dataclasses.replace(plain(golden, 6, p3=12), difference=Difference(3, 17, 12, 0.0123))
    found = race.difference(other)
    assert found[:5] == ("differs", 3, "␣stood", "␣old", 0.0123)
    assert found.said == (
        "The lanes differ from token 4 on: EAGLE-2 has “␣stood”, the autoregressive lane “␣old”. The target's logits of"
        " these two are 0.012 apart. Near 0 the rounding of float32 decided, since a pass over a tree adds up in another"
        " order; a wide gap would be a fault."
    )
    # A trace without the recorded difference: found all the same, and the gap is not made up.
    bare = race.difference(dataclasses.replace(other, difference=None))
    assert (bare.at, bare.gap) == (3, None)
    assert bare.said.endswith("The gap of the target's logits there was not recorded.")
    # A recorded gap that belongs to another position is not shown for this one.
    assert race.difference(dataclasses.replace(other, difference=Difference(2, 13, 12, 0.5))).gap is None


def test_a_difference_of_sampled_or_ended_lanes(golden: Trace) -> None:
    warm = {**golden.metadata, "sampling": {"temperature": 0.7}}
    found = race.difference(dataclasses.replace(plain(golden, 6, p1=99), metadata=warm))
    assert (found.state, found.at, found.autoregressive) == ("sampled", 1, "piece␣99")
    assert "That is expected: tokens were drawn at random (temperature 0.7)" in found.said
    ended = race.difference(plain(golden, 4))
    assert (ended.state, ended.at, ended.eagle2, ended.autoregressive) == ("ended", 4, "${1+1}", None)
    assert ended.said == (
        "All 4 token ids up to there are equal, then EAGLE-2 goes on with “${1+1}” where the autoregressive lane ended."
    )
    longer = race.difference(plain(golden, 8))
    assert (longer.at, longer.eagle2) == (6, None)
    assert "then the autoregressive lane goes on with “piece␣0” where EAGLE-2 ended" in longer.said


def test_tokens_of_a_difference_are_made_visible_and_short(golden: Trace) -> None:
    vocabulary = {**golden.vocabulary, 99: "\u202e" + "x" * 60, 17: "\u05d0"}
    found = race.difference(dataclasses.replace(plain(golden, 6, p3=99), vocabulary=vocabulary))
    assert found.autoregressive == "⟨202E⟩" + "x" * 23 + "…"
    assert found.eagle2 == "\u2068\u05d0\u2069"


@pytest.mark.parametrize("metadata", [{"sampling": None}, {"sampling": {"temperature": "hot"}}, {"dtype": "\u202ef"}])
def test_odd_metadata_of_an_uploaded_trace(golden: Trace, metadata: dict[str, object]) -> None:
    odd = dataclasses.replace(
        plain(golden, 6, p3=12), metadata={**golden.metadata, **metadata}, difference=Difference(3, 17, 12, 0.1)
    )
    assert race.difference(odd).state == "differs"
    assert "\u202e" not in json.dumps(race.data(odd), ensure_ascii=False)


def test_outcome_in_words(golden: Trace) -> None:
    assert race.outcome(golden) == (
        "EAGLE-2 finished in 0.08 s, the autoregressive lane in 0.12 s: 1.46×, EAGLE-2 was faster."
    )
    assert race.outcome(plain(golden, 2)) == (
        "EAGLE-2 finished in 0.08 s with 6 tokens, the autoregressive lane in 0.05 s with 2 tokens:"
        " 1.70× in tokens per second, EAGLE-2 was faster."
    )
    slow = dataclasses.replace(golden, prefill_seconds=1.0, finish_reason=STOPPED)
    assert race.outcome(slow) == (
        "EAGLE-2 was stopped at 1.05 s, the autoregressive lane finished in 0.12 s: 0.11×,"
        " the autoregressive lane was faster."
    )
    assert race.outcome(dataclasses.replace(golden, autoregressive=None)) == (
        "EAGLE-2 finished in 0.08 s; there is no autoregressive lane."
    )


def test_position_of_both_lanes(golden: Trace) -> None:
    """As the player marks its lanes: the other lane at the same own clock, and both at their ends after the last step."""
    info = race.info(golden)

    def at(step: int, done: bool) -> list[object]:
        now = race.position(info, step, done=done)
        return [value and (round(value[0], 6), value[1]) for value in now]

    assert at(0, False) == [(0.03, 1), (0.03, 1)]
    assert at(0, True) == at(1, False) == [(0.055, 4), (0.055, 2)]
    assert at(1, True) == [(0.081, 6), (0.118, 6)]
    short = race.info(plain(golden, 2))
    assert race.position(short, 0, done=True).autoregressive == (pytest.approx(0.046), 2)
    assert race.position(race.info(dataclasses.replace(golden, autoregressive=None)), 0, done=True)[1] is None


@pytest.mark.parametrize(
    ("eagle2", "plain", "places"),
    [
        (((1.0, 2.0), (1, 8)), ((1.0, 4.0), (1, 8)), ("above", "right")),  # EAGLE-2 ends first with as many tokens
        (((1.0, 4.0), (1, 8)), ((1.0, 2.0), (1, 8)), ("right", "above")),
        (((1.0, 2.0), (1, 4)), ((1.0, 1.5, 4.0), (1, 6, 8)), ("below", "above")),  # ends first, below the other line
        (((1.0, 2.0), (1, 2)), ((1.0, 1.5, 4.0), (1, 6, 9)), ("right", "above")),  # and so low that the axis is near
        (((1.0, 2.0), (1, 8)), ((1.0, 2.0), (1, 8)), ("above", "right")),
    ],
)
def test_labels_of_the_lines_keep_clear_of_each_other(
    golden: Trace, eagle2: tuple[object, object], plain: tuple[object, object], places: tuple[str, str]
) -> None:
    info = race.info(golden)._replace(
        eagle2=race.LaneInfo(*eagle2, 1.0),  # type: ignore[arg-type]
        autoregressive=race.LaneInfo(*plain, 1.0),  # type: ignore[arg-type]
    )
    assert tuple(end.place for end in race.ends(info)) == places
    boxes = [_box(race.end_label(end, race.ranges(info)[0]), info, 340) for end in race.ends(info)]
    for (l1, t1, r1, b1), (l2, t2, r2, b2) in itertools.combinations(boxes, 2):
        assert not (l1 < r2 and l2 < r1 and t1 < b2 and t2 < b1)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 340
        assert 0 <= top < bottom <= race.HEIGHT


def _box(label: dict[str, object], info: race.RaceInfo, width: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label in a figure of that width, at 6.1 px a character and 14 px a line."""
    margin, (span, most) = race.MARGIN, race.ranges(info)
    x = margin["l"] + float(label["x"]) / span * (width - margin["l"] - margin["r"]) + float(label["xshift"])  # type: ignore[arg-type]
    y = race.HEIGHT - margin["b"] - float(label["y"]) / most * (race.HEIGHT - margin["t"] - margin["b"])  # type: ignore[arg-type]
    y -= float(label["yshift"])  # type: ignore[arg-type]
    lines = str(label["text"]).split("<br>")
    wide, tall = 6.1 * max(map(len, lines)), 14.0 * len(lines)
    left = x - wide if label["xanchor"] == "right" else x
    top = y - {"bottom": tall, "middle": tall / 2, "top": 0.0}[str(label["yanchor"])]
    return left, top, left + wide, top + tall


def test_ends_of_the_golden_trace(golden: Trace) -> None:
    assert [(*end[:2], round(end.seconds, 6), *end[3:]) for end in race.ends(race.info(golden))] == [
        ("eagle2", "EAGLE-2, 0.08 s", 0.081, 6, "above"),
        ("autoregressive", "Autoregressive, 0.12 s", 0.118, 6, "right"),
    ]


@pytest.mark.parametrize("palette", theme.PALETTES.values(), ids=list(theme.PALETTES))
def test_figure_renders(golden: Trace, palette: theme.Palette) -> None:
    info = race.info(golden)
    figure = race.figure(info, palette, race.position(info, 0, done=True))
    json.loads(figure.to_json())
    assert tuple(trace.name for trace in figure.data) == race.LAYERS
    lines = {trace.name: trace for trace in figure.data}
    assert lines["eagle2"].y == (0, 1, 4, 6)
    assert lines["eagle2"].customdata == (None, None, 0, 1)
    assert lines["eagle2"].hovertext[2] == "step 1: 4 tokens at 0.06 s"
    assert lines["autoregressive"].x == pytest.approx((0, 0.028, 0.046, 0.064, 0.082, 0.1, 0.118))
    assert {lines[name].line.dash for name in ("eagle2", "autoregressive")} == {"solid", "2px,3px"}
    assert (lines["now-eagle2"].y, lines["now-autoregressive"].y) == ((4,), (2,))
    assert lines["clock"].x == pytest.approx((0.055, 0.055))
    assert figure.layout.xaxis.title.text == "own time in seconds (measured)"
    assert [label.text for label in figure.layout.annotations] == ["EAGLE-2, 0.08 s", "Autoregressive<br>0.12 s"]


def test_runs_without_steps_tokens_or_a_second_lane(golden: Trace) -> None:
    one = dataclasses.replace(golden, output_ids=(10,), output_pieces=("The",), steps=())
    none = dataclasses.replace(golden, output_ids=(), output_pieces=(), steps=())
    for trace in (one, none, plain(one, 1), plain(none, 0), dataclasses.replace(golden, autoregressive=None)):
        race.figure(race.info(trace)).to_json()
        data = race.data(trace)
        json.dumps(data, allow_nan=False)
        assert len(data["ledger"]) == len(trace.steps)
    assert race.data(plain(none, 0))["ends"] == []
    assert race.data(one)["summary"] == "This run has no steps."
    assert race.spoken(plain(one, 1)) == (
        "Stepped lines of tokens against each lane's own time (measured): EAGLE-2 reached 1 token in 0.03 s,"
        " the autoregressive lane 1 token in 0.03 s."
    )


def test_the_message_carries_the_words_and_cells(golden: Trace) -> None:
    data = player.payload(golden)["race"]
    assert data == race.data(golden)
    assert data["ledger"] == [list(race.cells(row)) for row in race.ledger(golden)]
    assert data["difference"] == {"state": "equal", "at": None, "said": race.difference(golden).said}
    assert data["split"][2] == ["verify", 0.5062, "51 %, 20.5 ms"]
    assert set(race.setup()) == {"templates", "layouts", "heads", "speeds"}
    # A long run's share of the message stays small beside its trees.
    long = synthetic(64)
    assert len(player.to_json(race.data(long))) < 12_000


def test_no_colours_but_the_themes() -> None:
    for name in ("race.css", "race.js", "race.py"):
        text = (ROOT / "visual" / name).read_text(encoding="utf-8")
        assert not re.findall(r"#[0-9a-fA-F]{3,8}\b", text), name
        assert "innerHTML" not in text
