"""The command line, in process, on a tiny engine."""

from __future__ import annotations

import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from eagle2.__main__ import _parser, _settings, main
from eagle2.chat import Conversation
from eagle2.engine import Engine
from eagle2.evaluate import QuestionError, evaluate, read_questions
from eagle2.models import encode_turn
from eagle2.target import Target
from eagle2.trace import Trace
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head")


@pytest.fixture(autouse=True)
def loaded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", classmethod(lambda cls, *args, **kwargs: engine))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({"question_id": i, "turns": [f"q{i}", "more"]}) + "\n" for i in range(4)))
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # one object and nothing else


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["race", "x", "--device", "cpu"], ("auto", 3, "auto", True)),
        (["race", "x", "--device", "cpu", "--no-lookup"], ("auto", 3, "auto", False)),
        (["race", "x", "--device", "cuda:0"], (6, 10, 59, False)),
        (["race", "x", "--device", "cpu", "--depth", "6"], (6, 4, 5, False)),
        (["race", "x", "--device", "cpu", "--tree", "static", "--lookup"], (3, 4, 5, True)),
        (["eval", "--questions", "q.jsonl", "--device", "cpu"], (3, 4, 5, False)),
    ],
)
def test_the_trees_size_fits_the_machine_unless_it_is_given(arguments: list[str], sizes: tuple[Any, ...]) -> None:
    tree = _settings(_parser().parse_args(arguments)).tree_settings
    assert (tree.depth, tree.top_k, tree.total_tokens, tree.lookup) == sizes


def test_race_json(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "race", "hello", "--max-new-tokens", "20", "--depth", "2", "--seed", "3")
    expected = reference(engine.target.model, engine.encode("hello"), 20)
    for name in ("autoregressive", "eagle2"):
        lane = result["lanes"][name]
        assert set(lane) == {"text", "token_ids", "seconds", "tokens_per_second", "target_passes"}
        assert lane["token_ids"] == expected
        assert lane["tokens_per_second"] == pytest.approx(len(expected) / lane["seconds"])
    assert result["lanes"]["autoregressive"]["target_passes"] == len(expected) - 1
    assert result["tau"] == pytest.approx((len(expected) - 1) / result["lanes"]["eagle2"]["target_passes"])
    ratio = result["lanes"]["eagle2"]["tokens_per_second"] / result["lanes"]["autoregressive"]["tokens_per_second"]
    assert result["speedup"] == pytest.approx(ratio)
    assert result["equal"] is True
    assert result["first_difference"] is None
    tree = {"kind": "dynamic", "depth": 2, "top_k": 4, "total_tokens": 5, "lookup": False}
    assert result["settings"]["tree"] == tree
    assert result["settings"]["seed"] == 3


def test_race_table_names_settings_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["race", "hello", "--max-new-tokens", "6", "--tree", "static"]) == 0
    out = capsys.readouterr().out
    for part in ("same tokens: yes", "static tree 3/4/5", "float32", "torch", "speed-up", "tau"):
        assert part in out


