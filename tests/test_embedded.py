"""The embedded model with its own head, on real text (mark ``slow``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle2.engine import Engine, Settings
from eagle2.generate import Prefill
from eagle2.head import EagleHead
from eagle2.models import DEFAULT_PRESET, default_head

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
PROMPTS = [
    "Write a short story about a lighthouse keeper.", "10+2=", "10+2", "What is the capital of France?",
    "Write a Python function that reverses a string.", "List five fruits.", "Explain gravity to a child.",
    "Write a haiku about rain.", "Translate 'good morning' into French.", "What is 7 times 8?",
    "Give me three tips for better sleep.", "Who was Ada Lovelace?", "Describe a sunset in two sentences.",
    "Write an email that declines an invitation.", "How do I boil an egg?", "Name the planets of the solar system.",
    "def fibonacci(n):", "Say hello in five languages.", "Why is the sky blue?", "Summarize: The cat sat on the mat.",
    "\n\n  spaces   and\ttabs \n", "日本語で挨拶してください。", "🙂🙃 what do these mean?", "<|im_end|> is a control token",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(embedded_model: tuple[Any, Any]) -> Engine:
    folder = default_head(DEFAULT_PRESET)
    assert folder is not None
    model, tokenizer = embedded_model
    head = EagleHead.load(folder, target_config=model.config)
    return Engine(model, tokenizer, head, name=DEFAULT_PRESET, head_name=folder.name)


def ids_of(engine: Engine, prompt: str, settings: Settings, drafted: bool = True) -> tuple[list[int], int]:
    ids: list[int] = []
    passes = 0
    for item in engine.run(engine.encode(prompt), settings, drafted=drafted):
        ids += [item.token] if isinstance(item, Prefill) else item.emitted
        passes += not isinstance(item, Prefill)
    return ids, passes


def test_greedy_text_equals_generate_on_every_prompt(engine: Engine) -> None:
    settings = Settings(max_new_tokens=64, depth=4, top_k=5, total_tokens=12)
    tokens = passes = 0
    for prompt in PROMPTS:
        ids = torch.tensor([engine.encode(prompt)])
        with torch.inference_mode():
            expected = engine.target.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=64
            )[0, ids.shape[1] :].tolist()
        got, steps = ids_of(engine, prompt, settings)
        assert got == expected, prompt
        tokens += len(got) - 1
        passes += steps
    # The head is at work: an untrained one gives 1.0 here.
    assert tokens / passes > 1.5


def test_the_race_is_equal_in_float32_and_counts_alike(engine: Engine) -> None:
    last = list(engine.race(PROMPTS[0], Settings(max_new_tokens=48)))[-1]
    assert last.trace is not None
    assert last.trace.equal
    assert last.trace.tau > 1.2
    assert last.trace.autoregressive is not None
    assert last.trace.autoregressive.target_passes == 47


def test_the_reduced_vocabulary_costs_next_to_nothing(engine: Engine) -> None:
    """The same text by definition; the steps that it takes must not grow by much."""
    assert engine.head.draft_token_ids is not None
    # As the head was loaded: eight bits per weight round its features alike, and its logits in one of the two only.
    reduced, full = (
        Engine(
            engine.target.model, engine.tokenizer, engine.head, name=DEFAULT_PRESET, head_name="x", exact_draft=True,
            full_vocabulary=whole,
        )
        for whole in (False, True)
    )  # fmt: skip
    settings = Settings(max_new_tokens=48, depth=4, top_k=5, total_tokens=12)
    steps = {"reduced": 0, "full": 0}
    for prompt in PROMPTS[:8]:
        texts = []
        for name, one in (("reduced", reduced), ("full", full)):
            ids, passes = ids_of(one, prompt, settings)
            texts.append(ids)
            steps[name] += passes
        assert texts[0] == texts[1], prompt
    assert reduced.vocabulary.size < full.vocabulary.size == engine.target.vocab_size
    assert steps["reduced"] <= 1.05 * steps["full"]


def test_static_tree_gives_the_same_text(engine: Engine) -> None:
    settings = Settings(max_new_tokens=40, tree="static", depth=4, top_k=4, total_tokens=10)
    assert ids_of(engine, PROMPTS[2], settings)[0] == ids_of(engine, PROMPTS[2], settings, drafted=False)[0]


def test_text_is_sane_and_ends_at_the_end_of_turn(engine: Engine) -> None:
    last = list(engine.race("What is the capital of France?", Settings(max_new_tokens=32)))[-1]
    assert "Paris" in last.eagle2.text
    assert last.eagle2.finish_reason == "eos"
    assert last.eagle2.token_ids[-1] == engine.tokenizer.eos_token_id
    assert "<|im_end|>" not in last.eagle2.text


def test_the_embedded_head_is_small_complete_and_described() -> None:
    folder = default_head(DEFAULT_PRESET)
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size < 10_000_000
    card = (folder / "README.md").read_text()
    record = json.loads((folder / "training.json").read_text())
    for word in ("tau", "tokens", "seed", "MT-bench", "Apache-2.0"):
        assert word in card
    assert record["corpus"]["distinct_answer_tokens"] > 1_000_000
    assert record["target"]["name"] == DEFAULT_PRESET
    assert [row["step"] for row in record["curve"]] == sorted(row["step"] for row in record["curve"])


def test_eval_with_worker_processes_from_the_command_line(tmp_path: Path) -> None:
    """As a user calls it: what the workers load must not live in ``__main__``."""
    questions = tmp_path / "q.jsonl"
    questions.write_text("".join(json.dumps({"turns": [prompt]}) + "\n" for prompt in PROMPTS[:3]))
    results = []
    for workers in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-m", "eagle2", "eval", "--questions", str(questions), "--max-new-tokens", "16",
             "--workers", workers, "--json"],
            cwd=ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout)["sets"]["q"])
    assert results[0] == results[1]


def test_command_line_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eagle2", "race", "10+2=", "--max-new-tokens", "16", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["equal"] is True
    assert result["settings"]["target"] == DEFAULT_PRESET
    failed = subprocess.run(
        [sys.executable, "-m", "eagle2", "race", "x", "--model", "/nowhere"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert failed.returncode == 1
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""
