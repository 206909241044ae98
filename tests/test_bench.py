"""The benchmark: the same ids by every method, and figures that follow from a clock made by hand."""

from __future__ import annotations

import importlib.machinery
import json
import os
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle2 import bench
from eagle2.__main__ import main
from eagle2.bench import Block, Lane, MethodUnavailableError, Phases, Run, first_difference, lanes, measure, rows, table
from eagle2.cost import CostModel
from eagle2.engine import Engine, Settings
from eagle2.evaluate import read_questions
from eagle2.generate import Step
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model
from visual import bench as chart

EVERYWHERE = (
    "ar",
    "eagle2",
    "eagle2-auto",
    "eagle2-auto-nolookup",
    "eagle2-paper",
    "static",
    "lookup",
    "hf",
    "hf-lookup",
)


@pytest.fixture
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    # Made-up costs, which make drafting pay: nothing is measured, nothing written to the cache folder.
    costs = CostModel((1, 64), (0.01, 0.02), (1, 8), (0.001, 0.002))
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head", costs=costs)


class Clock:
    """Stands still unless a lane moves it."""

    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def lane(clock: Clock, seconds: float, ids: list[int], phases: Phases | None = None, order: list[str] | None = None,
         name: str = "") -> Lane:  # fmt: skip
    def run(prompt_ids: list[int], count: int) -> tuple[list[int], Phases | None]:
        clock.time += seconds * prompt_ids[0]
        if order is not None:
            order.append(name)
        return ids, phases

    return run


def run_fake(methods: dict[str, Lane], clock: Clock, sets: dict[str, list[list[int]]], **more: Any) -> bench.Measured:
    settings: dict[str, Any] = {"max_new_tokens": 8, "eos_ids": frozenset([2]), "max_length": 64, "progress": False}
    return measure(methods, sets, clock=clock, **(settings | more))


def test_all_methods_give_the_same_ids(engine: Engine) -> None:
    made, precision, skipped = lanes(engine)
    assert set(EVERYWHERE) <= set(made)
    assert next(iter(made)) == "ar"
    assert set(made) | set(skipped) == set(bench.METHODS)
    assert "--gguf" in skipped["llamacpp"]
    assert set(precision.values()) == {"float32"}
    for text in ("hello", "ab ab ab ab ab"):
        ids = engine.encode(text)
        expected = reference(engine.target.model, ids, 30)
        for name, run in made.items():
            got, phases = run(ids, 30)
            assert got == expected, name
            assert (phases is None) is name.startswith("hf")
            if phases is not None:
                # every pass but the prefill's gives at least one token
                assert 0 < phases.steps <= len(got) - 1
                assert phases.passes == phases.steps if name == "ar" else phases.passes >= phases.steps


def test_outputs_are_cut_at_the_stop_and_at_the_cap(engine: Engine) -> None:
    ids = engine.encode("hello")
    free = reference(engine.target.model, ids, 30, eos_token_id=None)
    end = next(at for at in range(7, 25) if free[at] not in free[:at])
    engine.eos_ids = frozenset([free[end], 257])
    result = bench.bench(engine, {"q": ["hello"]}, max_new_tokens=30, methods=EVERYWHERE, progress=False)
    assert {entry["tokens"] for entry in result["rows"]} == {end + 1}
    assert {entry["equal_share"] for entry in result["rows"]} == {1.0}
    clock = Clock()
    methods = {"ar": lane(clock, 1, [5, 6, 2]), "hf": lane(clock, 1, [5, 6, 2, 0, 0, 0]), "x": lane(clock, 1, [7] * 12)}
    (block,) = run_fake(methods, clock, {"q": [[1]]}).blocks
    assert [block.runs[name].ids for name in methods] == [(5, 6, 2), (5, 6, 2), (7,) * 8]


