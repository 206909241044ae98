"""Text generation and training, on tiny models."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from eagle2.corpus import (
    PREFILL_TOKENS,
    CorpusConfig,
    CorpusGenerator,
    full_disk_in_a_sentence,
    loop_start,
    write_corpus,
)
from eagle2.head import EagleHead
from eagle2.prompts import KINDS, templated_prompt
from eagle2.train import (
    CorpusData,
    OwnSteps,
    SoftCrossEntropy,
    TrainConfig,
    Trainer,
    batches,
    make_trainer,
    read_log,
)
from tests.corpora import write_shard
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
        features, expected = data.features(index).float(), output.hidden_states[-1][0, :-1]
        torch.testing.assert_close(features, expected, rtol=0.02, atol=0.05)
        if data.greedy[index]:
            first = int(data.answer_starts[index])
            assert torch.equal(output.logits[0, first - 1 : -1].argmax(-1), tokens[first:])
            checked += 1
    assert checked > 3


def test_long_prompts_are_prefilled_as_if_decoded(target: tuple[Any, Any]) -> None:
    """Prompts over PREFILL_TOKENS take another way into the slots; tokens and features are the model's own."""
    model, tokenizer = target
    config = dataclasses.replace(CONFIG, max_prompt=150, long_share=1.0, invented_share=0.0, sampled_answer_share=0.0)
    generator = CorpusGenerator(model, tokenizer, config)
    generator.passages.extend(f"Word {number} is here." for number in range(20))
    with contextlib.closing(generator.run()) as conversations:
        made = list(itertools.islice(conversations, 5))
    assert {item.kind for item in made} <= {"article", "completion", "problem"}
    prefilled = [item for item in made if item.answer_start - len(generator.prefix) > PREFILL_TOKENS]
    assert len(prefilled) >= 4
    for item in prefilled:
        tokens = torch.tensor(item.tokens)
        with torch.inference_mode():
            output = model(tokens[None], output_hidden_states=True)
        torch.testing.assert_close(item.features[:-1].float(), output.hidden_states[-1][0, :-1], rtol=0.02, atol=0.05)
        assert torch.equal(output.logits[0, item.answer_start - 1 : -1].argmax(-1), tokens[item.answer_start :])


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
    with pytest.raises(ValueError, match=r"other settings \(seed\)"):
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
    # A random target's distribution is nearly flat, so what can be learnt here are its features.
    heldout = data.batch(data.split(0.2)[1])
    before = trainer.loss(heldout, None)[1]
    whole = trainer.fit(tmp_path / "whole")
    after = trainer.loss(heldout, None)[1]
    assert all(after[name] < 0.9 * before[name] for name in ("l11", "l12", "l13")), (before, after)
    assert whole["chain_tau"] >= 1
    # The same run cut in two.
    make_trainer(model, data, config).fit(tmp_path / "cut", max_seconds=0)
    resumed = make_trainer(model, data, config).fit(tmp_path / "cut")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert resumed == whole
    EagleHead.load(tmp_path / "whole", target_config=model.config)
    with pytest.raises(ValueError, match=r"other settings or data \(clip\)"):
        make_trainer(model, data, dataclasses.replace(config, clip=1.0)).fit(tmp_path / "cut")


