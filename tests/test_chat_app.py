"""The app's chat through its handlers, on a tiny engine; no browser."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from visual_helpers import in_loop

from eagle2.engine import Engine
from eagle2.models import encode_turn
from eagle2.target import Target
from eagle2.trace import Trace
from eagle2.zero import LentEngine
from tests.test_app import GOOD, Clicked, Visitor, skipped
from tests.tiny import byte_tokenizer, reference, tiny_head, tiny_model
from visual import chat

app = in_loop(lambda: importlib.import_module("app"))
FORM = tuple((GOOD | {"max_new_tokens": 16}).values())
HOSTILE = "<img src=x onerror=alert(1)> ${1+1} </s>"


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head", costs=None)


@pytest.fixture
def actions(engine: Engine) -> Any:
    host = app.EngineHost(lambda progress: engine)
    host.engine = engine
    return app.Actions(host)


def visitor(name: str = "a") -> Visitor:
    made = Visitor()
    made.session_hash = name
    return made


def said(actions: Any, state: Any, text: str, who: Visitor | None = None, system: str = "") -> Sequence[Any]:
    """The last outputs of one message."""
    *_, last = actions.chat(who or visitor(), state, text, system, *FORM)
    return last


def test_a_conversation_of_two_visitors(actions: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on from what it said itself, with its own caches; ids are those of the library."""
    model, tokenizer = engine.target.model, engine.tokenizer
    rows: list[int] = []
    forward = Target._forward

    def counting(self: Target, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(token_ids))
        return forward(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(Target, "_forward", counting)
    states: dict[str, Any] = {"a": None, "b": None}
    for number, question in enumerate(("Hi", HOSTILE)):
        for name in states:
            text = question + name
            before = states[name].saved["ids"] if states[name] else []
            history = states[name].saved["messages"] if states[name] else []
            ids = encode_turn(tokenizer, [*history, {"role": "user", "content": text}], before)
            expected = reference(model, ids, 16)
            rows.clear()
            told, states[name], *_ = said(actions, states[name], text, visitor(name))
            assert states[name].saved["ids"] == [*ids, *expected]
            assert rows[0] == len(ids) - max(len(before) - 1, 0)  # the caches were there
            shown = json.loads(told)
            assert [message["role"] for message in shown["messages"]] == ["user", "assistant"] * (number + 1)
            assert "".join(shown["messages"][-2]["pieces"]) == text
            assert f"{max(len(before) - 1, 0)} of {len(ids)} prompt tokens reused" in shown["messages"][-1]["facts"]
            assert "<" not in told  # no HTML parser sees a tag in it
    # Caches that are gone: the same ids, computed again.
    actions.chats.drop("a")
    rows.clear()
    lost = said(actions, states["a"], "So?")[1].saved
    assert rows[0] == len(
        encode_turn(
            tokenizer, [*states["a"].saved["messages"], {"role": "user", "content": "So?"}], states["a"].saved["ids"]
        )
    )
    actions.chats.drop("b")
    assert lost["ids"][: len(states["a"].saved["ids"])] == states["a"].saved["ids"]


def test_the_answer_streams_and_its_trees_open_in_the_player(actions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PAYLOADS_PER_SECOND", 1e9)
    updates = list(actions.chat(visitor(), None, "Hi", "Be brief.", *FORM))
    live = [json.loads(update[0]) for update in updates if isinstance(update[0], str)]
    assert [state["busy"] for state in live] == [True] * (len(live) - 1) + [False]
    growing = [len(state["messages"][-1]["pieces"]) for state in live[1:]]
    assert growing == sorted(growing)
    assert (growing[0], growing[-1]) == (1, 16)
    assert {state["start"] for state in live[1:-1]} == {1}  # the question is not sent again
    assert set(live[-1]["messages"][1]["origins"]) <= {"prefill", "drafted", "bonus", "correction"}
    state = updates[-1][1]
    assert state.saved["messages"][0] == {"role": "system", "content": "Be brief."}
    view, told, _, row, current, own, tabs = actions.chat_trees(Clicked({"answer": 1}), state, None)
    assert skipped(view)
    trace = Trace.load(own.path)
    assert trace.prompt_text == "Hi"
    assert list(trace.prompt_ids) + list(trace.output_ids) == state.saved["ids"]
    assert len(json.loads(told)["steps"]) == len(trace.steps) > 0
    assert (current, json.loads(row)["current"]) == (app.YOUR_RUN, app.YOUR_RUN)
    assert tabs._constructor_args[0]["selected"] == app.STEPS
    Path(own.path).unlink()
    for sent in ({"answer": 1}, {"answer": 0}, {"answer": -1}, {"answer": "x"}, None, {}):
        note = json.loads(actions.chat_trees(Clicked(sent), state, None)[0])
        assert (note["level"], len(note["messages"])) == ("error", 2)


def test_a_stopped_answer_is_kept_by_its_own_visitor_only(actions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "YIELD_SECONDS", 0.0)
    first = said(actions, None, "Hi")[1]
    updates = actions.chat(visitor(), first, "Go on", "", *FORM)
    for _ in range(5):
        next(updates)
    updates.close()
    other = actions.chat_stopped(visitor("b"), None)
    assert json.loads(other[0])["messages"] == []
    told, state, *_ = actions.chat_stopped(visitor(), first)
    shown = json.loads(told)
    assert (shown["note"], shown["messages"][-1]["facts"][-1]) == ("Stopped.", "stopped")
    assert 0 < len(shown["messages"][-1]["pieces"]) < 16
    assert state.saved["ids"][: len(first.saved["ids"])] == first.saved["ids"]
    following = said(actions, state, "And?")[1]
    assert following.saved["ids"][: len(state.saved["ids"])] == state.saved["ids"]
    assert actions.chat_stopped(visitor(), following)[1] is following  # handed out once


def test_mistakes_get_one_sentence_and_change_nothing(actions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = said(actions, None, "Hi")[1]
    full = state._replace(messages=state.messages * app.MAX_TURNS)
    for held, text, system, sentence in (
        (state, " ", "", "Write a message first."),
        (state, "x" * 2001, "", "The message has 2001 characters; the limit is 2,000."),
        (None, "x", "y" * 1001, "The system prompt has 1001 characters; the limit is 1,000."),
        (full, "x", "", "This conversation has 20 questions, which is the limit; clear it to begin another."),
        (state, "x" * 600, "", "With this message the conversation has"),
    ):
        told, after, message, *_ = said(actions, held, text, system=system)
        note = json.loads(told)
        assert (note["level"], note["note"].startswith(sentence)) == ("error", True), note
        assert after == (held or app.Chat())
        assert message._constructor_args[0]["value"] == text  # to be changed and sent again
    monkeypatch.setattr(Engine, "drafter", lambda *_: (_ for _ in ()).throw(KeyError("secret")))
    actions.chats.drop("a")
    assert "secret" not in said(actions, state, "x")[0]


def test_clear_forgets_caches_and_another_system_prompt_can_begin(actions: Any, engine: Engine) -> None:
    said(actions, None, "Hi", system="A")
    assert len(actions.chats) == 1
    told, state, _, system, *_ = actions.chat_cleared(visitor())
    assert (json.loads(told)["messages"], state, len(actions.chats)) == ([], app.Chat(), 0)
    assert system._constructor_args[0]["interactive"] is True
    assert said(actions, state, "Hi", system="B")[1].saved["messages"][0]["content"] == "B"
    actions.chat_left(visitor())
    assert len(actions.chats) == 0


def test_answers_wait_in_line_with_races_and_are_no_public_endpoint(actions: Any) -> None:
    demo = in_loop(lambda: app.build(actions))
    (answering,) = [function for function in demo.fns.values() if function.name == "chat"]
    assert (answering.concurrency_id, answering.concurrency_limit) == ("device", 1)
    assert list(demo.get_api_info()["named_endpoints"]) == ["/race"]


def test_a_lent_gpu_cannot_keep_conversations(actions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions.host, "engine", LentEngine(lambda **_: lambda function: function))
    told, state, *_ = said(actions, None, "hello")
    assert "a lent GPU cannot do; race a prompt instead" in json.loads(told)["note"]
    assert state.messages == ()


def test_what_a_message_shows() -> None:
    said = chat.answer(
        ["a", "<b>\ud800"], ["prefill", "drafted"], tau=2.5, tokens_per_second=30.04, reused=7, prompt_tokens=9,
        finish_reason="length", trees=True,
    )  # fmt: skip
    assert said.role == "assistant"
    assert said.origins == ("prefill", "drafted")
    assert said.facts == (
        "2 tokens", "tau 2.50", "30.0 tokens/s", "7 of 9 prompt tokens reused", "ended at the most new tokens"
    )  # fmt: skip
    assert "\ud800" not in said.pieces[1]
    assert chat.message([chat.question("x"), said], start=1)["messages"] == [said._asdict()]
    assert [message["role"] for message in chat.message([chat.question("x")])["messages"]] == ["user"]
