"""From token ids to text that a person can read: streamed pieces and display texts of single tokens."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns a growing list of ids into pieces whose concatenation is the decoded text.

    A character made of several tokens comes with its last one; the tokens before it get an empty piece.
    """

    def __init__(self, tokenizer: Any, context: list[int] | None = None, *, special: bool = False) -> None:
        """``context``: ids before the first piece (their text is not returned, but decides about leading spaces).

        ``special``: whether control tokens (end of turn, ...) are part of the text.
        """
        self._decode = lambda ids: tokenizer.decode(
            ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        self._ids = list((context or [])[-8:])
        self._start = 0  # decoding restarts here; what lies before cannot change any more
        self._given = len(self._ids)  # ids whose text has been returned

    def push(self, token_id: int) -> str:
        """The text that this token adds."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._start : self._given])
        now = self._decode(self._ids[self._start :])
        if now.endswith(_REPLACEMENT) and len(self._ids) - self._given < 8:
            return ""  # an unfinished character; after 8 tokens it is none
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is still held back at the end of the text."""
        if self._given == len(self._ids):
            return ""
        before = self._decode(self._ids[self._start : self._given])
        self._given = len(self._ids)
        return self._decode(self._ids[self._start :])[len(before) :]


class TokenTexts:
    """Display text of single tokens: exact where the token is whole characters, ``<0xE2 0x80>`` where it is not."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, str] = {}
        self._special = set(tokenizer.all_special_ids)

    def __getitem__(self, token_id: int) -> str:
        text = self._cache.get(token_id)
        if text is None:
            text = self._cache[token_id] = self._make(token_id)
        return text

    def _make(self, token_id: int) -> str:
        raw = self._tokenizer.convert_ids_to_tokens(token_id)
        if raw is None:  # rows of the LM head beyond the tokenizer's vocabulary
            return f"<id {token_id}>"
        if token_id in self._special:
            return str(raw)
        text = str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
        if _REPLACEMENT not in text:
            # SentencePiece drops a leading space when it decodes a token alone.
            return " " + text if raw.startswith("▁") and not text.startswith(" ") else text
        data = _byte_level(raw)
        return f"<{' '.join(f'0x{byte:02X}' for byte in data)}>" if data else str(raw)


def _byte_level(raw: str) -> bytes | None:
    """Bytes of a byte-level BPE token (GPT-2's printable alphabet), None for another kind of token."""
    table = _byte_alphabet()
    return bytes(table[char] for char in raw) if all(char in table for char in raw) else None


def _byte_alphabet() -> dict[str, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}
