"""Conversations: what a turn's ids are, what is computed for it, and that reuse changes no token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from eagle2.chat import Conversation, Conversations, Turn
from eagle2.device import DeviceEagleDrafter
from eagle2.draft import Proposal, RootOnly
from eagle2.eagle import EagleDrafter, TreeSettings
from eagle2.engine import Engine, Settings
from eagle2.generate import Prefill, Stops, generate
from eagle2.graphs import GraphForward
from eagle2.lean import LeanHead
from eagle2.models import ModelError, encode_chat, encode_turn
from eagle2.target import ContextLengthError, HuggingFaceForward, Target
from eagle2.verify import SamplingParams
from tests.test_models import _tiny_tokenizer
from tests.tiny import byte_tokenizer, chain_tree, reference, tiny_head, tiny_model

QUESTIONS = ("Hi?", "and </s> why, in long?", "so")
SETTINGS = Settings(max_new_tokens=24, depth=3, top_k=4, total_tokens=7)


def made_engine(seed: int = 0, **changes: Any) -> Engine:
    tokenizer = byte_tokenizer()
    model = tiny_model(seed, vocab_size=len(tokenizer), max_position_embeddings=512, **changes)
    return Engine(model, tokenizer, tiny_head(model), name="tiny", head_name="tiny-head")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return made_engine()


def output(turn: Turn) -> list[int]:
    return [token for item in turn.items for token in ((item.token,) if isinstance(item, Prefill) else item.emitted)]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each pass of any target from now on."""
    rows: list[int] = []
    forward = Target._forward

    def counting(self: Target, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(token_ids))
        return forward(self, token_ids, *args, **kwargs)

    monkeypatch.setattr(Target, "_forward", counting)
    return rows


# --- the same tokens as without reuse ---------------------------------------------------------------------------------


@pytest.mark.parametrize("drafted", [True, False])
@pytest.mark.parametrize("lookup", [False, True])
def test_each_turn_equals_a_fresh_run_over_all_ids(engine: Engine, drafted: bool, lookup: bool) -> None:
    settings = Settings(max_new_tokens=24, depth=3, top_k=4, total_tokens=7, lookup=lookup)
    talk = Conversation(engine)
    before: list[int] = []
    for number, question in enumerate(QUESTIONS):
        turn = talk.ask(question, settings, drafted=drafted)
        assert turn.prompt_ids[: len(before)] == before
        assert turn.reused == max(len(before) - 1, 0)
        answer = output(turn)
        assert answer == reference(engine.target.model, turn.prompt_ids, 24)
        before = [*turn.prompt_ids, *answer]
        assert talk.ids == before
        assert [message["content"] for message in talk.messages[::2]] == list(QUESTIONS[: number + 1])


@pytest.mark.parametrize("forward", ["transformers", "lean", "graphs"])
@pytest.mark.parametrize("kind", ["host", "device", "plain"])
def test_a_sequence_that_is_cut_and_goes_on_equals_a_new_one(forward: str, kind: str) -> None:
    """Every forward and drafter: cut back within the last step and before it, then longer than there was room for."""
    model = tiny_model(3, max_position_embeddings=512)
    head = tiny_head(model)
    runs = {"transformers": HuggingFaceForward, "graphs": GraphForward.of}
    settings = TreeSettings("dynamic", 3, 4, 9)

    def lane() -> Any:
        target = Target(model, runs=runs[forward](model) if forward in runs else None)
        drafters = {"host": EagleDrafter, "device": DeviceEagleDrafter}
        return target, drafters[kind](head, target, settings) if kind in drafters else RootOnly()

    def decode(target: Target, drafter: Any, ids: list[int], count: int, reused: int = 0) -> list[Any]:
        stops = Stops(count)
        sampling = SamplingParams()
        return list(generate(target, drafter, ids, sampling=sampling, stops=stops, max_nodes=9, reused=reused))

    def same(steps: list[Any], others: list[Any]) -> None:
        assert [step.emitted for step in steps[1:]] == [step.emitted for step in others[1:]]
        for step, other in zip(steps[1:], others[1:]):
            assert torch.equal(step.proposal.expanded.token_ids, other.proposal.expanded.token_ids)
            torch.testing.assert_close(
                step.proposal.expanded.log_value, other.proposal.expanded.log_value, rtol=1e-3, atol=1e-4
            )

    for back in (1, 7):  # 7: rows that the head has in its cache
        target, drafter = lane()
        prompt = text(220)
        first = decode(target, drafter, prompt, 16)
        ids = [*prompt, first[0].token, *(token for step in first[1:] for token in step.emitted)]
        reused = len(ids) - back
        longer = [*ids[: reused + 1], *text(60, 5)]  # more than there was room for
        same(decode(target, drafter, longer, 12, reused), decode(*lane(), longer, 12))


