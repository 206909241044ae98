"""Automatic trees in the loop: the output never depends on the costs; and measuring and keeping costs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle2 import calibrate as calibrate_module
from eagle2 import native
from eagle2.__main__ import main
from eagle2.calibrate import ROWS, Measured, calibrate, calibrated, machine_key, rising
from eagle2.cost import CostModel
from eagle2.eagle import AUTO_DEPTH, AUTO_TOTAL, EagleDrafter, TreeSettings
from eagle2.engine import Engine, Settings
from eagle2.evaluate import evaluate
from eagle2.generate import Step, Stops, generate
from eagle2.lean import LeanHead
from eagle2.target import Target
from eagle2.trace import Trace
from eagle2.verify import SamplingParams
from tests.test_cost import CPU, DEAR, FREE
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model

PROMPTS = [[5, 9, 41, 33, 8, 20], [1, 77], [60] * 9]
AUTO = Settings(max_new_tokens=30, depth="auto", total_tokens="auto")
ODD = {
    "as measured": CPU,
    "free": FREE,
    "dear": DEAR,
    "rows free, drafts not": CostModel((1, 64), (1.0, 1.0), (1,), (0.3,)),
    "drafts free, rows not": CostModel((1, 2), (1.0, 1.4), (1,), (0.0,)),
    "steps": CostModel((1, 4, 5, 8, 9), (1.0, 1.0, 1.5, 1.5, 9.0), (1, 2), (0.01, 0.2)),
}  # fmt: skip


def drafted(model: Any, settings: TreeSettings, costs: CostModel, prompt: list[int], count: int = 40) -> list[Any]:
    target = Target(model)
    drafter = EagleDrafter(tiny_head(model), target, settings, costs=costs)
    return list(
        generate(
            target, drafter, prompt, sampling=SamplingParams(), stops=Stops(count), max_nodes=settings.total_limit
        )
    )  # fmt: skip


@pytest.fixture
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head", costs=CPU)


@pytest.mark.parametrize(
    "settings",
    [TreeSettings("dynamic", "auto", 4, "auto"), TreeSettings("dynamic", "auto", 3, 7), TreeSettings("dynamic", 4, 3, "auto")],
)  # fmt: skip
@pytest.mark.parametrize("costs", ODD.values(), ids=ODD)
def test_greedy_ids_equal_hugging_faces_whatever_passes_cost(costs: CostModel, settings: TreeSettings) -> None:
    model = tiny_model()
    for prompt in PROMPTS:
        first, *steps = drafted(model, settings, costs, prompt)
        ids = [first.token, *itertools.chain(*(step.emitted for step in steps))]
        assert ids == reference(model, prompt, 40, eos_token_id=None)
        for step in steps:
            assert len(step.proposal.kept) <= settings.total_limit
            assert max(step.proposal.expanded.depths) <= settings.depth_limit


def trees(items: list[Any]) -> list[Any]:
    return [
        (step.proposal.expanded.token_ids.tolist(), step.proposal.expanded.parents, step.proposal.kept)
        for step in items[1:]
    ]


def test_the_same_costs_and_prompt_give_the_same_trees() -> None:
    model, settings = tiny_model(), TreeSettings("dynamic", "auto", 4, "auto")
    once = trees(drafted(model, settings, CPU, PROMPTS[0]))
    assert once == trees(drafted(model, settings, CPU, PROMPTS[0]))
    assert once != trees(drafted(model, settings, ODD["steps"], PROMPTS[0]))
    # A drafter that is used again begins anew.
    target = Target(model)
    drafter = EagleDrafter(tiny_head(model), target, settings, costs=CPU)
    for _ in range(2):
        items = list(
            generate(target, drafter, PROMPTS[0], sampling=SamplingParams(), stops=Stops(40), max_nodes=AUTO_TOTAL)
        )
        assert trees(items) == once


def test_free_passes_draft_to_the_limits_and_dear_ones_not_at_all() -> None:
    model, settings = tiny_model(), TreeSettings("dynamic", "auto", 4, "auto")
    free = drafted(model, settings, FREE, PROMPTS[0])[1]
    assert len(free.proposal.kept) == AUTO_TOTAL
    # Deeper than any chain that it could hope for: it ends where the sum of the values no longer grows in a float.
    assert 4 <= max(free.proposal.expanded.depths) <= AUTO_DEPTH
    assert all(len(step.proposal.expanded) == 1 for step in drafted(model, settings, DEAR, PROMPTS[0])[1:])


def test_a_useless_head_is_paused_and_its_features_wait() -> None:
    """Then the probe's catch-up takes many rows; its tree must be the one of a head that saw them one by one."""
    model, count = tiny_model(), 60
    settings = TreeSettings("dynamic", "auto", 3, "auto")
    # Two tokens at best for what two plain steps take: never worth it, unless everything is accepted.
    costs = CostModel((1, 2, 64), (1.0, 1.0, 1.0), (1,), (0.45,))
    steps = [item for item in drafted(model, settings, costs, PROMPTS[0], count) if isinstance(item, Step)]
    sizes = [len(step.proposal.expanded) - 1 for step in steps]
    assert 0 in sizes[:-1]
    probe = next(at for at in range(sizes.index(0), len(sizes)) if sizes[at])
    assert probe - sizes.index(0) >= 4
    assert max(sizes) > 0
    # The same position with a drafter that never pauses.
    target = Target(model)
    always = EagleDrafter(tiny_head(model), target, TreeSettings("dynamic", 1, 3, 3))
    at = sum(len(step.emitted) for step in steps[:probe])
    compared = 0
    done = 0
    for item in generate(target, always, PROMPTS[0], sampling=SamplingParams(), stops=Stops(count)):
        if isinstance(item, Step):
            if done == at:
                ours, theirs = steps[probe].proposal.expanded, item.proposal.expanded
                assert ours.token_ids[:4].tolist() == theirs.token_ids[:4].tolist()
                torch.testing.assert_close(ours.confidence[:4], theirs.confidence[:4], rtol=1e-4, atol=1e-6)
                compared += 1
            done += len(item.emitted)
    assert compared == 1


