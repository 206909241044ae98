"""Replay, calibration and evaluation over question files: equal to the full loop, and to counting by hand."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from eagle2.draft import Proposal
from eagle2.engine import Engine, Settings
from eagle2.evaluate import (
    Acceptance,
    Calibration,
    QuestionError,
    WorkerError,
    evaluate,
    evaluate_sets,
    read_question_sets,
    read_questions,
    table,
)  # fmt: skip
from eagle2.generate import Prefill, Step, Stops, generate
from eagle2.replay import Recording, RecordingStore, ReplayTarget, record
from eagle2.target import ContextLengthError, Target, TargetOutput
from eagle2.tree import DraftTree
from eagle2.verify import SamplingParams, Verdict
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model

SMALL = 14  # with so few tokens even an untrained head is often right
GREEDY = SamplingParams()


def prompts_of(count: int, vocab: int = SMALL, seed: int = 0) -> list[list[int]]:
    """Prompts of different lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(3 + 5 * index % 23)] for index in range(count)]


def small_engine(**changes: Any) -> Engine:
    model = tiny_model(vocab_size=SMALL, eos_token_id=None, **changes)
    model.generation_config.eos_token_id = None
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    return Engine(model, tokenizer, tiny_head(model), name="small", head_name="small-head")


def byte_engine(max_position_embeddings: int = 128) -> Engine:
    """An engine that takes text; top level, since worker processes load it."""
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=max_position_embeddings)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head")


def full_loop(engine: Engine, ids: list[int], settings: Settings) -> list[Any]:
    return list(engine.run(ids, settings))


def replayed(engine: Engine, recording: Recording, settings: Settings) -> list[Any]:
    target = ReplayTarget(engine.target.model, recording)
    stops = Stops(settings.max_new_tokens, engine.eos_ids, settings.stop, engine.tokenizer.decode)
    return list(
        generate(
            target, engine.drafter(settings, target), recording.prompt_ids, sampling=GREEDY, stops=stops,
            max_nodes=settings.total_tokens,
        )
    )  # fmt: skip


def summary(items: list[Any]) -> list[Any]:
    """All that acceptance figures come from, step by step."""
    first, *steps = items
    assert isinstance(first, Prefill)
    counts = [
        (step.emitted, min(len(step.verdict.accepted), len(step.emitted)), len(step.proposal.kept), step.finish_reason)
        for step in steps
    ]
    return [(first.token, first.finish_reason), *counts]