def text(count: int, start: int = 0) -> list[int]:
    return [3 + (start + i) ** 2 % 90 for i in range(count)]


@pytest.mark.parametrize("kind", [EagleDrafter, DeviceEagleDrafter])
@pytest.mark.parametrize("kept", [235, 240, 243, 246])  # fed to the head: 240 of 246
def test_a_drafter_that_resumes_drafts_as_a_new_one(kind: Any, kept: int) -> None:
    """Cut within what the head has seen, within what waits for it, and not at all; then past the room it had."""
    model = tiny_model(3, max_position_embeddings=512)
    target, head = Target(model, lean=False), tiny_head(model)
    before = text(247)
    longer = [*before[: kept + 1], *text(40, 7)]
    trees = []
    for resumed in (True, False):
        drafter = kind(head, target, TreeSettings("dynamic", 3, 4, 9))
        hidden = target.prefill(longer, 512).hidden
        new = slice(0, None)
        if resumed:
            old = target.prefill(before, 512).hidden
            drafter.reset(247)
            drafter.observe(before[:240], old[:240])
            drafter.propose(before[240], 3, 9)
            drafter.observe(before[240:242], old[240:242])
            drafter.observe(before[242:246], old[242:246])
            drafter.resume(kept, 320)
            new = slice(kept, None)
        else:
            drafter.reset(320)
        drafter.observe(longer[new], hidden[new])
        trees.append(drafter.propose(5, 3, 9).expanded)
    assert torch.equal(trees[0].token_ids, trees[1].token_ids)
    torch.testing.assert_close(trees[0].log_value, trees[1].log_value, rtol=1e-4, atol=1e-5)
    if kept == 246:
        with pytest.raises(ValueError, match="has not seen 999 tokens"):
            drafter.resume(999, 999)


def test_only_new_rows_are_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    fed = []

    def count(name: str) -> None:
        run = getattr(type(engine._draft_head), name)

        def counting(self: Any, embeds: Any, features: Any, positions: Any, *rest: Any) -> Any:
            fed.append(positions.tolist())
            return run(self, embeds, features, positions, *rest)

        monkeypatch.setattr(type(engine._draft_head), name, counting)

    assert isinstance(engine._draft_head, LeanHead)
    count("fill")
    count("step")
    rows = counted(monkeypatch)
    talk = Conversation(engine)
    output(talk.ask("Hello there, how are you?", SETTINGS))
    length, committed = len(talk.ids), len(talk.ids) - 1
    rows.clear()
    fed.clear()
    turn = talk.ask("So?", SETTINGS)
    next(turn.items)
    assert rows == [len(turn.prompt_ids) - committed]
    assert len(turn.prompt_ids) - length < 30 < length
    next(turn.items)
    assert len(rows) == 2  # the tree's pass
    assert [fed[0][-1], *fed[1]] == [
        len(turn.prompt_ids) - 2,
        len(turn.prompt_ids) - 1,
    ]  # the last one awaits its next token
    assert committed - SETTINGS.tree_settings.depth_limit - 1 <= fed[0][0] <= committed  # the head's last step and on