def test_every_method_is_warmed_up_and_the_order_rotates_by_prompt() -> None:
    clock, order = Clock(), list[str]()
    methods = {name: lane(clock, 1, [5], order=order, name=name) for name in ("ar", "b", "c")}
    measured = run_fake(methods, clock, {"one": [[1], [2]], "two": [[3]]}, rounds=2)
    assert "".join(name[0] for name in order) == "abc" + "abc" + "bca" + "cab" + "abc" + "bca" + "cab"
    assert [(b.set, b.prompt, b.round) for b in measured.blocks] == [
        ("one", 0, 0), ("one", 1, 0), ("two", 0, 0), ("one", 0, 1), ("one", 1, 1), ("two", 0, 1),
    ]  # fmt: skip
    assert [b.runs["ar"].seconds for b in measured.blocks] == [1, 2, 3] * 2
    assert all(list(block.runs) == ["ar", "b", "c"] for block in measured.blocks)


def test_prompts_without_room_are_left_out() -> None:
    clock = Clock()
    measured = run_fake({"ar": lane(clock, 1, [5])}, clock, {"q": [[1] * 57, [1] * 56]})
    assert measured.skipped == {"q": 1}
    assert [block.prompt for block in measured.blocks] == [1]
    with pytest.raises(ValueError, match="no prompt leaves room"):
        run_fake({"ar": lane(clock, 1, [5])}, clock, {"q": [[1] * 57]})


def test_figures_by_hand() -> None:
    """Three prompts of 1, 2 and 3 seconds for our lane; the other takes .5, .5 and 4 and gives another text on one."""

    def block(prompt: int, base: float, other: float, ids: tuple[int, ...], number: int = 0) -> Block:
        # our lane: 0.1 s of prefill, then 4 steps; the other: 0.2 s, then 2 steps
        phases = Phases(prefill=0.1, verify=base - 0.1, steps=4, passes=4)
        mine = Phases(prefill=0.2, draft=0.1, verify=0.1, commit=0.05, steps=2, passes=3)
        return Block("q", prompt, number, {"ar": Run((1, 2, 3, 4, 5), base, phases), "m": Run(ids, other, mine)})

    same = (1, 2, 3, 4, 5)
    blocks = [block(0, 1, 0.5, same), block(1, 2, 0.5, same), block(2, 3, 4, (1, 2, 3))]
    got = bench.row("m", "q", "float32", blocks)
    assert got["speedup"] == pytest.approx(2)  # of 2, 4 and 3/4 * 3/5
    assert got["quartiles"] == pytest.approx([(2 + 0.45) / 2, 3])
    assert got["speedup_total"] == pytest.approx((13 / 5) / (15 / 6))
    assert got["tokens_per_second"] == pytest.approx(13 / 5)
    assert got["equal_share"] == pytest.approx(2 / 3)
    assert got["tau"] == pytest.approx((4 + 4 + 2) / 6)
    assert got["shares"] == pytest.approx({"prefill": 0.2 / 0.45, "draft": 0.1 / 0.45, "verify": 0.1 / 0.45, "commit": 0.05 / 0.45})  # fmt: skip
    # decoding: 10 tokens in 5 - .6 s against 12 in 6 - .3; a step's passes cost 1.5 autoregressive steps
    assert got["efficiency"] == pytest.approx((10 / 4.4) / (12 / 5.7) / ((10 / 6) / 1.5))
    assert (got["prompts"], got["tokens"], got["seconds"]) == (3, 13, 5)
    base = bench.row("ar", "q", "float32", blocks)
    assert base["speedup"] == base["speedup_total"] == base["efficiency"] == base["tau"] == 1
    # A second round: the prompt counts once, with the median of its ratios.
    again = bench.row("m", "q", "float32", [*blocks, block(0, 6, 1, same, 1)])
    assert again["prompts"] == 3
    assert again["quartiles"] == pytest.approx([(4 + 0.45) / 2, 4])


