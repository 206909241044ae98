"""Shards on disk: what a full disk, a cut, damage and another target do to them, and what a corpus consists of."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle2 import corpus
from eagle2.corpus import CorpusConfig, CorpusError, plan_corpus, read_metadata, shard_files, target_identity
from eagle2.stats import corpus_stats, distinct_ngrams, kinds_of_text
from eagle2.train import CorpusData
from tests.corpora import conversations, write_shard
from tests.tiny import byte_tokenizer, tiny_model

CONFIG = CorpusConfig(answer_tokens=300, slots=4, max_prompt=60, max_answer=24)


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer()
    return tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256), tokenizer


@pytest.fixture
def made_up(target: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator yields made-up conversations, different ones for each seed."""

    def run(self: Any) -> Iterator[Any]:
        for item in conversations(self.model, 10_000, seed=self.rng.randint(0, 10**6)):
            self.seen[bytes(12 * [len(self.seen) % 256])] = None
            yield item

    monkeypatch.setattr(corpus.CorpusGenerator, "run", run)


@pytest.mark.usefixtures("made_up")
def test_a_full_disk_costs_the_shard_under_way_only(
    target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "SHARD_TOKENS", 200)
    calls = []

    def save(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half a shard")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(corpus, "save_file", save)
    with pytest.raises(OSError, match=r"^the disk under .* is full; .* start again to go on$"):
        corpus.write_corpus(*target, CONFIG, tmp_path)
    (first,) = shard_files(tmp_path)
    content = first.read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    corpus.write_corpus(*target, CONFIG, tmp_path)
    assert first.read_bytes() == content
    assert CorpusData(tmp_path).answer_tokens >= CONFIG.answer_tokens


@pytest.mark.usefixtures("made_up")
def test_slow_shards_are_closed_by_time(
    target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "SHARD_SECONDS", -1.0)
    corpus.write_corpus(*target, CONFIG, tmp_path)
    assert len(shard_files(tmp_path)) == len(CorpusData(tmp_path).lengths) > 3


def test_ctrl_c_keeps_finished_conversations(
    target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any) -> Iterator[Any]:
        yield from conversations(self.model, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus.CorpusGenerator, "run", run)
    with pytest.raises(KeyboardInterrupt):
        corpus.write_corpus(*target, CONFIG, tmp_path)
    assert len(CorpusData(tmp_path).lengths) == 3


@pytest.mark.usefixtures("made_up")
def test_processes_share_what_is_missing(target: tuple[Any, Any], tmp_path: Path) -> None:
    plans = [plan_corpus(*target, CONFIG, tmp_path, rank=rank, ranks=3) for rank in range(3)]
    assert [plan.missing for plan in plans] == [100, 100, 100]
    for plan in plans:
        plan.run()
    names = [path.name for path in shard_files(tmp_path)]
    assert names == ["shard-00000.safetensors", "shard-r001-00000.safetensors", "shard-r002-00000.safetensors"]
    texts = [load_file(tmp_path / name)["token_ids"] for name in names]
    assert not any(torch.equal(a[:14], b[:14]) for a, b in pairwise(texts))
    assert plan_corpus(*target, CONFIG, tmp_path).missing == 0  # whatever the number of processes
    more = dataclasses.replace(CONFIG, answer_tokens=2000)
    own = [plan_corpus(*target, more, tmp_path, rank=rank, ranks=2).shards for rank in range(2)]
    assert own == [1, 1]


def rewrite(path: Path, **changes: Any) -> None:
    """Change tensors or, with the key metadata, the metadata of a shard."""
    metadata = read_metadata(path) | changes.pop("metadata", {})
    save_file(load_file(path) | changes, path, {k: v for k, v in metadata.items() if v is not None})


def test_damaged_shards_are_named(target: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = target
    identity = target_identity("tiny", model)
    path = tmp_path / "shard-00000.safetensors"
    write_shard(model, path, 5)
    CorpusData(tmp_path, target=identity)
    whole, tensors = path.read_bytes(), load_file(path)
    path.write_bytes(whole[:-100])
    for use in (lambda: CorpusData(tmp_path), lambda: plan_corpus(*target, CONFIG, tmp_path)):
        with pytest.raises(CorpusError, match=r"^the shard .*shard-00000.safetensors is damaged") as caught:
            use()
        assert "\n" not in str(caught.value)
    for change, message in (
        ({"lengths": tensors["lengths"] + 1}, "do not add up"),
        ({"greedy": tensors["greedy"][:-1]}, "do not fit together"),
        ({"token_ids": tensors["token_ids"] + 10_000}, "token ids that the target does not have"),
        ({"metadata": {"kinds": "["}}, "is damaged"),
        ({"metadata": {"format": "other"}}, "is no shard"),
    ):
        path.write_bytes(whole)
        rewrite(path, **change)
        with pytest.raises(CorpusError, match=message):
            CorpusData(tmp_path, target=identity)


def test_features_that_are_not_numbers_are_found(target: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    write_shard(target[0], path, 5)
    features = load_file(path)["features"]
    features[2, 3] = torch.nan
    rewrite(path, features=features)
    data = CorpusData(tmp_path)
    data.batch([1, 2])
    with pytest.raises(CorpusError, match=r"shard-00000.* not numbers"):
        data.batch([1, 0])
    broken = tiny_model(vocab_size=259)
    broken.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(CorpusError, match="another dtype"):
        write_shard(broken, tmp_path / "new" / "shard-00000.safetensors", 2)
    assert not list((tmp_path / "new").iterdir())


def test_another_targets_text_is_refused(target: tuple[Any, Any], tmp_path: Path) -> None:
    model, _ = target
    path = tmp_path / "shard-00000.safetensors"
    for other in (
        tiny_model(seed=5, vocab_size=259),
        tiny_model(vocab_size=260),
        tiny_model(vocab_size=259, hidden_size=16),
    ):
        write_shard(other, path, 3, name="the-other")
        for use in (
            lambda: CorpusData(tmp_path, target=target_identity("tiny", model)),
            lambda: plan_corpus(*target, CONFIG, tmp_path),
        ):
            with pytest.raises(CorpusError, match=r"written by another target, the-other"):
                use()
    rewrite(path, metadata={"target": None})  # as version 1 wrote them: only the width can tell
    with pytest.raises(CorpusError, match="its features have 16 numbers"):
        CorpusData(tmp_path, target=target_identity("tiny", model))
    write_shard(model, path, 3)
    rewrite(path, metadata={"target": None})
    assert len(CorpusData(tmp_path, target=target_identity("tiny", model)).lengths) == 3


def test_the_fingerprint_is_of_the_weights(target: tuple[Any, Any]) -> None:
    one = target_identity("a", tiny_model())
    assert target_identity("a", tiny_model().to(torch.bfloat16)) == one
    changed = tiny_model()
    changed.model.layers[1].mlp.down_proj.weight.data[0, 0] += 1  # a fine-tune that left the embeddings alone
    assert target_identity("a", changed)["fingerprint"] != one["fingerprint"]


def test_a_target_without_chat_template_is_refused(target: tuple[Any, Any], tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(CorpusError, match="no chat template"):
        plan_corpus(target[0], tokenizer, CONFIG, tmp_path)


def test_several_folders_are_one_corpus_and_features_stay_with_their_tokens(
    target: tuple[Any, Any], tmp_path: Path
) -> None:
    for number, folder in enumerate(("a", "a", "b")):
        write_shard(target[0], tmp_path / folder / f"shard-{number:05d}.safetensors", 4, seed=number)
    data = CorpusData(tmp_path / "a", tmp_path / "b")
    expected = [item for number in range(3) for item in conversations(target[0], 4, number)]
    assert len(data.lengths) == len(data.kinds) == 12
    batch = data.batch(list(range(12)))
    for row, item in enumerate(expected):
        assert batch.tokens[row, : len(item.tokens)].tolist() == item.tokens
        assert torch.equal(batch.features[row, : len(item.tokens)], item.features)
        assert torch.equal(data.features(row), item.features[:-1])
        assert data.kinds[row] == item.kind
    with safe_open(data.shards[0], "pt") as file:
        assert data._features[0].data_ptr() != 0
        assert file.get_tensor("features").shape[1] == data.width


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("The lake was calm. In 2021-2022 it froze twice, at -5 degrees.", {"prose"}),
        ("Use this:\n```\nx\n```", {"code"}),
        ("def f(x):\n    return x", {"code"}),
        ("import the goods.\nWe return later.", {"prose"}),
        ("12 + 30 = 42 apples", {"arithmetic"}),
        ("She pays $5 * 3, so 5 x 3 = $15.", {"arithmetic"}),
        ("- a\n- b\n* c", {"list"}),
        ("1. one\n2. two", {"prose"}),
        ("1. 2 + 2 = 4\n2. b\n3. c", {"arithmetic", "list"}),
    ],
)
def test_kinds_of_text(text: str, kinds: set[str]) -> None:
    assert kinds_of_text(text) == kinds


def test_ngrams_are_counted_within_answers() -> None:
    tokens, owner = np.array([1, 2, 1, 2, 1, 2, 3]), np.array([0, 0, 0, 0, 1, 1, 1])
    assert distinct_ngrams(tokens, owner, 1) == pytest.approx((3 / 7, 2 / 7))
    assert distinct_ngrams(tokens, owner, 2) == pytest.approx((3 / 5, 1 / 5))  # 12 21 12 | 12 23
    assert distinct_ngrams(tokens, owner, 4) == (1.0, 0.0)
    assert distinct_ngrams(tokens, owner, 8) == (0.0, 0.0)


def test_statistics_of_a_corpus(target: tuple[Any, Any], tmp_path: Path) -> None:
    write_shard(target[0], tmp_path / "shard-00000.safetensors", 8)
    write_shard(target[0], tmp_path / "shard-00001.safetensors", 8)  # the same again
    stats = corpus_stats(CorpusData(tmp_path), target[1], 0.3)
    assert (stats["conversations"], stats["distinct_conversations"], stats["shards"]) == (16, 8, 2)
    assert stats["answer_tokens"] == 2 * stats["distinct_answer_tokens"]
    assert stats["prompt_kinds"] == {"invented": 0.5, "code": 0.5}
    assert stats["greedy_share"] == 0.75
    assert 0 < stats["heldout_conversations"] < 8
    assert stats["distinct_ngrams"]["4"] > stats["distinct_ngrams"]["1"]
