"""Tiny random models and adversarial drafters: no downloads, a few milliseconds each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from eagle2.draft import Proposal
from eagle2.head import EagleHead, HeadConfig
from eagle2.tree import DraftTree

VOCAB = 96
EOS = 2

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def tiny_config(**changes: Any) -> LlamaConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0, "initializer_range": 0.3,
    }  # fmt: skip
    return LlamaConfig(**(settings | changes))


def tiny_model(seed: int = 0, **changes: Any) -> Any:
    """A random Llama in float32. Its distributions are peaked enough to loop rarely and flat enough to be no constant."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(**changes)).eval()
    model.generation_config.eos_token_id = EOS
    return model


def tiny_head(model: Any, seed: int = 1) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(HeadConfig.for_target(model.config))
    return head.eval().requires_grad_(False)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, behind three control tokens: 259 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {char: i + 3 for i, char in enumerate(alphabet)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def reference(model: Any, prompt: Sequence[int], count: int, **arguments: Any) -> list[int]:
    """Greedy ids of Hugging Face ``generate``."""
    ids = torch.tensor([list(prompt)])
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": count, "pad_token_id": 0} | arguments
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    result: list[int] = out[0, len(prompt) :].tolist()
    return result


def chain_tree(root: int, tokens: Sequence[int]) -> DraftTree:
    n = len(tokens) + 1
    return DraftTree(
        torch.tensor([root, *tokens]), (-1, *range(n - 1)), torch.full((n,), 0.5), -0.7 * torch.arange(n).float()
    )


class ScriptedDrafter:
    """Drafts what ``script(committed ids, root)`` returns as a chain: an oracle, or its opposite."""

    needs_hidden = False

    def __init__(self, script: Any) -> None:
        self.script = script

    def reset(self, capacity: int) -> None:
        self.ids: list[int] = []

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        assert hidden is None, "a drafter without needs_hidden is not shown features"

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        tokens = self.script(self, root)[: min(max_depth, max_nodes)]
        self.ids += [root]
        return Proposal(chain_tree(root, tokens), tuple(range(1, len(tokens) + 1)))


def oracle(answer: Sequence[int], wrong: int = 0) -> ScriptedDrafter:
    """Knows the answer; with ``wrong`` every token is off by that much, so nothing is ever accepted."""
    answer = list(answer)

    def script(drafter: ScriptedDrafter, root: int) -> list[int]:
        at = drafter.at = getattr(drafter, "at", 0)
        while at < len(answer) and answer[at] != root:
            at += 1
        return [(token + wrong) % VOCAB for token in answer[at + 1 : at + 6]]

    return ScriptedDrafter(script)


class RandomDrafter:
    """Random trees of random shape, deterministic in value order, with features it does not need."""

    needs_hidden = True

    def __init__(self, seed: int, vocab: int = VOCAB) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.seen = 0

    def reset(self, capacity: int) -> None:
        self.seen = 0

    def observe(self, token_ids: Sequence[int], hidden: Tensor | None) -> None:
        assert hidden is not None
        assert len(hidden) == len(token_ids)
        self.seen += len(token_ids)

    def propose(self, root: int, max_depth: int, max_nodes: int) -> Proposal:
        count = min(int(torch.randint(0, 9, (), generator=self.generator)), max_nodes)
        parents, depths, tokens, values = [-1], [0], [root], [0.0]
        for _ in range(count):
            parent = int(torch.randint(0, len(parents), (), generator=self.generator))
            token = int(torch.randint(0, self.vocab, (), generator=self.generator))
            taken = {t for t, p in zip(tokens, parents) if p == parent}
            if depths[parent] >= max_depth or token in taken:
                continue
            parents.append(parent)
            depths.append(depths[parent] + 1)
            tokens.append(token)
            values.append(values[parent] - float(torch.rand((), generator=self.generator)))
        n = len(tokens)
        tree = DraftTree(torch.tensor(tokens), tuple(parents), torch.full((n,), 0.5), torch.tensor(values))
        return Proposal(tree, tuple(range(1, n)))