def test_a_steps_passes_are_the_targets_over_its_rows_and_the_heads_over_its_layers(engine: Engine) -> None:
    costs = CostModel((1, 3), (1.0, 2.0), (1, 2), (0.25, 0.5))  # a row more: .5 and .25
    settings = Settings(max_new_tokens=12, depth=3, top_k=2, total_tokens=4)
    step = next(item for item in engine.run(engine.encode("hello"), settings) if isinstance(item, Step))
    assert [len(layer) for layer in step.proposal.selected] == [2, 2]
    assert bench._passes(costs, step, True) == 3.0 + 0.25 + 2 * 0.5
    assert bench._passes(costs, step, False) == 3.0


def test_loops_differences_and_the_mean_of_the_sets() -> None:
    clock = Clock()
    methods = {"ar": lane(clock, 2, [4] * 20), "hf": lane(clock, 1, [4] * 19 + [3])}
    measured = run_fake(methods, clock, {"a": [[1]], "b": [[1], [1]]}, max_new_tokens=20)
    made = rows(measured, {"ar": "float32", "hf": "float32"})
    assert [(r["set"], r["method"]) for r in made] == [(s, m) for s in ("a", "b", "mean") for m in ("ar", "hf")]
    assert [r["loop_share"] for r in made] == [1, 0] * 3
    assert [r["equal_share"] for r in made] == [1, 0] * 3
    mean = made[-1]
    assert (mean["speedup"], mean["prompts"], mean["tokens"], mean["tau"], mean["quartiles"]) == (2, 3, 60, None, None)
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == first_difference([1], [1, 2]) == 1


def test_json_shape(engine: Engine) -> None:
    result = bench.bench(
        engine, {"a": ["hello", "x" * 400], "b": ["one two"]}, max_new_tokens=8, methods=["hf", "eagle2"], rounds=2,
        progress=False,
    )  # fmt: skip
    json.dumps(result, allow_nan=False)
    assert list(result["methods"]) == ["ar", "eagle2", "hf"]
    assert [row["set"] for row in result["rows"]] == ["a"] * 3 + ["b"] * 3 + ["mean"] * 3
    keys = {
        "method", "set", "precision", "speedup", "speedup_total", "quartiles", "tau", "tokens_per_second", "equal_share",
        "loop_share", "prompts", "tokens", "seconds", "shares", "efficiency",
    }  # fmt: skip
    assert all(set(row) == keys for row in result["rows"])
    assert result["skipped_prompts"] == {"a": 1, "b": 0}
    assert len(result["runs"]) == 2 * 2 * 3
    assert {run["first_difference"] for run in result["runs"]} == {None}
    settings = result["settings"]
    assert {"device", "dtype", "threads", "versions", "created", "target", "head", "max_new_tokens"} <= set(settings)
    assert "tree" not in settings
    text = table(result)
    for part in ("a, 1 prompts", "mean of the sets", "eagle2 ", "1 prompts left no room", "float32", "efficiency"):
        assert part in text


