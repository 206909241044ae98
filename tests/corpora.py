"""Made-up corpora: no decoding, so they cost milliseconds. Tokens are random, the features the model's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from eagle2.corpus import Conversation, _ShardBuffer, target_identity


def conversations(model: Any, count: int, seed: int = 0) -> Iterator[Conversation]:
    """``count`` conversations of 14 to 40 tokens."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        start, length = (int(torch.randint(4, 10, (), generator=generator)) for _ in range(2))
        length = start + 6 + 2 * length
        tokens = torch.randint(3, model.config.vocab_size, (length,), generator=generator)
        with torch.no_grad():
            features = model.base_model(tokens[None]).last_hidden_state[0].to(torch.bfloat16)
        features[-1] = 0
        yield Conversation(tokens.tolist(), features, start, "invented" if number % 2 else "code", number % 4 > 0)


def write_shard(model: Any, path: Path, count: int = 60, seed: int = 0, name: str = "tiny") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = _ShardBuffer()
    for item in conversations(model, count, seed):
        buffer.add(item)
    buffer.write(path, [], {}, target_identity(name, model))