@pytest.mark.parametrize("change", [-1, 1])
def test_epochs_that_pack_into_other_numbers_of_batches(
    target: tuple[Any, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """The order of an epoch decides how many batches it makes; the run is as long as planned, and ends."""
    calls = 0

    def packed(data: CorpusData, rows: list[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
        nonlocal calls
        calls += 1
        assert calls < 20, "the loop does not end"
        groups = list(batches(data, rows, batch_tokens, seed))
        yield from groups if seed in (0, 7000) else groups[:-1] if change < 0 else [*groups, groups[0]]

    data = CorpusData(corpus)
    config = TrainConfig(epochs=2, batch_tokens=800, heldout=0.2, loss_vocab=64, own_steps=1, seed=7)
    monkeypatch.setattr("eagle2.train.batches", packed)
    trainer = make_trainer(target[0], data, config)
    trainer.fit(tmp_path)
    steps = 2 * len(list(batches(data, data.split(0.2)[0], 800, 0)))
    assert [int(row["step"]) for row in read_log(tmp_path)] == [steps]


def test_the_loss_looks_at_drafted_answer_tokens_only(corpus: Path) -> None:
    data = CorpusData(corpus)
    batch = data.batch([0, 1, 2])
    wanted = batch.targets()
    for row in range(3):
        start, length = int(batch.answer_starts[row]), int(batch.lengths[row])
        # Position i is trained to give feature i + 1, which decides token i + 2.
        assert wanted[row].nonzero()[:, 0].tolist() == list(range(start - 1, length - 2))


def test_a_run_can_start_from_a_head_and_draft_a_part_of_the_vocabulary(
    target: tuple[Any, Any], corpus: Path, tmp_path: Path
) -> None:
    model, _ = target
    data = CorpusData(corpus)
    tiny_head(model).save(tmp_path / "old", dtype=torch.float32)
    config = TrainConfig(
        epochs=0.01, warmup_steps=0, learning_rate=1e-9, heldout=0.2, init=str(tmp_path / "old"), draft_vocab=40
    )
    trainer = make_trainer(model, data, config)
    trainer.fit(tmp_path / "run")
    old, new = EagleHead.load(tmp_path / "old"), EagleHead.load(tmp_path / "run")
    for name, value in old.state_dict().items():
        torch.testing.assert_close(new.state_dict()[name], value, rtol=1e-2, atol=1e-4)  # float16 on disk
    assert new.draft_token_ids is not None
    assert new.draft_token_ids.tolist() == data.frequent_tokens(40, {model.generation_config.eos_token_id}).tolist()
    with pytest.raises(ValueError, match="hidden_size"):
        make_trainer(tiny_model(vocab_size=model.config.vocab_size, hidden_size=96), data, config)


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


SMALL = TrainConfig(epochs=3, batch_tokens=400, warmup_steps=3, heldout=0.2, loss_vocab=64, ema=0.9)


@pytest.fixture(scope="module")
def made_up(target: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made-up")
    write_shard(target[0], folder / "shard-00000.safetensors", 60)
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", ["bf16", "no"])
def test_two_runs_and_one_cut_by_a_signal_give_the_same_bits(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    data = CorpusData(made_up)

    def run(name: str, **arguments: Any) -> dict[str, float]:
        trainer = make_trainer(target[0], data, SMALL, precision=precision)
        return trainer.fit(tmp_path / name, evaluate_every=4, **arguments)

    figures = run("a")
    assert run("b") == figures
    assert run("b") == figures  # nothing left to do
    loss, calls = Trainer.loss, []

    def loss_with_ctrl_c(self: Trainer, *arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGINT)  # in the middle of a step
        return loss(self, *arguments)

    monkeypatch.setattr(Trainer, "loss", loss_with_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        run("cut", save_every=1e9)
    assert len(calls) == 5
    assert torch.load(tmp_path / "cut" / "checkpoint.pt")["step"] == 5
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert run("cut") == figures
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert same(weights(tmp_path / "a"), weights(tmp_path / "cut"))
    logs = [[{k: v for k, v in row.items() if k != "seconds"} for row in read_log(tmp_path / n)] for n in ("a", "cut")]
    assert logs[0] == logs[1]
    assert [int(row["step"]) for row in logs[0]][:2] == [4, 8]
    assert float(logs[0][-1]["heldout_chain_tau"]) == pytest.approx(figures["chain_tau"], rel=1e-4)
    assert float(logs[0][0]["tokens"]) < float(logs[0][-1]["tokens"])


def test_log_rows_behind_the_checkpoint_come_again_once(target: tuple[Any, Any], made_up: Path, tmp_path: Path) -> None:
    data = CorpusData(made_up)
    make_trainer(target[0], data, SMALL).fit(tmp_path, evaluate_every=4, max_seconds=0)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,9\n")  # of a session that was killed before its next checkpoint
    make_trainer(target[0], data, SMALL).fit(tmp_path, evaluate_every=4)
    steps = [int(row["step"]) for row in read_log(tmp_path)]
    assert steps == sorted(set(steps))


def test_tensorboard_gets_every_figure_where_it_is_installed(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Writer:
        scalars: ClassVar[dict[str, int]] = {}

        def __init__(self, folder: Path, purge_step: int) -> None:
            assert (folder.parent, purge_step) == (tmp_path, 0)

        def add_scalar(self, key: str, value: float, step: int) -> None:
            self.scalars[key] = step

        def close(self) -> None:
            self.scalars["closed"] = 1

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    make_trainer(target[0], CorpusData(made_up), SMALL).fit(tmp_path, max_seconds=0)
    assert Writer.scalars["loss"] == Writer.scalars["heldout_accept_1"] == 1
    assert Writer.scalars["closed"] == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"),
    ],
)
def test_a_full_disk_leaves_the_last_checkpoint(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    data = CorpusData(made_up)
    make_trainer(target[0], data, SMALL).fit(tmp_path, max_seconds=0)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state: Any, file: Any) -> None:
        file.write(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"^the disk under .* is full; .* start again"):
            make_trainer(target[0], data, SMALL).fit(tmp_path, save_every=0)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))
    make_trainer(target[0], data, SMALL).fit(tmp_path)


def test_really_full_devices_are_recognised() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="is full"), full_disk_in_a_sentence(Path("x")), open("/dev/full", "wb") as file:
        torch.save({"a": torch.zeros(100_000)}, file)


def test_a_damaged_checkpoint_and_a_loss_that_is_no_number(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = CorpusData(made_up)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match=r"checkpoint\.pt cannot be read .*; delete it") as caught:
        make_trainer(target[0], data, SMALL).fit(tmp_path)
    assert "\n" not in str(caught.value)
    trainer = make_trainer(target[0], data, SMALL)
    trainer.head.fc.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="not finite at step 0"):
        trainer.fit(tmp_path / "new")
    assert not (tmp_path / "new" / "checkpoint.pt").exists()


WORKER = """
import sys
from collections.abc import Iterator
from pathlib import Path
import torch
from eagle2.train import CorpusData, TrainConfig, make_accelerator, make_trainer
from tests.test_train import DISTRIBUTED, GROUP
from tests.tiny import byte_tokenizer, tiny_model
out, corpus = Path(sys.argv[1]), Path(sys.argv[2])
model = tiny_model(vocab_size=len(byte_tokenizer()), max_position_embeddings=256, initializer_range=0.12)
accelerator = make_accelerator("no", "cpu")
trainer = make_trainer(model, CorpusData(corpus), DISTRIBUTED, precision="no", accelerator=accelerator)
assert accelerator.num_processes == int(sys.argv[3])
loss, _ = trainer._gradients(GROUP, 0)
if accelerator.is_main_process:
    out.mkdir(exist_ok=True)  # the other process may have come to `fit` already
    torch.save({"loss": loss, "grads": [p.grad for p in trainer.head.parameters()]}, out / "gradients.pt")
trainer.fit(out, evaluate_every=2)
accelerator.end_training()
"""
# Noise is drawn for each process's share, so it is off where one process is compared with two.
DISTRIBUTED = dataclasses.replace(SMALL, noise=0.0, epochs=1)
GROUP = [0, 1, 2, 5, 9]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_two_processes_equal_one(target: tuple[Any, Any], made_up: Path, tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = {
        "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"],
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2"],
    }[launcher]
    run = [sys.executable, "-m", *command, str(script), str(tmp_path / "two"), str(made_up), "2"]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    trainer = make_trainer(target[0], CorpusData(made_up), DISTRIBUTED, precision="no")
    loss, _ = trainer._gradients(GROUP, 0)
    two = torch.load(tmp_path / "two" / "gradients.pt")
    assert loss == pytest.approx(two["loss"], rel=1e-5)
    for parameter, gradient in zip(trainer.head.parameters(), two["grads"]):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    one = trainer.fit(tmp_path / "one", evaluate_every=2)
    rows = [read_log(tmp_path / name) for name in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) > 1
    for single, double in zip(*rows):
        for key in ("loss", "heldout_ce", "heldout_chain_tau", "tokens", "step"):
            assert float(single[key]) == pytest.approx(float(double[key]), rel=1e-3), key
    assert one["chain_tau"] == pytest.approx(float(rows[1][-1]["heldout_chain_tau"]), rel=1e-3)


def test_stages_resume_compare_settings_and_measure_tau(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from eagle2 import models, stages
    from eagle2.__main__ import main

    for module in (stages, models):
        monkeypatch.setattr(module, "load_model", lambda *args, **kwargs: target)
    out = tmp_path / "out"
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"turns": ["Hello?"]}\n{"turns": ["10+2="]}\n')
    config = tmp_path / "recipe.toml"
    config.write_text(
        f'out = "{out}"\ncorpus_folders = ["{made_up}"]\n'
        "[train]\nepochs = 1\nbatch_tokens = 400\nwarmup_steps = 3\nheldout = 0.2\nloss_vocab = 64\n"
        f'[evaluate]\nquestions = ["{questions}"]\ndepth = 2\ntop_k = 3\ntotal_tokens = 4\nmax_new_tokens = 8\n'
    )
    command = ["train", "--config", str(config)]
    assert main([*command, "--stage", "evaluate"]) == 1
    assert "no training to evaluate" in capsys.readouterr().err
    assert main([*command, "--stage", "train", "--json"]) == 0
    assert "tau" not in json.loads(capsys.readouterr().out)
    assert main([*command, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((out / "head" / "training.json").read_text())
    assert record["tau"]["sets"]["q"]["tau"] >= 1
    assert record["corpus"]["conversations"] == 60
    assert record["curve"][-1]["heldout_chain_tau"] == pytest.approx(record["heldout"]["chain_tau"], rel=1e-4)
    EagleHead.load(out / "head", target_config=target[0].config)
    # The same again from the settings in the folder; nothing is made anew.
    monkeypatch.setattr(stages, "evaluate_sets", lambda *args, **kwargs: pytest.fail("measured before"))
    assert main(["train", "--out", str(out)]) == 0
    assert "tau" in capsys.readouterr().out
    assert main(["train", "--out", str(out), "--learning-rate", "0.5"]) == 1
    assert "settings.json: train.learning_rate was 0.0015, now 0.5; choose another out" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--set", "train.epoch=1"]) == 1
    assert "unknown key train.epoch;" in capsys.readouterr().err
    assert main(["train"]) == 1
    assert "there is no out folder" in capsys.readouterr().err
    assert main(["train", "--out", str(out), "--mixed-precision", "fp16", "--device", "cpu"]) == 1


def test_ctrl_c_says_how_to_go_on(
    target: tuple[Any, Any], made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from eagle2 import stages
    from eagle2.__main__ import main

    monkeypatch.setattr(stages, "load_model", lambda *args, **kwargs: target)
    loss = Trainer.loss

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return loss(self, *arguments)

    monkeypatch.setattr(Trainer, "loss", interrupted)
    arguments = ["train", "--out", str(tmp_path / "o"), "--corpus-folder", str(made_up), "--heldout", "0.2"]
    assert main(arguments) == 130
    assert f"kept in {tmp_path / 'o'}; the same command goes on" in capsys.readouterr().err
    assert (tmp_path / "o" / "run" / "checkpoint.pt").exists()


def test_command_line_trains_end_to_end(
    target: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from eagle2 import stages
    from eagle2.__main__ import main

    monkeypatch.setattr(stages, "load_model", lambda *args, **kwargs: target)
    out = tmp_path / "out"
    arguments = ["train", "--out", str(out), "--answer-tokens", "2500", "--slots", "16", "--epochs", "1", "--json"]
    arguments += ["--heldout", "0.45"]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out)["heldout"]
    assert figures["chain_tau"] >= 1
    record = json.loads((out / "head" / "training.json").read_text())
    assert record["corpus"]["answer_tokens"] >= 2500
    EagleHead.load(out / "head", target_config=target[0].config)
    shutil.rmtree(out / "run")
    assert main(arguments) == 0  # the text is there already
    assert json.loads(capsys.readouterr().out)["heldout"] == figures