def test_unknown_and_unavailable_methods(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MethodUnavailableError, match="no method 'warp'; choose among ar, "):
        lanes(engine, ["warp"])
    with pytest.raises(MethodUnavailableError, match="--gguf FILE"):
        lanes(engine, ["llamacpp"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MethodUnavailableError, match="llama-cpp-python, which is not installed"):
        lanes(engine, ["llamacpp"], str(tmp_path / "x.gguf"))
    without = Engine(engine.target.model, engine.tokenizer, engine.head, name="tiny", head_name="tiny-head", costs=None)
    with pytest.raises(MethodUnavailableError, match=r"eagle2-auto cannot run: .* needs a cost model"):
        lanes(without, ["eagle2-auto"])
    made, _, skipped = lanes(without)
    assert "eagle2-auto" not in made
    assert "needs a cost model" in skipped["eagle2-auto"]


def test_llamacpp_is_asked_for_greedy_tokens_of_a_fresh_prompt(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Llama:
        def __init__(self, **arguments: Any) -> None:
            self.arguments = arguments
            self.metadata = {"general.file_type": "32"}
            self.fresh = False

        def n_vocab(self) -> int:
            return vocabulary

        def reset(self) -> None:
            self.fresh = True

        def generate(self, ids: list[int], **arguments: Any) -> Iterator[int]:
            assert self.fresh
            assert arguments == {"temp": 0.0, "repeat_penalty": 1.0}
            self.fresh = False
            yield from [5, 6, 2, 9, 9] if ids[0] else [5, 6, 7, 8, 9]

    module = types.ModuleType("llama_cpp")
    module.__spec__ = importlib.machinery.ModuleSpec("llama_cpp", None)
    module.Llama = Llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", module)
    path = tmp_path / "x.gguf"
    vocabulary = engine.target.vocab_size
    with pytest.raises(MethodUnavailableError, match="does not exist"):
        lanes(engine, ["llamacpp"], str(path))
    path.touch()
    made, precision, _ = lanes(engine, ["llamacpp"], str(path))
    assert list(made) == ["ar", "llamacpp"]
    assert precision == {"ar": "float32", "llamacpp": "bfloat16"}
    assert made["llamacpp"]([1], 9) == ([5, 6, 2], None)
    assert made["llamacpp"]([0], 4) == ([5, 6, 7, 8], None)
    vocabulary = 7
    with pytest.raises(MethodUnavailableError, match="vocabulary of 7 tokens"):
        lanes(engine, ["llamacpp"], str(path))


def test_the_quick_set_is_well_formed() -> None:
    lines = [json.loads(line) for line in bench.QUICK_QUESTIONS.read_text(encoding="utf-8").splitlines()]
    assert [line["question_id"] for line in lines] == list(range(1, 13))
    kinds = ["chat", "code", "arithmetic", "list", "summary", "translation"]
    assert [line["category"] for line in lines] == kinds * 2  # so the first six are one of each
    assert len(kinds) == bench.QUICK_LIMIT
    prompts = read_questions(bench.QUICK_QUESTIONS)
    assert len(set(prompts)) == 12
    assert max(map(len, prompts)) > 1500  # one with a passage to copy from


@pytest.fixture
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, *args, **kwargs: engine))
    path = tmp_path / "mt_bench.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"q{i}"]}) + "\n" for i in range(3)))
    return str(path)


def test_command_line(loaded: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "speed.html"
    arguments = ["bench", "--questions", loaded, "--max-new-tokens", "6", "--methods", "hf", "lookup"]
    assert main([*arguments, "--limit", "2", "--json", "--chart", str(page)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in result["rows"]] == ["ar", "lookup", "hf"]
    assert {row["prompts"] for row in result["rows"]} == {2}
    html = page.read_text(encoding="utf-8")
    assert "Vicuna-7B" in html
    assert "hf" in html
    assert main(arguments) == 0
    assert "mt_bench, 3 prompts" in capsys.readouterr().out


def test_quick_takes_six_prompts_and_64_tokens(loaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def checked(engine: Engine, sets: dict[str, list[str]], **more: Any) -> dict[str, Any]:
        seen.append(({name: len(prompts) for name, prompts in sets.items()}, more["max_new_tokens"]))
        return {"rows": [], "interrupted": False}

    seen: list[Any] = []
    monkeypatch.setattr(bench, "bench", checked)
    assert main(["bench", "--quick"]) == 0
    assert main(["bench", "--quick", "--limit", "12", "--max-new-tokens", "9"]) == 0
    assert main(["bench", "--questions", loaded]) == 0
    assert seen == [({"quick": 6}, 64), ({"quick": 12}, 9), ({"mt_bench": 3}, 128)]


def test_ctrl_c_prints_what_was_measured(
    loaded: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0
    plain = bench._hugging_face

    def interrupting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:  # the warm-up is call 1
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*arguments)

    monkeypatch.setattr(bench, "_hugging_face", interrupting)
    arguments = ["bench", "--questions", loaded, "--max-new-tokens", "5", "--methods", "hf"]
    assert main(arguments) == 130
    out = capsys.readouterr().out
    assert "mt_bench, 2 prompts" in out
    assert "interrupted" in out
    calls = 3  # now in the warm-up: there is nothing to print
    assert main(arguments) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "warp"], "no method 'warp'"),
        (["--methods", "llamacpp"], "llamacpp needs"),
        (["--limit", "0"], "--limit must be at least 1"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--chart", "/nowhere/x.html"], "does not exist"),
    ],
)
def test_mistakes(arguments: list[str], message: str, loaded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--quick", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_questions_or_quick_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--quick", "--questions", "x"]):
        with pytest.raises(SystemExit) as caught:
            main(["bench", *arguments])
        assert caught.value.code == 2
    capsys.readouterr()


