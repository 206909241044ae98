"""Traces: round trip, figures derived from them, and one clear sentence for what is damaged."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle2.engine import Engine, Settings
from eagle2.race import RaceUpdate
from eagle2.trace import MAX_JSON_BYTES, Trace, TraceError
from tests.tiny import byte_tokenizer, tiny_head, tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head")


@pytest.fixture(scope="module")
def trace(engine: Engine) -> Trace:
    updates = list(engine.race("hi", Settings(max_new_tokens=24, depth=4, top_k=3, total_tokens=9)))
    last: RaceUpdate = updates[-1]
    assert last.trace is not None
    assert all(update.trace is None for update in updates[:-1])
    return last.trace


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_round_trip(trace: Trace, tmp_path: Path, name: str) -> None:
    trace.save(tmp_path / name)
    assert Trace.load(tmp_path / name) == trace
    again = tmp_path / f"again-{name}"
    Trace.load(tmp_path / name).save(again)
    assert again.read_bytes() == (tmp_path / name).read_bytes()


def test_derived_figures_agree_with_the_steps(trace: Trace) -> None:
    assert trace.tau == (len(trace.output_ids) - 1) / len(trace.steps)
    assert trace.seconds == pytest.approx(trace.prefill_seconds + sum(s.seconds for s in trace.steps))
    assert trace.tokens_per_second == pytest.approx(24 / trace.seconds)
    assert trace.autoregressive is not None
    assert trace.speedup == pytest.approx(trace.tokens_per_second / trace.autoregressive.tokens_per_second)
    assert trace.equal
    assert trace.difference is None
    assert len(trace.origins) == 24
    assert trace.origins[0] == "prefill"
    index = 1
    for number, step in enumerate(trace.steps):
        for token in step.emitted_ids:
            assert trace.output_ids[index] == token
            assert trace.step_of(index) == number
            index += 1
    assert trace.step_of(0) is None
    assert trace.step_of(24) is None


def test_recorded_probabilities_are_the_targets(engine: Engine, trace: Trace) -> None:
    """Ranks, choices and probabilities of a step, against a plain forward pass over each branch."""
    step = next(s for s in trace.steps if s.kept)
    number = trace.steps.index(step)
    done = 1 + sum(s.emitted for s in trace.steps[:number])
    prefix = [*trace.prompt_ids, *trace.output_ids[: done - 1]]
    for row, node in enumerate((0, *step.kept)):
        branch: list[int] = []
        at = node
        while at >= 0:
            branch.insert(0, step.token_ids[at])
            at = step.parents[at]
        with torch.inference_mode():
            logits = engine.target.model(torch.tensor([prefix + branch])).logits[0, -2:]
        probs = logits.softmax(-1)
        assert step.choice_ids[row] == int(logits[1].argmax())
        assert step.choice_probs[row] == pytest.approx(float(probs[1].max()), rel=1e-3)
        if node:
            assert step.target_probs[row - 1] == pytest.approx(float(probs[0, branch[-1]]), rel=1e-3)
            assert step.target_ranks[row - 1] == int((logits[0] > logits[0, branch[-1]]).sum())


def test_a_recorded_run_without_the_other_lane(engine: Engine) -> None:
    alone = engine.trace("hi", Settings(max_new_tokens=8))
    assert alone.autoregressive is None
    assert alone.speedup is None
    assert alone.equal is None
    assert Trace.from_json(alone.to_json()) == alone


BREAKAGES: list[tuple[str, Any, str]] = [
    ("format", "other", "not an EAGLE-2 trace"),
    ("version", 99, "version 99, newer than this program's 2"),
    ("version", "1", "no version"),
    ("version", 0, "no version"),
    ("output_ids", [1, 2, 3], "one piece per token"),
    ("prefill_seconds", -1, "not negative"),
    ("prefill_seconds", "fast", "prefill_seconds is not of type float"),
    ("steps", {}, "do not add up"),
    ("steps", 3, "damaged"),
    ("metadata", {}, "lacks target"),
    ("metadata", [], "metadata is not an object"),
    ("vocabulary", {}, "vocabulary lacks"),
    ("vocabulary", {"x": "y"}, "damaged"),
    ("surprise", 1, "unknown field 'surprise'"),
    ("prompt_ids", ["a"], "prompt_ids is not a list of int"),
]


@pytest.mark.parametrize(("field", "value", "message"), BREAKAGES)
def test_a_damaged_trace_gives_one_sentence(trace: Trace, field: str, value: Any, message: str) -> None:
    data = json.loads(trace.to_json()) | {field: value}
    with pytest.raises(TraceError, match=message) as caught:
        Trace.from_dict(data)
    assert "\n" not in str(caught.value)


STEP_BREAKAGES: list[tuple[str, Any, str]] = [
    ("parents", lambda s: [0, *s["parents"][1:]], "root"),
    ("parents", lambda s: [-1, *[len(s["parents"])] * (len(s["parents"]) - 1)], "before"),
    ("kept", lambda s: s["kept"][::-1], "before it"),
    ("kept", lambda s: [9999], "distinct drafts"),
    ("accepted", lambda s: [s["kept"][-1]] * 2, "accepted path"),
    ("emitted", lambda s: 77, "emitted"),
    ("next_kind", lambda s: "gift", "bonus"),
    ("confidence", lambda s: [2.0] * len(s["confidence"]), "between 0 and 1"),
    ("log_value", lambda s: s["log_value"][:-1], "one entry per node"),
    ("target_probs", lambda s: [], "one entry per kept"),
    ("token_ids", lambda s: [True] * len(s["token_ids"]), "list of int"),
    ("draft_seconds", lambda s: -0.1, "negative"),
    ("decisions", lambda s: [{"node": 0, "target_prob": 0.5, "draw": None, "accepted": True}], "not kept"),
    ("next_id", lambda s: None, "not of type int"),
]


@pytest.mark.parametrize(("field", "change", "message"), STEP_BREAKAGES)
def test_a_damaged_step_gives_one_sentence(trace: Trace, field: str, change: Any, message: str) -> None:
    data = json.loads(trace.to_json())
    step = next(s for s in data["steps"] if len(s["kept"]) > 1)
    step[field] = change(copy.deepcopy(step))
    with pytest.raises(TraceError, match=message):
        Trace.from_dict(data)


def test_files_that_are_no_traces(tmp_path: Path, trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json.gz"
    for content, message in (
        (b"", "not valid JSON"),
        (b"[1]", "not an EAGLE-2 trace"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b'{"a": NaN}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (gzip.compress(trace.to_json().encode())[:-20], "read|damaged"),
        (b"\x1f\x8bgarbage", "read|damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            Trace.load(path)
    with pytest.raises(TraceError, match="cannot be read"):
        Trace.load(tmp_path / "nowhere.json")
    # A small file that unpacks into a huge one stops at the limit.
    path.write_bytes(gzip.compress(b" " * (MAX_JSON_BYTES + 10)))
    with pytest.raises(TraceError, match="larger than 64 MB"):
        Trace.load(path)