def test_lookup_copies_from_earlier_turns(engine: Engine) -> None:
    talk = Conversation(engine)
    settings = Settings(max_new_tokens=8, depth=1, top_k=1, total_tokens=8, lookup=True)
    output(talk.ask("one two three four five six", settings))
    turn = talk.ask("again: one two three", settings)
    list(turn.items)
    assert talk._lane is not None
    lookup = talk._lane[2]._lookup  # type: ignore[attr-defined]
    assert lookup._ids == talk.ids[: len(lookup._ids)]
    assert len(lookup._ids) >= len(turn.prompt_ids)


# --- ends in mid-turn -------------------------------------------------------------------------------------------------


def test_a_stopped_answer_counts_as_far_as_it_came(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Conversation(engine)
    turn = talk.ask("Hello", SETTINGS)
    with pytest.raises(ValueError, match="still being written"):
        [next(turn.items), talk.ask("Me too", SETTINGS)]
    next(turn.items)
    turn.items.close()  # type: ignore[attr-defined]
    assert len(turn.prompt_ids) < len(talk.ids) < len(turn.prompt_ids) + 24
    assert talk.messages[-1]["role"] == "assistant"
    stopped = list(talk.ids)
    rows = counted(monkeypatch)
    turn = talk.ask("Go on", SETTINGS)
    assert turn.prompt_ids[: len(stopped)] == stopped
    # The model had not ended its turn, so the template's end of turn comes in.
    assert turn.prompt_ids[len(stopped)] == engine.tokenizer.eos_token_id
    assert output(turn) == reference(engine.target.model, turn.prompt_ids, 24)
    assert rows[0] == len(turn.prompt_ids) - len(stopped) + 1


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_failed_pass_leaves_a_conversation_that_goes_on(
    engine: Engine, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(engine)
    output(talk.ask("Hello", SETTINGS))
    before, said = list(talk.ids), list(talk.messages)
    commit = Target.commit
    done = []

    def failing(self: Target, rows: Any) -> None:
        commit(self, rows)
        if len(done) == passes:  # the target has committed, the drafter has not seen it
            raise RuntimeError("out of memory")
        done.append(rows)

    with monkeypatch.context() as patch:
        patch.setattr(Target, "commit", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            output(talk.ask("More", SETTINGS))
    if passes == 0:
        assert (talk.ids, talk.messages) == (before, said)
    else:
        assert talk.ids[: len(before)] == before
        assert talk.messages[-2]["content"] == "More"
    turn = talk.ask("And now?", SETTINGS)
    assert turn.reused == 0
    assert output(turn) == reference(engine.target.model, turn.prompt_ids, 24)


def test_a_question_that_was_never_begun_does_not_count(engine: Engine) -> None:
    talk = Conversation(engine)
    talk.ask("Hello", SETTINGS)
    assert (talk.ids, talk.messages) == ([], [])
    with pytest.raises(ValueError, match="the message is empty"):
        talk.ask(" \n", SETTINGS)
    assert output(talk.ask("Hello", SETTINGS))


class Knowing:
    """Drafts what it was told comes next, a chain of five."""

    needs_hidden = False

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.seen = ids, 0

    def reset(self, capacity: int) -> None:
        self.seen = 0

    def resume(self, length: int, capacity: int) -> None:
        self.seen = length

    def observe(self, token_ids: Any, hidden: Any) -> None:
        self.seen += len(token_ids)

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        tokens = self.ids[self.seen + 1 : self.seen + 6][: min(max_depth, max_nodes)]
        return Proposal(chain_tree(root, tokens), tuple(range(1, len(tokens) + 1)))


def test_what_was_accepted_beyond_a_stop_is_forgotten() -> None:
    engine = made_engine()
    turn = Conversation(engine).ask("Hello", SETTINGS)
    free = output(turn)
    end = next(n for n in range(8, 24) if free[n] not in free[:n] and n % 6 in (2, 3, 4))  # within an accepted chain
    engine.eos_ids = frozenset({free[end]})
    talk = Conversation(engine)
    talk.ask("Hello", SETTINGS)
    assert talk._lane is not None
    kind, target, _ = talk._lane
    talk._lane = kind, target, Knowing([*turn.prompt_ids, *free])
    assert output(talk.ask("Hello", SETTINGS)) == free[: end + 1]
    assert target.length > len(talk.ids)
    turn = talk.ask("On", SETTINGS)
    assert turn.reused == len(talk.ids) - 1
    engine.eos_ids = frozenset()
    assert output(turn) == reference(engine.target.model, turn.prompt_ids, 24)


# --- ids --------------------------------------------------------------------------------------------------------------


def test_ids_are_those_of_the_whole_conversation_rendered_at_once() -> None:
    tokenizer = byte_tokenizer()
    messages: list[dict[str, str]] = [{"role": "system", "content": "Be brief."}]
    ids: list[int] = []
    for question, answer in (("one </s>", "1"), ("two", "2 <s>"), ("<s>three", "")):
        messages.append({"role": "user", "content": question})
        ids = encode_turn(tokenizer, messages, ids)
        assert ids == encode_chat(tokenizer, messages)
        messages.append({"role": "assistant", "content": answer})
        ids += [*tokenizer(answer, split_special_tokens=True)["input_ids"], tokenizer.eos_token_id]


def test_an_answer_without_end_of_turn_gets_one_and_one_with_it_no_second() -> None:
    tokenizer = _tiny_tokenizer()
    start = encode_turn(tokenizer, [{"role": "user", "content": "hi"}])
    answer = tokenizer("no", add_special_tokens=False)["input_ids"]
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "why"}
    ]  # fmt: skip
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    whole = encode_chat(tokenizer, messages)
    assert encode_turn(tokenizer, messages, [*start, *answer]) == whole
    assert encode_turn(tokenizer, messages, [*start, *answer, end]) == whole


def test_a_template_that_rewrites_earlier_turns_changes_nothing_before_the_answer() -> None:
    """Qwen3's way: reasoning is left out of earlier answers; and a default system prompt that only the first turn gets."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] != 'system' and messages|length == 1 %}default\n{% endif %}"
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'].split('</think>')[-1] | trim }}</s>"
        "{% else %}[{{ m['content'] | trim }}]{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}]
    ids = encode_turn(tokenizer, messages)
    assert tokenizer.decode(ids) == "default\n[a]"
    ids += tokenizer("<think>hm</think> yes")["input_ids"]
    messages += [{"role": "assistant", "content": "<think>hm</think> yes"}, {"role": "user", "content": "b"}]
    assert tokenizer.decode(encode_turn(tokenizer, messages, ids)) == "default\n[a]<think>hm</think> yes</s>[b]"
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ModelError, match="leaves out earlier answers"):
        encode_turn(tokenizer, messages, ids)


BOS_ONCE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %} {% endfor %}assistant:"
)


@pytest.mark.parametrize("template", [BOS_ONCE, None])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_exactly_one_bos(template: str | None, adds_bos: bool) -> None:
    tokenizer = _tiny_tokenizer(template=template, adds_bos=adds_bos)
    bos = tokenizer.bos_token_id
    messages = [{"role": "user", "content": "her"}]
    ids = encode_turn(tokenizer, messages)
    expected = 1 if template or adds_bos else 0
    assert (ids.count(bos), ids[:1] == [bos]) == (expected, bool(expected))
    for word in ("us", "er"):
        ids = [*ids, *tokenizer(word, add_special_tokens=False)["input_ids"]]
        messages += [{"role": "assistant", "content": word}, {"role": "user", "content": "<|im_start|>"}]
        ids = encode_turn(tokenizer, messages, ids)
        assert ids.count(bos) == expected


def test_without_a_template_the_form_is_plain_and_the_model_plays_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made_engine()
    tokenizer, said = engine.tokenizer, []
    tokenizer.chat_template = None
    forward = Target._forward

    def speaking(self: Target, token_ids: Any, visible: Any, positions: Any, *, logit_rows: int) -> Any:
        """The token after ``said[:n]`` is ``said[n]``, whatever the model thinks."""
        logits, hidden = forward(self, token_ids, visible, positions, logit_rows=logit_rows)
        for row, position in zip(logits if logits is not None else (), positions[-logit_rows:].tolist()):
            row.zero_()[said[min(position + 1, len(said) - 1)]] = 50.0
        return logits, hidden

    monkeypatch.setattr(Target, "_forward", speaking)
    talk = Conversation(engine, "Be brief.")
    turn = talk.ask("Hi", SETTINGS)
    assert tokenizer.decode(turn.prompt_ids) == "Be brief.\n\nUser: Hi\nAssistant:"
    said[:] = [*turn.prompt_ids, *tokenizer(" yes\nUser: and you?")["input_ids"]]
    assert output(turn) == tokenizer(" yes\nUser:")["input_ids"]
    assert talk.messages[-1] == {"role": "assistant", "content": " yes"}
    turn = talk.ask("Why?", SETTINGS)
    assert tokenizer.decode(turn.prompt_ids) == "Be brief.\n\nUser: Hi\nAssistant: yes\nUser: Why?\nAssistant:"
    assert turn.reused == len(talk.ids) - 1
    said[:] = [*turn.prompt_ids, *tokenizer(" so")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(output(turn)) == " so</s>"


def test_a_template_that_takes_no_system_prompt_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    monkeypatch.setattr(engine.tokenizer, "chat_template", refusing)
    with pytest.raises(ModelError, match="System role not supported"):
        Conversation(engine, "Be brief.").ask("Hi", SETTINGS)


def test_the_context_is_checked_in_one_sentence_before_any_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = made_engine()
    engine.target.max_length = 120
    monkeypatch.setattr(Target, "fork", lambda self: self)
    rows = counted(monkeypatch)
    talk = Conversation(engine)
    output(talk.ask("Hello", SETTINGS))
    before, done = list(talk.ids), len(rows)
    with pytest.raises(ContextLengthError, match=r"the conversation has \d+ tokens, and the model's context is 120; "):
        talk.ask("x" * 80, SETTINGS)
    assert (talk.ids, len(rows)) == (before, done)
    assert output(talk.ask("x", SETTINGS))


# --- the few that are kept --------------------------------------------------------------------------------------------


def test_few_conversations_are_kept_and_others_come_back_by_their_ids(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("eagle2.chat.time.monotonic", lambda: now[0])
    store = Conversations(most=2, seconds=60)
    talks = {key: Conversation(engine, key) for key in "abc"}
    for key, talk in talks.items():
        output(talk.ask("Hello", SETTINGS))
        store.put(key, talk)
    assert len(store) == 2
    assert store.take("c", engine, talks["c"].saved) is talks["c"]
    back = store.take("a", engine, talks["a"].saved)
    assert back is not talks["a"]
    asked = [talk.ask("More", SETTINGS) for talk in (back, talks["a"])]
    assert asked[0].prompt_ids == asked[1].prompt_ids
    assert (asked[0].reused, asked[1].reused > 0) == (0, True)
    assert output(asked[0]) == output(asked[1])
    # Another's key, or an older state, is no way to a conversation.
    assert store.take("b", engine, talks["a"].saved).ids == talks["a"].saved["ids"]
    store.put("b", talks["b"])
    now[0] = 61.0
    assert store.take("b", engine, talks["b"].saved) is not talks["b"]
    assert len(store) == 0


def test_another_tree_or_no_drafting_begins_anew(engine: Engine) -> None:
    talk = Conversation(engine)
    output(talk.ask("Hello", SETTINGS))
    assert talk.ask("x", Settings(max_new_tokens=5, depth=2)).reused == 0
    output(talk.ask("x", SETTINGS, drafted=False))
    turn = talk.ask("x", Settings(max_new_tokens=3, temperature=0.5), drafted=False)
    assert turn.reused == len(talk.ids) - 1