def test_the_cut_is_the_best_one_of_the_recorded_values(engine: Engine) -> None:
    """What the viewer draws: from the values and the metadata's costs alone."""
    from eagle2.cost import best_cut

    trace = Trace.from_json(engine.trace("hello", AUTO).to_json())
    tree = {"kind": "dynamic", "depth": "auto", "top_k": 4, "total_tokens": "auto", "lookup": True}
    assert trace.metadata["tree"] == tree
    costs = CostModel.from_dict(trace.metadata["costs"])
    assert costs == CPU
    checked = 0
    caught_up = len(trace.prompt_ids)
    for step in trace.steps:
        if len(step.copied) < len(step.token_ids) - 1:  # else the head was not asked
            values = sorted((2.718281828459045**value for value in step.log_value[1:]), reverse=True)
            spent = costs.draft(min(caught_up, AUTO_DEPTH + 1)) + sum(costs.draft(len(fed)) for fed in step.selected)
            assert len(step.kept) == best_cut(values, spent, costs, AUTO_TOTAL)
            checked += 1
            caught_up = 0
        caught_up += 1 + len(step.accepted)
    assert checked >= 4


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"depth": "deep"}, "depth must be a whole number or auto, not 'deep'"),
        ({"total_tokens": "many"}, "total_tokens must be a whole number or auto"),
        ({"total_tokens": 2.5}, "total_tokens must be a whole number"),
        ({"top_k": "auto"}, "top_k must be a whole number, not 'auto'"),
        ({"depth": "auto", "tree": "static"}, "static tree has a fixed size"),
        ({"total_tokens": "auto", "tree": "static"}, "static tree has a fixed size"),
    ],
)
def test_bad_sizes_are_one_sentence(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**bad)


def test_an_automatic_tree_needs_costs() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="needs a cost model"):
        EagleDrafter(tiny_head(model), Target(model), TreeSettings("dynamic", "auto"))
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    engine = Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="t", costs=None)
    with pytest.raises(ValueError, match="loaded without one"):
        engine.run([5, 6], AUTO)
    assert "costs" not in engine.metadata(Settings())
    with pytest.raises(ValueError, match="costs must be"):
        Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="t", costs="cheap")  # type: ignore[arg-type]