def test_generate_streams_the_text_and_colours_by_origin(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    ids = reference(engine.target.model, engine.encode("hello"), 20)
    text = engine.tokenizer.decode(ids, skip_special_tokens=True)
    assert main(["generate", "hello", "--max-new-tokens", "20"]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert main(["generate", "hello", "--max-new-tokens", "20", "--color", "always"]) == 0
    coloured = capsys.readouterr().out
    assert "\x1b[33m" in coloured
    plain = run_json(capsys, "generate", "hello", "--max-new-tokens", "20", "--no-draft")
    assert plain["token_ids"] == ids
    assert plain["tau"] == 1


def test_prompt_from_standard_input(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run_json(capsys, "generate", "-", "--max-new-tokens", "5")["token_ids"] == reference(
        engine.target.model, engine.encode("hello"), 5
    )


def test_trace_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json.gz"
    assert main(["trace", "hello", "-o", str(path), "--max-new-tokens", "10"]) == 0
    trace = Trace.load(path)
    assert trace.prompt_text == "hello"
    assert trace.autoregressive is not None
    assert "wrote" in capsys.readouterr().err


def test_eval_json(questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "eval", "--questions", str(questions), "--limit", "3", "--max-new-tokens", "12")
    assert list(result["sets"]) == ["q"]
    entry = result["sets"]["q"]
    assert entry["prompts"] == 3
    assert entry["tau"] == pytest.approx(entry["tokens"] / entry["target_passes"]) == result["mean_tau"]
    assert len(entry["tau_by_prompt"]) == 3
    shares = entry["acceptance_by_depth"]
    assert shares == sorted(shares, reverse=True)
    # tau is one own token a step plus the accepted ones, less what the cap cut off.
    assert entry["tau"] <= 1 + sum(shares) + 1e-9
    assert result["settings"]["target"] == "tiny"
    assert result["method"] == "replay"
    loop = run_json(
        capsys, "eval", "--questions", str(questions), "--limit", "3", "--max-new-tokens", "12", "--full-loop"
    )
    assert loop["method"] == "full loop"
    assert loop["sets"]["q"]["tau_by_prompt"] == entry["tau_by_prompt"]


def test_eval_table_over_several_files(questions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"turns": ["x" * 400]}) + "\n" + json.dumps({"turns": ["y"]}))
    assert main(["eval", "--questions", str(tmp_path), "--max-new-tokens", "6", "--cache", str(tmp_path / "c")]) == 0
    out = capsys.readouterr().out
    assert out.index("long ") < out.index("q ")  # a folder's files are sorted
    for part in ("mean of tau", "ECE", "by replay", "0.9-1.0"):
        assert part in out
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 5


def test_eval_counts_equal_a_run_by_hand(engine: Engine) -> None:
    from eagle2.engine import Settings
    from eagle2.generate import Step

    settings = Settings(max_new_tokens=30, depth=3, top_k=4, total_tokens=9)
    result = evaluate(engine, ["hello"], settings, progress=False)
    steps = [s for s in engine.run(engine.encode("hello"), settings) if isinstance(s, Step)]
    assert result["target_passes"] == len(steps)
    deepest = max(len(s.verdict.accepted) for s in steps)
    by_hand = [sum(len(s.verdict.accepted) >= d for s in steps) / len(steps) for d in range(1, deepest + 1)]
    assert result["acceptance_by_depth"] == pytest.approx(by_hand)
    assert result["acceptance_rate"] == pytest.approx(
        sum(len(s.verdict.accepted) for s in steps) / sum(len(s.proposal.kept) for s in steps)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["race", " "], "prompt is empty"),
        (["race", "x", "--depth", "0"], "depth must lie"),
        (["race", "x", "--temperature", "-1"], "temperature must lie"),
        (["generate", "x", "--max-new-tokens", "0"], "max_new_tokens must lie"),
        (["generate", "x" * 400], "shorten the prompt"),
        (["generate", "x", "--threads", "0"], "--threads must be"),
        (["trace", "x", "-o", "/nowhere/run.json"], "does not exist"),
        (["eval", "--questions", "/nowhere.jsonl"], "cannot be read"),
        (["eval", "--questions", __file__], "line 1"),
        (["eval", "--questions", "/tmp", "--workers", "0"], "--workers must be"),
    ],
)
def test_mistakes_give_one_line_and_exit_code_1(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("race:") and line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["race"], ["race", "x", "--tree", "bushy"], ["eval"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
    capsys.readouterr()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for part in ("examples:", "Exit codes", "total-tokens", "python -m eagle2 race"):
        assert part in out


def test_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    assert main(["generate", "x"]) == 130
    capsys.readouterr()


def test_question_files(tmp_path: Path, questions: Path) -> None:
    assert read_questions(questions) == ["q0", "q1", "q2", "q3"]
    assert read_questions(questions, 2) == ["q0", "q1"]
    bad = tmp_path / "bad.jsonl"
    for content, message in (
        ("", "no questions"), ('{"turns": []}\n', "line 1"), ('{"turns": [3]}\n', "not text"),
        ('{"turns": ["a"]}\n[]\n', "line 2"),
    ):  # fmt: skip
        bad.write_text(content)
        with pytest.raises(QuestionError, match=message):
            read_questions(bad)


# Chat


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", "--max-new-tokens", "12", *arguments])


def test_chat_reads_turns_from_a_pipe(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat(monkeypatch, "hi\n\nand </s>?\n/reset\nhi\n/system Be kind.\nhi\n", "--json") == 0
    first, second, again, kind = map(json.loads, capsys.readouterr().out.splitlines())
    model, tokenizer = engine.target.model, engine.tokenizer
    start = engine.encode("hi")
    assert first["token_ids"] == reference(model, start, 12)
    ids = encode_turn(
        tokenizer,
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "and </s>?"},
        ],
        [*start, *first["token_ids"]],
    )
    assert second["token_ids"] == reference(model, ids, 12)
    assert (second["prompt"], second["prompt_tokens"]) == ("and </s>?", len(ids))
    assert second["reused_tokens"] == len(start) + len(first["token_ids"]) - 1
    assert (again["token_ids"], again["reused_tokens"]) == (first["token_ids"], 0)
    assert kind["prompt_tokens"] == len(tokenizer("<s>system\nBe kind.</s>\n")["input_ids"]) + len(start)
    assert chat(monkeypatch, "hi\n", "--no-draft", "--json", "--system", "Be kind.") == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] == kind["token_ids"]


