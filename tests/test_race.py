"""The race: interleaving by own clocks, progress, first difference, stopping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from eagle2.engine import Engine, Settings
from eagle2.race import first_difference, interleave
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model


@dataclass
class Item:
    seconds: float
    name: str = ""


def lane(name: str, seconds: list[float], closed: list[str]) -> Iterator[Item]:
    try:
        for number, value in enumerate(seconds):
            yield Item(value, f"{name}{number}")
    finally:
        closed.append(name)


def test_the_lane_with_the_least_own_time_advances() -> None:
    closed: list[str] = []
    lanes = {"a": lane("a", [1, 1, 1, 1], closed), "b": lane("b", [2.5, 0.4], closed)}
    order = [item.name for _, item in interleave(lanes)]  # type: ignore[attr-defined]
    assert order == ["a0", "b0", "a1", "a2", "b1", "a3"]
    assert sorted(closed) == ["a", "b"]


def test_closing_the_race_closes_the_lanes() -> None:
    closed: list[str] = []
    running = interleave({"a": lane("a", [1] * 9, closed), "b": lane("b", [1] * 9, closed)})
    next(running)
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert sorted(closed) == ["a", "b"]


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([], [], None), ([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [5], 0)],
)
def test_first_difference(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head")


def test_both_lanes_give_generates_ids_and_count_alike(engine: Engine) -> None:
    expected = reference(engine.target.model, engine.encode("hello"), 30)
    updates = list(engine.race("hello", Settings(max_new_tokens=30)))
    last = updates[-1]
    for progress in (last.eagle2, last.autoregressive):
        assert progress.token_ids == expected
        assert len(progress.pieces) == len(progress.origins) == len(expected)
        assert progress.text == engine.tokenizer.decode(expected, skip_special_tokens=True)
    assert last.autoregressive.target_passes == len(expected) - 1
    assert set(last.autoregressive.origins[1:]) == {"plain"}
    assert set(last.eagle2.origins[1:]) <= {"drafted", "bonus", "correction"}
    assert last.tau == pytest.approx((len(expected) - 1) / last.eagle2.target_passes)
    assert last.trace is not None
    assert last.trace.speedup == pytest.approx(last.speedup)


def test_a_stopped_race_is_left_at_the_next_step(engine: Engine) -> None:
    running = engine.race("hello", Settings(max_new_tokens=200))
    for _ in range(5):
        update = next(running)
    running.close()  # type: ignore[attr-defined]
    assert len(update.eagle2.token_ids) < 50
    # Nothing of it is left in the engine: the next race starts anew and gives what it always gives.
    again = list(engine.race("hello", Settings(max_new_tokens=12)))[-1]
    assert again.eagle2.token_ids == reference(engine.target.model, engine.encode("hello"), 12)


def test_a_lane_that_differs_is_reported_with_the_logit_gap(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As rounding would in half precision: the tree pass prefers another token at one position."""
    import eagle2.generate as loop

    expected = reference(engine.target.model, engine.encode("hello"), 20, eos_token_id=None)
    verify = loop.verify
    calls = 0

    def other(tree: Any, logits: Any, sampling: Any, generator: Any, choices: Any = None) -> Any:
        nonlocal calls
        if len(tree) > 1:
            calls += 1
            if calls == 3:
                logits = logits.clone()
                logits[:, expected] -= 100
                choices = None
        return verify(tree, logits, sampling, generator, choices)

    monkeypatch.setattr(loop, "verify", other)
    trace = list(engine.race("hello", Settings(max_new_tokens=20)))[-1].trace
    assert trace is not None
    assert trace.equal is False
    assert trace.autoregressive is not None
    assert trace.difference is not None
    index = trace.difference.index
    assert trace.output_ids[:index] == trace.autoregressive.token_ids[:index]
    assert trace.difference.eagle2_id == trace.output_ids[index]
    assert trace.difference.autoregressive_id == trace.autoregressive.token_ids[index]
    assert trace.difference.logit_gap is not None
    assert trace.difference.logit_gap > 0


def test_sampling_is_repeatable_with_a_seed(engine: Engine) -> None:
    def sample(seed: int) -> list[int]:
        settings = Settings(max_new_tokens=16, temperature=1.0, top_p=0.95, sample_top_k=50, seed=seed)
        return list(engine.race("hello", settings))[-1].eagle2.token_ids

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


@pytest.mark.parametrize(
    "bad",
    [{"max_new_tokens": 0}, {"max_new_tokens": 10**6}, {"seed": -1}, {"temperature": 99}, {"depth": 0}, {"tree": "x"},
     {"top_p": 0}, {"total_tokens": 0}, {"sample_top_k": -2}],
)  # fmt: skip
def test_bad_settings_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        Settings(**bad)


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="empty"):
        engine.race("  \n", Settings())


def test_a_stopped_race_can_still_be_recorded(engine: Engine) -> None:
    running = engine.race("hello", Settings(max_new_tokens=60))
    for _ in range(9):
        update = next(running)
    running.close()  # type: ignore[attr-defined]
    trace = update.snapshot()
    assert trace.finish_reason == "stopped"
    assert list(trace.output_ids) == update.eagle2.token_ids
    assert trace.equal
    assert trace.difference is None
