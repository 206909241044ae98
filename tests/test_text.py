"""Streamed pieces add up to the text; display texts of single tokens."""

from __future__ import annotations

from eagle2.text import Detokenizer, TokenTexts
from tests.tiny import byte_tokenizer

TEXT = "a é 漢字 🙂!"


def test_pieces_add_up_and_a_character_comes_with_its_last_byte() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    ids = tokenizer(TEXT)["input_ids"]
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) == TEXT
    assert [piece for piece in pieces if piece] == list(TEXT)
    assert stream.flush() == ""


def test_an_unfinished_character_is_flushed_as_a_replacement() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    for token in tokenizer("x漢")["input_ids"][:-1]:
        stream.push(token)
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    lone = tokenizer("漢")["input_ids"][0]
    pieces = [stream.push(lone) for _ in range(20)]
    assert any(pieces)


def test_control_tokens_are_text_only_where_asked_for() -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer("ab")["input_ids"] + [tokenizer.eos_token_id]
    for special, expected in ((False, "ab"), (True, "ab</s>")):
        stream = Detokenizer(tokenizer, special=special)
        assert "".join([stream.push(token) for token in ids]) == expected


def test_display_texts() -> None:
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    assert texts[tokenizer("a")["input_ids"][0]] == "a"
    assert texts[tokenizer("\n")["input_ids"][0]] == "\n"
    assert texts[tokenizer("漢")["input_ids"][0]] == "<0xE6>"
    assert texts[tokenizer.eos_token_id] == "</s>"
    assert texts[100_000] == "<id 100000>"