SETTINGS = {"target": "t", "dtype": "float32", "device": "cpu", "threads": 2, "max_new_tokens": 64}


def chart_row(method: str, set_name: str, speedup: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "set": set_name, "precision": "float32", "speedup": speedup, "quartiles": [1.0, 2.5],
        "tokens_per_second": 20.0, "tau": None, "equal_share": 1.0,
    } | more  # fmt: skip


def test_chart_info_and_figure() -> None:
    made = [
        chart_row("ar", "sum", 1.0),
        chart_row("hf", "sum", 0.5),
        chart_row("eagle2", "sum", 1.5, tau=2.25),
        chart_row("eagle2", "<own>", 2.0, quartiles=None),
    ]
    info = chart.info(made, SETTINGS)
    assert info == chart.BenchInfo(
        sets=("sum", "<own>"),
        measured=(
            chart.Bars(
                "eagle2", 1, (1.5, 2.0), ((1.0, 2.5), None),
                (
                    "eagle2 (float32), sum: 1.50x (quartiles 1.00 to 2.50), 20.0 tokens/s, τ 2.25, 100 % equal outputs",
                    "eagle2 (float32), <own>: 2.00x, 20.0 tokens/s, 100 % equal outputs",
                ),
            ),
            chart.Bars(
                "hf", 6, (0.5, None), ((1.0, 2.5), None),
                ("hf (float32), sum: 0.50x (quartiles 1.00 to 2.50), 20.0 tokens/s, 100 % equal outputs", ""),
            ),
        ),
        paper_sets=("cnn_dm",),
        paper=(
            chart.Bars("EAGLE-2", 2, (2.94,), (None,), ("EAGLE-2, cnn_dm: 2.94x",)),
            chart.Bars("EAGLE", 3, (2.33,), (None,), ("EAGLE, cnn_dm: 2.33x",)),
            chart.Bars("PLD", 5, (2.53,), (None,), ("PLD, cnn_dm: 2.53x",)),
        ),
        about="t, float32 on cpu, 2 threads, 64 new tokens, greedy",
    )  # fmt: skip
    figure = chart.figure(info)
    assert [trace.name for trace in figure.data] == ["eagle2", "hf", "EAGLE-2", "EAGLE", "PLD"]
    assert [trace.xaxis for trace in figure.data] == ["x", "x", "x2", "x2", "x2"]
    assert list(figure.data[0].error_y.array) == [1.0, 0]
    assert list(figure.data[0].x) == ["sum", "&lt;own&gt;"]
    # The paper does not have this set: its means stand beside it.
    own = chart.info([chart_row("hf", "mine", 0.5), chart_row("ar", "mine", 1.0)], SETTINGS)
    assert own.paper_sets == ("mean",)
    figure = chart.figure(own)
    assert [trace.name for trace in figure.data] == ["hf", "EAGLE-2", "EAGLE", "PLD"]
    assert list(figure.data[1].y) == [3.39]


def test_the_papers_figures_and_the_methods_are_those_we_say() -> None:
    assert set(chart.STYLES) == set(bench.METHODS) - {chart.BASE}
    assert chart.BASE == bench.BASE
    tasks = [key for key in chart.PAPER["EAGLE-2"] if key != "mean"]
    for figures in chart.PAPER.values():  # the printed means are of the printed figures
        assert figures["mean"] == pytest.approx(sum(figures[task] for task in tasks) / len(tasks), abs=0.006)