def test_chat_streams_colours_and_figures(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = engine.tokenizer.decode(reference(engine.target.model, engine.encode("hi"), 12), skip_special_tokens=True)
    assert chat(monkeypatch, "hi\n") == 0
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert "12 tokens, tau " in err
    assert "ended by length" in err
    assert chat(monkeypatch, "hi\n", "--color", "always") == 0
    assert "\x1b[33m" in capsys.readouterr().out
    assert chat(monkeypatch, "hi\n" + "x" * 400 + "\nhi\n") == 1
    assert "error: with this message the conversation has" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ctrl_c_ends_an_answer_and_keeps_what_came(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal: an answer that is stopped, a mistake, and the next turn, whose ids begin with what came."""
    given = iter(["hi", "/rest", "x" * 400, "so?"])

    def typed(prompt: str) -> str:
        assert prompt == "> "
        line = next(given, None)
        if line is None:
            raise EOFError
        return line

    asked: list[tuple[list[int], int]] = []
    ask = Conversation.ask

    def asking(self: Conversation, *args: Any, **kwargs: Any) -> Any:
        turn = ask(self, *args, **kwargs)
        asked.append((list(self.ids), turn.reused))
        return turn

    passes: list[int] = []
    commit = Target.commit

    def interrupted(self: Target, rows: Any) -> None:
        commit(self, rows)
        passes.append(len(rows))
        if len(passes) == 2:  # within the first step after the prefill
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(Conversation, "ask", asking)
    monkeypatch.setattr(Target, "commit", interrupted)
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("sys.stdin", Terminal())
    assert main(["chat", "--max-new-tokens", "12"]) == 0
    assert signal.getsignal(signal.SIGINT) is before
    out, err = capsys.readouterr()
    assert "ended by stopped" in err
    assert "error: there is no command /rest" in err
    assert "error: with this message" in err
    came = len(asked[1][0]) - len(engine.encode("hi"))
    assert came == 1 + passes[1]
    answer = engine.tokenizer.decode(asked[1][0][-came:], skip_special_tokens=True)
    assert out.startswith(answer.rstrip("\ufffd") + "\n")  # half a character is not shown
    assert asked[1][1] == len(asked[1][0]) - 1  # its caches were still good
    assert "ended by length" in err