def test_evaluation_takes_automatic_trees(engine: Engine) -> None:
    replayed = evaluate(engine, ["hello", "you"], AUTO, progress=False)
    looped = evaluate(engine, ["hello", "you"], AUTO, progress=False, full_loop=True)
    assert replayed["tau_by_prompt"] == looped["tau_by_prompt"]
    assert replayed["settings"]["costs"] == CPU.to_dict()


@pytest.mark.parametrize("option", [[], ["--calibrate"]])
def test_command_line(
    option: list[str],
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[Any] = []

    def load(cls: Any, *args: Any, **options: Any) -> Engine:
        asked.append(options["costs"])
        return engine

    monkeypatch.setattr(Engine, "load", classmethod(load))
    sizes = ["--depth", "auto", "--total-tokens", "auto", "--max-new-tokens", "20", *option]
    assert main(["race", "hello", *sizes]) == 0
    out = capsys.readouterr().out
    for part in ("same tokens: yes", "dynamic tree auto/4/auto", "automatic tree: on average"):
        assert part in out
    assert main(["race", "hello", *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["costs"]["format"] == "eagle2-costs"
    assert asked == ["measure" if option else "auto"] * 2


def test_a_word_other_than_auto_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["race", "x", "--depth", "deep"])
    assert caught.value.code == 2
    assert "argument --depth: must be a whole number or auto, not 'deep'" in capsys.readouterr().err


# --- measuring --------------------------------------------------------------------------------------------------------


def test_seconds_in_the_wrong_order_are_averaged() -> None:
    assert rising([1.0, 2.0, 3.0]) == (1, 2, 3)
    assert rising([1.0, 4.0, 2.0, 5.0]) == (1, 3, 3, 5)
    assert rising([3.0, 2.0, 1.0]) == (2, 2, 2)
    assert rising([]) == ()


class Clock:
    """Each reading is ``seconds`` after the last."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.at = seconds, 0.0

    def __call__(self) -> float:
        self.at += self.seconds
        return self.at


def test_a_measurement_touches_no_run_and_has_all_points() -> None:
    model = tiny_model()
    target = Target(model)
    target.prefill([5, 6, 7], 20)
    costs = calibrate(target, tiny_head(model), clock=Clock(0.001)).costs
    assert target.length == 3
    assert (costs.verify_rows, costs.draft_rows) == ROWS[0]
    assert set(costs.verify_seconds) == {0.001}  # rounded to what a clock can tell
    # Under this clock a deep draft takes as long as a shallow one.
    assert costs.draft_seconds == pytest.approx([0.0] * 6, abs=1e-12)
    assert costs.overhead == 0.001


def test_slow_models_are_measured_at_fewer_points() -> None:
    model = tiny_model()
    points = []
    for seconds in (0.01, 0.06, 0.2, 5.0):
        costs = calibrate(Target(model), tiny_head(model), clock=Clock(seconds)).costs
        points.append(len(costs.verify_rows))
    assert points == sorted(points, reverse=True)
    assert points[0] == len(ROWS[0][0])
    assert points[-1] == 2


def test_a_small_vocabulary_bounds_the_rows_of_a_draft() -> None:
    model = tiny_model()
    head = tiny_head(model).with_draft_tokens(torch.tensor([3, 4, 5]))
    costs = calibrate(Target(model), head, clock=Clock(0.001)).costs
    assert costs.draft_rows == (1, 2)


def test_the_real_clock_gives_a_usable_model(engine: Engine) -> None:
    costs = calibrate(engine.target, engine.head, budget=0.2).costs
    assert costs.verify(1) > 0
    assert costs.draft(4) >= 0


# --- the cache --------------------------------------------------------------------------------------------------------


class Measure:
    def __init__(self, costs: CostModel = CPU, steady: bool = True) -> None:
        self.measured, self.calls = Measured(costs, steady), 0

    def __call__(self) -> Measured:
        self.calls += 1
        return self.measured


def test_costs_are_measured_once_for_each_key(tmp_path: Path) -> None:
    measure = Measure()
    for key in ({"model": "a"}, {"model": "a"}, {"model": "b"}, {"model": "a"}):
        assert calibrated(key, measure, folder=tmp_path / "new") == CPU
    assert measure.calls == 2
    again = Measure(FREE)
    assert calibrated({"model": "a"}, again, folder=tmp_path / "new", force=True) == FREE
    assert calibrated({"model": "a"}, again, folder=tmp_path / "new") == FREE
    assert again.calls == 1
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("kind", ["empty", "no JSON", "a list", "other version", "other key", "bad costs", "deep"])
def test_a_damaged_or_foreign_file_is_measured_again(kind: str, tmp_path: Path) -> None:
    key = {"model": "a", "threads": 2}
    calibrated(key, Measure(), folder=tmp_path)
    (path,) = tmp_path.glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(
        {
            "empty": "",
            "no JSON": path.read_text()[:-9],
            "a list": "[]",
            "other version": json.dumps(data | {"version": 99}),
            "other key": json.dumps(data | {"key": key | {"threads": 4}}),
            "bad costs": json.dumps(data | {"costs": data["costs"] | {"verify": [[1, -2.0]]}}),
            "deep": "[" * 100_000,
        }[kind]
    )
    measure = Measure(FREE)
    assert calibrated(key, measure, folder=tmp_path) == FREE
    assert calibrated(key, measure, folder=tmp_path) == FREE
    assert measure.calls == 1


def test_what_a_busy_machine_gave_is_used_but_not_kept(tmp_path: Path) -> None:
    key = {"model": "a"}
    calibrated(key, Measure(), folder=tmp_path)
    busy = Measure(FREE, steady=False)
    for calls in (1, 2):
        assert calibrated(key, busy, folder=tmp_path, force=calls == 1) == FREE
        assert busy.calls == calls
    assert not list(tmp_path.glob("*.json"))


def test_a_clock_that_others_disturb_is_noticed_and_the_least_seconds_count() -> None:
    class Disturbed(Clock):
        """Ever slower."""

        def __call__(self) -> float:
            self.seconds *= 1.01
            return super().__call__()

    model = tiny_model()
    quiet = calibrate(Target(model), tiny_head(model), clock=Clock(0.001))
    busy = calibrate(Target(model), tiny_head(model), clock=Disturbed(0.001))
    assert quiet.steady
    assert not busy.steady


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    measure = Measure()
    for _ in range(2):
        assert calibrated({}, measure, folder=tmp_path / "file" / "costs") == CPU
    assert measure.calls == 2


def test_the_key_names_all_that_costs_depend_on(engine: Engine) -> None:
    key = machine_key(engine.target, engine.head, engine.vocabulary, name="tiny", head_name="h")
    assert json.loads(json.dumps(key)) == key
    assert (key["model"], key["head"], key["lean_head"], key["dtype"], key["draft_vocab"]) == (
        "tiny",
        "h",
        False,
        "float32",
        259,
    )
    assert (key["forward"], key["row_invariant"]) == (engine.target.forward_name, engine.target.row_invariant)
    plain = Target(engine.target.model, lean=False)
    other = machine_key(plain, LeanHead(engine.head), engine.vocabulary, name="", head_name="")
    assert (other["forward"], other["lean_head"], other["row_invariant"]) == ("transformers", True, False)
    assert key["native"] == other["native"] == native.build()
    assert key["device"].startswith("cpu ")
    assert {"threads", "torch", "eagle2", "shape"} <= set(key)


def test_the_engine_measures_when_first_needed_and_reads_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE2_CACHE", str(tmp_path))
    measured: list[Any] = []

    def measure(*args: Any) -> Measured:
        measured.append(args)
        return Measured(CPU, True)

    monkeypatch.setattr("eagle2.engine.calibrate", measure)
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))

    def make(**options: Any) -> Engine:
        return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="t", **options)

    engine = make()
    list(engine.run([5, 6], Settings(max_new_tokens=4)))
    assert engine.costs is None
    assert not measured
    for _ in range(2):
        list(engine.run([5, 6], AUTO))
    assert engine.costs == CPU
    assert len(measured) == 1
    assert make().calibrate() == CPU
    assert len(measured) == 1
    assert make(costs="measure").costs == CPU
    assert len(measured) == 2
    assert calibrate_module.cache_dir() == tmp_path