TREES = [
    {"depth": 3, "top_k": 4, "total_tokens": 9},
    {"depth": 6, "top_k": 6, "total_tokens": 40},
    {"depth": 1, "top_k": 1, "total_tokens": 1},
    {"tree": "static", "depth": 4, "top_k": 4, "total_tokens": 20},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize("eos", [False, True], ids=["no eos", "eos"])
def test_replay_takes_the_full_loops_steps(tree: dict[str, Any], eos: bool) -> None:
    engine = small_engine()
    prompts = prompts_of(4)
    if eos:  # a token in the middle of a run
        ends = reference(engine.target.model, prompts[1], 30)[13]
        engine.eos_ids = frozenset([ends])
    settings = Settings(max_new_tokens=40, **tree)
    recordings = list(record(engine.target, prompts, max_new_tokens=40, eos_ids=engine.eos_ids))
    accepted = 0
    reasons = set()
    for ids, recording in zip(prompts, recordings):
        loop = full_loop(engine, ids, settings)
        assert summary(replayed(engine, recording, settings)) == summary(loop)
        accepted += sum(len(step.verdict.accepted) for step in loop[1:])
        reasons.add(loop[-1].finish_reason)
    assert accepted > 0, "nothing was accepted: the test shows nothing"
    assert ("eos" in reasons) is eos


def test_a_recording_serves_runs_of_fewer_tokens_and_stop_strings() -> None:
    engine = small_engine()
    (ids,) = prompts_of(1)
    (recording,) = record(engine.target, [ids], max_new_tokens=40, eos_ids=())
    for count in (1, 2, 7, 39):
        settings = Settings(max_new_tokens=count, depth=6, top_k=6, total_tokens=40)
        assert summary(replayed(engine, recording, settings)) == summary(full_loop(engine, ids, settings))
    stop = engine.tokenizer.decode(list(recording.output_ids[9:12]))
    settings = Settings(max_new_tokens=40, depth=6, top_k=6, total_tokens=40, stop=(stop,))
    loop = summary(full_loop(engine, ids, settings))
    assert loop[-1][-1] == "stop"
    assert summary(replayed(engine, recording, settings)) == loop


def test_recordings_equal_generate_and_the_targets_own_features() -> None:
    engine = small_engine()
    prompts = prompts_of(7)
    lengths = []
    eos = reference(engine.target.model, prompts[0], 12)[8]
    for ids, recording in zip(prompts, record(engine.target, prompts, max_new_tokens=25, eos_ids=[eos])):
        expected = reference(engine.target.model, ids, 25, eos_token_id=eos)
        assert list(recording.output_ids) == expected
        assert list(recording.prompt_ids) == ids
        lengths.append(len(expected))
        features = Target(engine.target.model).prefill(recording.token_ids, 64).hidden[:-1]
        torch.testing.assert_close(recording.features, features, atol=1e-5, rtol=1e-4)
    assert len(set(lengths)) > 1, "rows that end early are part of the test"


def test_batches_of_every_size_and_chunked_prompts_record_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine()
    prompts = prompts_of(5)
    together = list(record(engine.target, prompts, max_new_tokens=9, eos_ids=()))
    for name, value in (("BATCH_ROWS", 2), ("BATCH_TOKENS", 40), ("PREFILL_CHUNK", 4)):
        monkeypatch.setattr(f"eagle2.replay.{name}", value)
        apart = list(record(engine.target, prompts, max_new_tokens=9, eos_ids=()))
        assert [r.token_ids for r in apart] == [r.token_ids for r in together]
        for one, other in zip(apart, together):
            torch.testing.assert_close(one.features, other.features, atol=1e-5, rtol=1e-4)


def test_the_model_has_its_attention_back_after_recording() -> None:
    engine = small_engine()
    before = engine.target.config._attn_implementation
    list(record(engine.target, prompts_of(2), max_new_tokens=3, eos_ids=()))
    assert engine.target.config._attn_implementation == before


def test_recording_ends_where_the_context_is_full_as_the_loop_does() -> None:
    engine = small_engine(max_position_embeddings=32)
    prompts = [list(range(10)) * 3, [1, 2, 3], [5] * 31]
    settings = Settings(max_new_tokens=64, depth=4, top_k=4, total_tokens=12)
    for ids, recording in zip(prompts, record(engine.target, prompts, max_new_tokens=64, eos_ids=())):
        loop = full_loop(engine, ids, settings)
        assert loop[-1].finish_reason == "context"
        assert summary(replayed(engine, recording, settings)) == summary(loop)
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        list(record(engine.target, [[1] * 32], max_new_tokens=4, eos_ids=()))


def test_replay_target_gives_recorded_choices_on_the_path_only() -> None:
    model = tiny_model(vocab_size=SMALL)
    recording = Recording((1, 2, 3, 4, 5), 2, torch.arange(4.0)[:, None].expand(4, 32))
    target = ReplayTarget(model, recording)
    prefill = target.prefill([1, 2], 10)
    assert prefill.logits.argmax(-1).tolist() == [3]
    assert prefill.hidden[:, 0].tolist() == [0, 1]
    # root 3; children 4 (on the path) and 9; below 4: 5, the last recorded token; below 9: 5, which is off the path
    tree = DraftTree(torch.tensor([3, 9, 4, 5, 5]), (-1, 0, 0, 2, 1), torch.ones(5), torch.zeros(5))
    output = target.forward(tree)
    assert output.logits.shape == (5, SMALL)
    assert output.hidden[:, 0].tolist() == [2, 0, 3, 0, 0]
    assert [int(row.argmax()) if row.any() else None for row in output.logits] == [4, None, 5, None, None]
    target.commit([0])
    assert target.length == 3
    with pytest.raises(ValueError, match="not the recorded one"):
        target.forward(DraftTree.root_only(7))
    target.forward(DraftTree.root_only(4))
    target.commit([0])
    with pytest.raises(ValueError, match="the recording ends"):
        target.forward(DraftTree.root_only(5))
    with pytest.raises(ValueError, match="another prompt"):
        target.prefill([1, 3], 10)


def test_figures_of_a_replay_equal_the_full_loops() -> None:
    engine = byte_engine()
    settings = Settings(max_new_tokens=20, depth=3, top_k=5, total_tokens=12)
    prompts = ["hello", "x" * 200, "what is it?"]
    replay = evaluate(engine, prompts, settings, progress=False)
    loop = evaluate(engine, prompts, settings, full_loop=True, progress=False)
    assert (replay["method"], loop["method"]) == ("replay", "full loop")
    calibrations = [result.pop("calibration") for result in (replay, loop)]
    for key in set(replay) - {"method", "settings"}:
        assert replay[key] == loop[key], key
    assert replay["skipped"] == 1
    assert replay["prompts"] == 2
    assert replay["tau_by_prompt"][1] is None
    assert calibrations[0]["judged"] == calibrations[1]["judged"] > 0
    assert calibrations[0]["ece"] == pytest.approx(calibrations[1]["ece"], abs=1e-5)


def test_sampling_runs_the_full_loop() -> None:
    result = evaluate(byte_engine(), ["hello"], Settings(max_new_tokens=6, temperature=1.0), progress=False)
    assert result["method"] == "full loop"


def step_of(parents: tuple[int, ...], tokens: list[int], confidence: list[float], kept: tuple[int, ...],
            accepted: tuple[int, ...], emitted: tuple[int, ...]) -> Step:  # fmt: skip
    tree = DraftTree(torch.tensor(tokens), parents, torch.tensor(confidence), torch.zeros(len(parents)))
    verdict = Verdict(accepted, emitted[-1], "correction", ())
    output = TargetOutput(torch.zeros(1), torch.zeros(1))
    return Step(Proposal(tree, kept), output, verdict, emitted, 0, 0, 0, None)


# root 10; its children 11 (0.8), 12 (0.15), 13 (0.05, not kept); of 11: 14 (1.0), 15 (0.3, not kept); of 12: 16 (0.9)
PARENTS, TOKENS = (-1, 0, 0, 0, 1, 1, 2), [10, 11, 12, 13, 14, 15, 16]
CONFIDENCE = [1.0, 0.8, 0.15, 0.05, 1.0, 0.3, 0.9]


def judged(step: Step) -> list[tuple[float, bool]]:
    seen: list[tuple[float, bool]] = []

    class Spy(Calibration):
        def put(self, confidence: float, right: bool) -> None:
            seen.append((round(confidence, 3), right))

    Spy().add(step)
    return seen


def test_calibration_judges_all_expanded_children_of_the_outputs_path() -> None:
    step = step_of(PARENTS, TOKENS, CONFIDENCE, (1, 2, 4), (1,), (11, 15))
    # The target's second token is 15, which the rerank cut had dropped: right all the same.
    assert judged(step) == [(0.8, True), (0.15, False), (0.05, False), (1.0, False), (0.3, True)]


def test_what_comes_after_the_end_of_the_output_is_not_counted() -> None:
    step = step_of(PARENTS, TOKENS, CONFIDENCE, (1, 2, 4), (1, 3), (11,))  # 11 ended the run
    assert judged(step) == [(0.8, True), (0.15, False), (0.05, False)]
    acceptance = Acceptance()
    acceptance.add(step)
    assert (acceptance.tokens, acceptance.accepted, acceptance.at_least) == (1, 1, [1])


def test_reliability_table_and_ece_by_hand() -> None:
    calibration = Calibration()
    for confidence, right in [(0.05, False), (0.0, False), (0.85, True), (0.85, True), (0.85, False), (1.0, True)]:
        calibration.put(confidence, right)
    result = calibration.to_dict()
    assert [row["count"] for row in result["bins"]] == [2, 0, 0, 0, 0, 0, 0, 0, 3, 1]
    assert result["bins"][8]["accepted"] == pytest.approx(2 / 3)
    assert result["bins"][8]["confidence"] == pytest.approx(0.85)
    assert result["bins"][1] == {"low": 0.1, "high": 0.2, "count": 0, "confidence": None, "accepted": None}
    by_hand = (2 * abs(0 - 0.025) + 3 * abs(2 / 3 - 0.85) + 1 * 0) / 6
    assert result["ece"] == pytest.approx(by_hand)
    assert Calibration().ece is None


def test_acceptance_given_the_previous_depth_and_merging() -> None:
    one, other = Acceptance(12, 4, 20, 8, [4, 3, 1]), Acceptance(6, 4, 20, 2, [2])
    assert one.given_previous == [1, 3 / 4, 1 / 3]
    one.merge(other)
    assert one == Acceptance(18, 8, 40, 10, [6, 3, 1])
    assert one.by_depth == [6 / 8, 3 / 8, 1 / 8]


# --- recordings on disk


@pytest.fixture
def store(tmp_path: Path) -> RecordingStore:
    engine = small_engine()
    return RecordingStore(tmp_path / "cache", engine.target, "small", max_new_tokens=8, eos_ids=())


def kept(store: RecordingStore) -> Recording:
    (recording,) = record(store.target, [[1, 2, 3]], max_new_tokens=8, eos_ids=())
    store.save(recording)
    return recording


def test_recordings_come_back_from_disk(store: RecordingStore) -> None:
    recording = kept(store)
    again = store.load([1, 2, 3])
    assert again is not None
    assert again.token_ids == recording.token_ids
    assert torch.equal(again.features, recording.features)
    assert store.load([1, 2, 4]) is None
    assert [path.suffix for path in store.folder.iterdir()] == [".safetensors"]


def test_the_key_holds_all_that_a_recording_depends_on(store: RecordingStore) -> None:
    path = store.path([1, 2, 3])
    target, folder = store.target, store.folder
    make: Callable[..., RecordingStore] = functools.partial(RecordingStore, folder)
    assert make(target, "small", max_new_tokens=8, eos_ids=()).path([1, 2, 3]) == path
    others = [
        make(target, "other", max_new_tokens=8, eos_ids=()),
        make(target, "small", max_new_tokens=9, eos_ids=()),
        make(target, "small", max_new_tokens=8, eos_ids=[3]),
        make(Target(tiny_model(seed=5, vocab_size=SMALL)), "small", max_new_tokens=8, eos_ids=()),
        make(Target(tiny_model(vocab_size=SMALL).to(torch.bfloat16)), "small", max_new_tokens=8, eos_ids=()),
    ]
    assert len({path, *(other.path([1, 2, 3]) for other in others)}) == 6


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(bytes(data))


def replace(path: Path) -> None:
    path.write_text("not a recording")


def foreign(path: Path) -> None:
    save_file({"token_ids": torch.zeros(3)}, path)


def renamed(path: Path) -> None:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    save_file(tensors, path, metadata | {"name": "0" * 32})


@pytest.mark.parametrize("damage", [truncate, flip, replace, foreign, renamed])
def test_damaged_and_foreign_files_are_made_again_with_a_notice(
    damage: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, settings = byte_engine(), Settings(max_new_tokens=6)
    expected = evaluate(engine, ["hello"], settings, cache=tmp_path, progress=False)
    (path,) = tmp_path.iterdir()
    damage(path)
    capsys.readouterr()
    result = evaluate(engine, ["hello"], settings, cache=tmp_path, progress=False)
    assert result["tau_by_prompt"] == expected["tau_by_prompt"]
    notice = capsys.readouterr().err
    assert "notice: " in notice
    assert "made again" in notice
    evaluate(engine, ["hello"], settings, cache=tmp_path, progress=False)
    assert capsys.readouterr().err == ""


def test_a_second_head_runs_no_pass_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, settings = byte_engine(), Settings(max_new_tokens=10, top_k=8, total_tokens=12)
    evaluate(engine, ["hello", "you"], settings, cache=tmp_path, progress=False)
    other = Engine(engine.target.model, engine.tokenizer, tiny_head(engine.target.model, 7), name="tiny", head_name="b")
    expected = evaluate(other, ["hello", "you"], settings, full_loop=True, progress=False)

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pass of the target")

    monkeypatch.setattr(type(engine.target.model.base_model), "forward", forbidden)
    result = evaluate(other, ["hello", "you"], settings, cache=tmp_path, progress=False)
    assert result["tau_by_prompt"] == expected["tau_by_prompt"]


# --- several files, workers, the table


SETS = {"first": ["hello", "how are you?", "q" * 150], "second": ["one", "two", "three words here"]}


def test_sets_have_figures_of_their_own_and_a_mean() -> None:
    settings = Settings(max_new_tokens=12, top_k=6, total_tokens=12)
    result = evaluate_sets(byte_engine, SETS, settings, progress=False)
    assert list(result["sets"]) == ["first", "second"]
    for name, prompts in SETS.items():
        alone = evaluate(byte_engine(), prompts, settings, progress=False)
        assert result["sets"][name]["tau_by_prompt"] == alone["tau_by_prompt"], name
    taus = [entry["tau"] for entry in result["sets"].values()]
    assert result["mean_tau"] == pytest.approx(sum(taus) / 2)
    assert result["skipped"] == 1
    judged_in_all = sum(entry["calibration"]["judged"] for entry in result["sets"].values())
    assert result["calibration"]["judged"] == judged_in_all
    json.dumps(result, allow_nan=False)
    text = table(result)
    assert re.search(r"^first +2 +1 ", text, re.MULTILINE)
    assert f"{result['mean_tau']:.3f}" in text
    for part in ("ECE", "median", "looping", "0.9-1.0", "depth d - 1"):
        assert part in text
    result["sets"]["second"] |= {"acceptance_by_depth": [0.5, 0.125], "acceptance_given_previous": [0.5, 0.25]}
    lines = table(result).splitlines()
    assert lines[0].endswith(">=1    >=2")
    assert lines[2].endswith("0.500  0.125")
    assert next(line for line in lines if re.fullmatch(r"second +0\.500  0\.250", line))


def test_a_set_of_which_nothing_ran_is_no_zero_in_the_mean() -> None:
    sets = {"short": ["hello"], "long": ["q" * 150]}
    result = evaluate_sets(byte_engine, sets, Settings(max_new_tokens=12), progress=False)
    assert result["mean_tau"] == result["sets"]["short"]["tau"] >= 1
    assert result["sets"]["long"]["tau_median"] is None
    table(result)


def broken_engine() -> Engine:
    raise ValueError("the model is\nnot there")


def dying_engine() -> Engine:
    os._exit(3)


def without_calibration_rounding(result: dict[str, Any]) -> dict[str, Any]:
    return {name: {k: v for k, v in entry.items() if k != "calibration"} for name, entry in result["sets"].items()}


@pytest.mark.slow
def test_workers_give_what_one_process_gives() -> None:
    settings = Settings(max_new_tokens=12, top_k=6, total_tokens=12)
    alone = evaluate_sets(byte_engine, SETS, settings, progress=False)
    shared = evaluate_sets(byte_engine, SETS, settings, workers=2, progress=False)
    assert shared["workers"] == 2
    assert shared["settings"]["threads"] == 1
    assert without_calibration_rounding(shared) == without_calibration_rounding(alone)
    assert shared["calibration"]["ece"] == pytest.approx(alone["calibration"]["ece"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "message"), [(broken_engine, "^the model is$"), (dying_engine, "exit code 3")])
def test_a_workers_failure_is_one_sentence_and_leaves_no_process(load: Any, message: str) -> None:
    import multiprocessing

    with pytest.raises(WorkerError, match=message):
        evaluate_sets(load, SETS, Settings(max_new_tokens=4), workers=2, progress=False)
    assert multiprocessing.active_children() == []


def test_an_interrupt_ends_the_workers() -> None:
    import multiprocessing
    import signal

    def interrupt_once_they_run() -> None:
        while len(multiprocessing.active_children()) < 2:  # interrupts are ignored until all have started
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_once_they_run)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        evaluate_sets(sleeping_engine, SETS, Settings(max_new_tokens=4), workers=2, progress=False)
    thread.join()
    assert multiprocessing.active_children() == []


def sleeping_engine() -> Engine:
    time.sleep(120)
    raise AssertionError


def test_question_files_and_folders(tmp_path: Path) -> None:
    def write(path: Path, *turns: str) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
        return path

    b, a = write(tmp_path / "x" / "b.jsonl", "b1", "b2"), write(tmp_path / "x" / "a.jsonl", "a1")
    other = write(tmp_path / "y" / "a.jsonl", "other")
    assert read_question_sets([tmp_path / "x"]) == {"a": ["a1"], "b": ["b1", "b2"]}
    assert read_question_sets([b, tmp_path / "x"], 1) == {"b": ["b1"], "a": ["a1"]}
    assert read_question_sets([a, other]) == {str(a): ["a1"], str(other): ["other"]}
    (tmp_path / "z").mkdir()
    with pytest.raises(QuestionError, match=r"holds no \.jsonl"):
        read_question_sets([tmp_path / "z"])
    with pytest.raises(QuestionError, match="line 2: the first turn is empty"):
        read_questions(write(tmp_path / "blank.jsonl", "fine", "  "))


@pytest.mark.slow
def test_the_embedded_model_replays_as_it_runs(embedded_model: tuple[Any, Any]) -> None:
    from eagle2.head import EagleHead
    from eagle2.models import DEFAULT_PRESET, default_head

    model, tokenizer = embedded_model
    folder = default_head(DEFAULT_PRESET)
    assert folder is not None
    head = EagleHead.load(folder, target_config=model.config)
    engine = Engine(model, tokenizer, head, name=DEFAULT_PRESET, head_name=folder.name)
    settings = Settings(max_new_tokens=24, depth=5, top_k=6, total_tokens=24)
    prompts = [engine.encode(text) for text in ("What is 7 times 8?", "Tell me about the capital of France.")]
    accepted = 0
    for ids, recording in zip(prompts, record(engine.target, prompts, max_new_tokens=24, eos_ids=engine.eos_ids)):
        loop = summary(full_loop(engine, ids, settings))
        assert summary(replayed(engine, recording, settings)) == loop
        accepted += sum(step[1] for step in loop[1:])
    assert accepted > 8
