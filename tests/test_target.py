"""The target adapter: a tree pass equals causal passes, a committed cache equals a fresh one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MistralConfig, Qwen2Config, Qwen3Config

from eagle2.target import ContextLengthError, HuggingFaceForward, Target, UnsupportedModelError
from eagle2.tree import DraftTree
from tests.tiny import VOCAB, tiny_model

PROMPT = [5, 9, 41, 33, 8, 20]
TREE = DraftTree(
    torch.tensor([7, 11, 12, 13, 14, 15, 16]),
    (-1, 0, 0, 1, 1, 2, 4),
    torch.full((7,), 0.5),
    -torch.arange(7).float(),
)


def path(tree: DraftTree, node: int) -> list[int]:
    nodes = [node]
    while nodes[0]:
        nodes.insert(0, tree.parents[nodes[0]])
    return nodes


def small(kind: type, **more: Any) -> Any:
    torch.manual_seed(4)
    common: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "initializer_range": 0.3,
    }  # fmt: skip
    return AutoModelForCausalLM.from_config(kind(**(common | more))).eval()


MODELS = {
    "llama": lambda: tiny_model(),
    "llama untied, biased": lambda: tiny_model(tie_word_embeddings=False, attention_bias=True),
    "mistral": lambda: small(MistralConfig, num_key_value_heads=2, head_dim=8, sliding_window=None),
    "qwen2": lambda: small(Qwen2Config, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": lambda: small(Qwen3Config, num_key_value_heads=2, head_dim=8),
    "gpt-neox": lambda: small(GPTNeoXConfig),
}


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_tree_logits_equal_causal_logits_of_every_branch(name: str, lean: bool) -> None:
    model = MODELS[name]()
    target = Target(model, lean=lean)
    assert (target.why_not_lean is None) is (lean and name != "gpt-neox")
    target.prefill(PROMPT, 64)
    output = target.forward(TREE)
    assert output.logits.shape == (7, VOCAB)
    assert output.hidden.shape == (7, 32)
    for node in range(len(TREE)):
        branch = [int(TREE.token_ids[n]) for n in path(TREE, node)]
        with torch.inference_mode():
            expected = model(torch.tensor([[*PROMPT, *branch]]), output_hidden_states=True)
        torch.testing.assert_close(output.logits[node], expected.logits[0, -1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.hidden[node], expected.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [(0,), (0, 1), (0, 2, 5), (0, 1, 4, 6)])
def test_committed_cache_equals_a_fresh_prefill(rows: tuple[int, ...]) -> None:
    model = tiny_model()
    target = Target(model, lean=False)
    target.prefill(PROMPT, 64)
    target.forward(TREE)
    target.commit(rows)
    kept = [int(TREE.token_ids[row]) for row in rows]
    assert target.length == len(PROMPT) + len(rows)
    fresh = target.fork()
    fresh.prefill([*PROMPT, *kept], 64)
    assert isinstance(target._runs, HuggingFaceForward)
    assert isinstance(fresh._runs, HuggingFaceForward)
    for mine, theirs in zip(target._runs.layers, fresh._runs.layers):
        length = target.length
        torch.testing.assert_close(mine.keys[:, :, :length], theirs.keys[:, :, :length], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values[:, :, :length], theirs.values[:, :, :length], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(target.forward(TREE).logits, fresh.forward(TREE).logits, rtol=1e-4, atol=1e-4)


def test_chunked_prefill_equals_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    prompt = torch.randint(3, VOCAB, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Target(model).prefill(prompt, 60)
    monkeypatch.setattr("eagle2.target.PREFILL_CHUNK", 7)
    parts = Target(model).prefill(prompt, 60)
    torch.testing.assert_close(parts.logits, whole.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts.hidden, whole.hidden, rtol=1e-4, atol=1e-4)


def test_forks_do_not_share_a_cache() -> None:
    target = Target(tiny_model())
    target.prefill(PROMPT, 64)
    before = target.forward(TREE).logits
    other = target.fork()
    other.prefill([3, 4], 64)
    other.forward(TREE)
    assert torch.equal(target.forward(TREE).logits, before)


def test_prompts_around_the_context_length() -> None:
    target = Target(tiny_model())
    for length in (126, 127):
        assert target.prefill([5] * length, length + 1).logits.shape == (1, VOCAB)
    for length in (128, 129, 512):
        with pytest.raises(ContextLengthError, match=f"{length} tokens.*128"):
            target.prefill([5] * length, length + 1)
    with pytest.raises(ValueError, match="empty"):
        target.prefill([], 4)


def test_misuse_is_refused() -> None:
    target = Target(tiny_model())
    target.prefill(PROMPT, len(PROMPT) + 3)
    with pytest.raises(ValueError, match="cache has 9 rows, this pass needs 13"):
        target.forward(TREE)
    with pytest.raises(ValueError, match="last pass"):
        target.commit([0])


def test_models_without_full_attention_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="sliding window of 16"):
        Target(small(MistralConfig, num_key_value_heads=2, head_dim=8, sliding_window=16))
    layers = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "num_key_value_heads": 2}
    with pytest.raises(UnsupportedModelError, match="full attention"):
        Target(small(Qwen2Config, **layers))
