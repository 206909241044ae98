"""Text generation and training, on tiny models."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from eagle2.corpus import CorpusConfig, CorpusGenerator, loop_start, write_corpus
from eagle2.head import EagleHead
from eagle2.prompts import KINDS, templated_prompt
from eagle2.train import CorpusData, OwnSteps, SoftCrossEntropy, TrainConfig, batches, make_trainer
from tests.tiny import byte_tokenizer, tiny_head, tiny_model

CONFIG = CorpusConfig(answer_tokens=2000, slots=8, max_prompt=60, max_answer=24, seed=3)


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer()
    # One token in ten ends a turn, so that some invented prompts are finished.
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.12)
    return model, tokenizer


@pytest.fixture(scope="module")
def corpus(target: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(*target, CONFIG, folder)
    return folder


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], None),
        ([9, *[5] * 12], 2),
        ([9, *[5] * 11], None),
        ([7, 8, *[1, 2, 3, 4, 5] * 3], 7),
        ([7, 8, *[1, 2, 3, 4, 5] * 2], None),
        ([*[1, 2, 3, 4, 5] * 3, 6], None),
    ],
)
def test_loop_start(tokens: list[int], start: int | None) -> None:
    assert loop_start(tokens) == start


def test_generated_conversations_are_the_targets_own(target: tuple[Any, Any], corpus: Path) -> None:
    """Tokens decoded in slots, and their features, equal a plain pass of the model over each conversation."""
    model, _ = target
    data = CorpusData(corpus)
    assert int((data.lengths - data.answer_starts).sum()) >= CONFIG.answer_tokens
    checked = 0
    for index in range(0, len(data.lengths), 3):
        start, length = int(data.offsets[index]), int(data.lengths[index])
        tokens = data.token_ids[start : start + length]
        with torch.inference_mode():
            output = model(tokens[None], output_hidden_states=True)
        features, expected = data.features[start : start + length - 1].float(), output.hidden_states[-1][0, :-1]
        torch.testing.assert_close(features, expected, rtol=0.02, atol=0.05)
        if data.greedy[index]:
            first = int(data.answer_starts[index])
            assert torch.equal(output.logits[0, first - 1 : -1].argmax(-1), tokens[first:])
            checked += 1
    assert checked > 3


def test_both_kinds_of_prompt_and_of_answer_occur(corpus: Path) -> None:
    from safetensors import safe_open

    with safe_open(next(corpus.glob("shard-*")), "pt") as file:
        kinds = json.loads(file.metadata()["kinds"])
        greedy = file.get_tensor("greedy")
    assert "invented" in kinds
    assert len(set(kinds) & set(KINDS)) >= 4
    assert 0 < int(greedy.sum()) < len(greedy)


def test_no_prompt_is_answered_twice_in_the_same_way(target: tuple[Any, Any]) -> None:
    generator = CorpusGenerator(*target, CONFIG)
    assert generator._is_new([10, 11, 12], greedy=True)
    assert not generator._is_new([10, 11, 12], greedy=True)
    assert generator._is_new([10, 11, 12], greedy=False)


def test_generation_goes_on_where_it_was_cut(
    target: tuple[Any, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle2.corpus.SHARD_TOKENS", 700)
    folder = tmp_path / "c"
    write_corpus(*target, dataclasses.replace(CONFIG, answer_tokens=600), folder)
    first = {p.name: p.read_bytes() for p in folder.glob("shard-*.safetensors")}
    (folder / "shard-99999.partial").write_bytes(b"cut off")
    write_corpus(*target, dataclasses.replace(CONFIG, answer_tokens=1200), folder)
    shards = sorted(folder.glob("shard-*.safetensors"))
    assert len(shards) > len(first)
    assert all((folder / name).read_bytes() == content for name, content in first.items())
    write_corpus(*target, dataclasses.replace(CONFIG, answer_tokens=1200), folder)  # nothing left to do
    assert sorted(folder.glob("shard-*.safetensors")) == shards
    with pytest.raises(ValueError, match="other settings"):
        write_corpus(*target, dataclasses.replace(CONFIG, seed=4), folder)


def test_the_split_is_by_prompt_and_stable(corpus: Path) -> None:
    data = CorpusData(corpus)
    train, held = data.split(0.2)
    assert sorted(train + held) == list(range(len(data.lengths)))
    assert held
    prompt = {
        i: tuple(data.token_ids[int(data.offsets[i]) : int(data.offsets[i]) + int(data.answer_starts[i])].tolist())
        for i in (*train, *held)
    }
    assert not {prompt[i] for i in train} & {prompt[i] for i in held}


def test_batches_cover_an_epoch_once(corpus: Path) -> None:
    data = CorpusData(corpus)
    rows = list(range(len(data.lengths)))
    groups = list(batches(data, rows, 512, 1))
    assert sorted(i for group in groups for i in group) == rows
    assert all(len(g) * int(data.lengths[g].max()) <= 512 or len(g) == 1 for g in groups)
    assert groups == list(batches(data, rows, 512, 1))
    assert groups != list(batches(data, rows, 512, 2))


def test_own_steps_equal_drafting_one_position_at_a_time() -> None:
    """Pass s at position i is what the head gives for a path of s - 1 drafted tokens that begins at i - s + 1."""
    model = tiny_model()
    head = tiny_head(model)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 90, (1, 12), generator=generator)
    features = torch.randn(1, 12, 32, generator=generator)
    embeds = model.get_input_embeddings()(tokens).detach()
    passes = OwnSteps(head, embeds)
    inputs, outputs = features, []
    for _ in range(4):
        outputs.append(passes.run(inputs))
        inputs = torch.cat((features[:, :1], outputs[-1][:, :-1]), 1)
    for step in range(4):
        for position in range(step, 12):
            # The target's features up to the path's begin, then the head's own outputs.
            mixed = features[:, : position - step + 1].clone()
            for at in range(position - step + 1, position + 2):
                output = head(embeds[:, :at], mixed, torch.arange(at)[None])
                mixed = torch.cat((mixed, output[:, -1:]), 1)
            torch.testing.assert_close(outputs[step][0, position], output[0, -1], rtol=1e-4, atol=1e-5)


def test_soft_cross_entropy_equals_torchs_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SoftCrossEntropy, "CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=generator, requires_grad=True)
    rows = torch.randn(30, 16, generator=generator)
    probs = torch.randn(20, 30, generator=generator).softmax(-1)
    expected = F.cross_entropy(F.linear(hidden, rows), probs)
    (wanted,) = torch.autograd.grad(expected * 3, hidden)
    loss = SoftCrossEntropy.apply(hidden, rows, probs)
    (got,) = torch.autograd.grad(loss * 3, hidden)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(got, wanted)


def test_training_teaches_resumes_exactly_and_saves_a_loadable_head(
    target: tuple[Any, Any], corpus: Path, tmp_path: Path
) -> None:
    model, _ = target
    data = CorpusData(corpus)
    config = TrainConfig(epochs=4, batch_tokens=512, warmup_steps=5, heldout=0.2, loss_vocab=128, ema=0.9, hard_share=0)
    trainer = make_trainer(model, data, config)
    with pytest.raises(ValueError, match="too small"):
        make_trainer(model, data, dataclasses.replace(config, heldout=1e-9)).fit(tmp_path / "none")
    before = trainer.evaluate(trainer.head, data.split(0.2)[1])
    whole = trainer.fit(tmp_path / "whole")
    assert whole["ce"] < before["ce"]
    assert whole["chain_tau"] >= 1
    # The same run cut in two.
    make_trainer(model, data, config).fit(tmp_path / "cut", max_seconds=0)
    resumed = make_trainer(model, data, config).fit(tmp_path / "cut")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed == whole
    EagleHead.load(tmp_path / "whole", target_config=model.config)
    with pytest.raises(ValueError, match="other settings"):
        make_trainer(model, data, dataclasses.replace(config, clip=1.0)).fit(tmp_path / "cut")


def test_the_loss_looks_at_drafted_answer_tokens_only(corpus: Path) -> None:
    data = CorpusData(corpus)
    batch = data.batch([0, 1, 2])
    wanted = batch.targets()
    for row in range(3):
        start, length = int(batch.answer_starts[row]), int(batch.lengths[row])
        # Position i is trained to give feature i + 1, which decides token i + 2.
        assert wanted[row].nonzero()[:, 0].tolist() == list(range(start - 1, length - 2))


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no shards"):
        CorpusData(tmp_path)


def test_templates_make_many_different_prompts_of_every_kind() -> None:
    import random

    rng = random.Random(0)
    made = [templated_prompt(rng, ["Some text."]) for _ in range(3000)]
    assert {kind for kind, _ in made} == set(KINDS)
    assert len({text for _, text in made}) > 2500
    assert not any("{" in text.replace("{c}", "") and "}" in text and "{t}" in text for _, text in made)


def test_command_line_trains_end_to_end(
    target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle2 import train
    from eagle2.__main__ import main

    monkeypatch.setattr(train, "load_model", lambda *args, **kwargs: target)
    out = tmp_path / "out"
    arguments = ["train", "--out", str(out), "--answer-tokens", "2500", "--slots", "16", "--epochs", "1", "--json"]
    arguments += ["--heldout", "0.45"]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["chain_tau"] >= 1
    record = json.loads((out / "head" / "training.json").read_text())
    assert record["answer_tokens"] >= 2500
    EagleHead.load(out / "head", target_config=target[0].config)
    shutil.rmtree(out / "run")
    assert main(arguments) == 0  # the text is there already
    assert json.loads(capsys.readouterr().out) == figures
