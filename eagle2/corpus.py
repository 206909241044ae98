"""Training text for a draft head, written by the target itself, with the target's features.

A draft head has to imitate one target on the target's own text, so the text is generated: the target invents prompts
from the bare user header of its chat template (sampled), these are mixed with templated prompts (``prompts.py``), and
the target answers (mostly greedily, partly sampled).  Many conversations are decoded at once; a finished one makes
room for the next at once (continuous batching), and prompts known in advance are fed through the same loop.  The
features (last hidden states after the final norm) fall out of this decoding and are saved with the tokens, so that
training needs no second pass of the target.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers.cache_utils import Cache, CacheLayerMixin

from .prompts import templated_prompt

SHARD_TOKENS = 100_000


@dataclass(frozen=True, slots=True)
class CorpusConfig:
    """Settings of text generation. Lengths are in tokens; shares are fractions of all conversations."""

    answer_tokens: int = 1_000_000
    slots: int = 160
    max_prompt: int = 96
    max_answer: int = 128
    invented_share: float = 0.4
    sampled_answer_share: float = 0.2
    prompt_temperature: float = 1.0
    answer_temperature: float = 0.8
    sample_top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.answer_tokens, self.slots, self.max_prompt, self.max_answer, self.sample_top_k) < 1:
            raise ValueError("answer_tokens, slots, max_prompt, max_answer and sample_top_k must be at least 1")
        if not (0 <= self.invented_share <= 1 and 0 <= self.sampled_answer_share <= 1):
            raise ValueError("invented_share and sampled_answer_share must lie between 0 and 1")


class _SlotLayer(CacheLayerMixin):
    """KV rows of one layer ``[slots, kv_heads, capacity, head_dim]``; every slot writes at its own position."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.position: Tensor  # [slots]
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        slots, heads, _, dim = key_states.shape
        self.keys = key_states.new_zeros(slots, heads, self.capacity, dim)
        self.values = value_states.new_zeros(slots, heads, self.capacity, value_states.shape[-1])
        self.rows = torch.arange(slots, device=key_states.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys[self.rows, :, self.position] = key_states[:, :, 0]
        self.values[self.rows, :, self.position] = value_states[:, :, 0]
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


@dataclass(slots=True)
class _Slot:
    """One conversation under way."""

    kind: str
    forced: deque[int]
    greedy: bool
    tokens: list[int]
    prompt_text: str = ""
    answer_start: int = 0  # index of the first answer token; 0 while the prompt is still open


@dataclass(slots=True)
class Conversation:
    """One finished conversation: ``tokens[:answer_start]`` is the rendered prompt, the rest the answer."""

    tokens: list[int]
    features: (
        Tensor  # [len(tokens), H], bfloat16; row i was computed from tokens[: i + 1], the last row is 0: not needed
    )
    answer_start: int
    kind: str
    greedy: bool


def loop_start(tokens: list[int], longest_period: int = 32, repeats: int = 3) -> int | None:
    """Index from which ``tokens`` only repeats itself (its tail is ``repeats`` equal runs), or None.

    The first run of the loop is not counted as repetition: the returned index is where the second one begins.
    """
    n = len(tokens)
    for period in range(1, longest_period + 1):
        # Short periods need more evidence: "ha ha ha" and "1000000" are text, eight of them are a loop.
        needed = max(repeats * period, 12)
        if n >= needed and tokens[n - needed + period :] == tokens[n - needed : n - period]:
            start = n - needed
            while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
                start -= 1
            return start + period
    return None


class CorpusGenerator:
    """Decodes ``config.slots`` conversations of ``model`` at once and yields them as they finish.

    ``model`` is any causal LM with full attention; it is asked for one row per slot with its own position and mask.
    """

    def __init__(self, model: Any, tokenizer: Any, config: CorpusConfig, round_index: int = 0) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.device = model.get_input_embeddings().weight.device
        self.rng = random.Random(f"{config.seed}/{round_index}")
        self.torch_rng = torch.Generator(device=self.device).manual_seed(config.seed * 1_000_003 + round_index)
        marker = "\u2603"
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
        before, after = rendered.split(marker)
        encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        self.prefix: list[int] = encode(before)
        self.suffix: list[int] = encode(after)  # end of turn and the assistant's header
        self.end_of_turn = self.suffix[0]
        eos = model.generation_config.eos_token_id
        self.eos = set(eos if isinstance(eos, list) else [eos])
        self.special = set(tokenizer.all_special_ids) - self.eos - {self.end_of_turn}
        self.capacity = len(self.prefix) + config.max_prompt + len(self.suffix) + config.max_answer + 1
        self.seen: set[bytes] = set()
        self.passages: deque[str] = deque(maxlen=200)
        self.rejected: dict[str, int] = {}

    def _new_slot(self) -> _Slot:
        greedy = self.rng.random() >= self.config.sampled_answer_share
        if self.rng.random() < self.config.invented_share:
            return _Slot("invented", deque(), greedy, list(self.prefix))
        for _ in range(100):
            kind, text = templated_prompt(self.rng, list(self.passages))
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"][: self.config.max_prompt]
            if self._is_new(ids, greedy):
                break
        forced = deque(ids + self.suffix)
        slot = _Slot(kind, forced, greedy, list(self.prefix), text)
        slot.answer_start = len(self.prefix) + len(forced)
        return slot

    def _is_new(self, ids: list[int], greedy: bool) -> bool:
        # A sampled answer to a prompt already answered greedily is new text; the same greedy answer is not.
        text = self.tokenizer.decode(ids).lower().split()
        key = hashlib.blake2b(f"{greedy} {' '.join(text)}".encode(), digest_size=12).digest()
        if key in self.seen:
            return False
        self.seen.add(key)
        return True

    def _reject(self, why: str) -> None:
        self.rejected[why] = self.rejected.get(why, 0) + 1

    @torch.inference_mode()
    def run(self) -> Iterator[Conversation]:
        """Yield finished conversations for ever; the caller stops when it has enough."""
        slots = self.config.slots
        backbone, lm_head = self.model.base_model, self.model.get_output_embeddings()
        layers = [_SlotLayer(self.capacity) for _ in range(self.model.config.num_hidden_layers)]
        cache = Cache(layers=layers)
        hidden_size = self.model.config.hidden_size
        dtype = self.model.get_input_embeddings().weight.dtype
        features = torch.empty(slots, self.capacity, hidden_size, dtype=torch.bfloat16, device=self.device)
        rows = torch.arange(slots, device=self.device)
        columns = torch.arange(self.capacity, device=self.device)
        position = torch.zeros(slots, dtype=torch.long, device=self.device)
        # All slots start with the same header: it is decoded once, in step, and its KV and features are kept.
        header = torch.tensor(self.prefix, device=self.device)
        state = [self._new_slot() for _ in range(slots)]
        start = len(self.prefix) - 1
        for index in range(start):
            position.fill_(index)
            hidden = self._forward(backbone, cache, layers, header[index].expand(slots), position, columns, dtype)
            features[:, index] = hidden
        position.fill_(start)
        current = header[start].repeat(slots)
        while True:
            hidden = self._forward(backbone, cache, layers, current, position, columns, dtype)
            features[rows, position] = hidden.to(torch.bfloat16)
            logits = lm_head(hidden)  # [slots, V]
            best = logits.argmax(-1)
            drawn = self._sample(logits, state)
            choices = torch.where(drawn >= 0, drawn, best).tolist()
            following, positions = [], []
            for index, slot in enumerate(state):
                token = slot.forced.popleft() if slot.forced else choices[index]
                slot.tokens.append(token)
                finished = self._advance(slot, token)
                if finished is not None:
                    if finished:
                        length = len(slot.tokens)
                        own = features[index, :length].clone()
                        own[-1] = 0  # the last token was never fed
                        yield Conversation(slot.tokens, own, slot.answer_start, slot.kind, slot.greedy)
                    state[index] = self._new_slot()
                    following.append(self.prefix[start])
                    positions.append(start)
                else:
                    following.append(token)
                    positions.append(len(slot.tokens) - 1)
            current = torch.tensor(following, device=self.device)
            position = torch.tensor(positions, device=self.device)

    def _forward(
        self, backbone: Any, cache: Cache, layers: list[_SlotLayer], tokens: Tensor, position: Tensor, columns: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        """Hidden states ``[slots, H]`` of one token per slot at its own ``position [slots]``."""
        length = int(position.max()) + 1
        for layer in layers:
            layer.position, layer.length = position, length
        visible = columns[None, :length] <= position[:, None]
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        mask.masked_fill_(~visible, torch.finfo(dtype).min)
        output = backbone(
            input_ids=tokens[:, None], attention_mask=mask[:, None, None], position_ids=position[:, None], cache=cache,
            use_cache=True,
        )  # fmt: skip
        hidden: Tensor = output.last_hidden_state[:, 0]
        return hidden

    def _sample(self, logits: Tensor, state: list[_Slot]) -> Tensor:
        """Sampled token per slot ``[slots]``, -1 where the slot decodes greedily (or is fed a known prompt)."""
        drawn = torch.full((len(state),), -1, dtype=torch.long, device=logits.device)
        who = [i for i, s in enumerate(state) if not s.forced and (not s.answer_start or not s.greedy)]
        if who:
            at = torch.tensor(who, device=logits.device)
            heat = [
                self.config.answer_temperature if state[i].answer_start else self.config.prompt_temperature for i in who
            ]
            top, ids = logits[at].float().topk(min(self.config.sample_top_k, logits.shape[-1]))
            probs = (top / torch.tensor(heat, device=top.device)[:, None]).softmax(-1)
            drawn[at] = ids.gather(1, torch.multinomial(probs, 1, generator=self.torch_rng))[:, 0]
        return drawn

    def _advance(self, slot: _Slot, token: int) -> bool | None:
        """Move the slot's state on by one token: None = goes on, True = finished, False = thrown away."""
        config = self.config
        if not slot.answer_start:  # the target is inventing a prompt
            length = len(slot.tokens) - len(self.prefix)
            if slot.forced:
                return None
            if token == self.end_of_turn:
                ids = slot.tokens[len(self.prefix) : -1]
                if length < 4 or not self._is_new(ids, slot.greedy):
                    self._reject("prompt repeated or empty")
                    return False
                slot.forced = deque(self.suffix[1:])
                slot.answer_start = len(slot.tokens) + len(slot.forced)
                return None
            if token in self.special or length >= config.max_prompt:
                self._reject("prompt without end")
                return False
            return None
        length = len(slot.tokens) - slot.answer_start
        if length <= 0:
            return None
        answer = slot.tokens[slot.answer_start :]
        loop = None
        done = token in self.eos or token == self.end_of_turn or length >= config.max_answer
        if token in self.special:
            self._reject("control token in the answer")
            return False
        if done or length % 8 == 0:
            loop = loop_start(answer)
            if loop is not None:  # keep what came before the repetition
                self._reject("loop cut")
                del slot.tokens[slot.answer_start + loop :]
                done = True
        if not done:
            return None
        # One-word answers are text; a loop that leaves next to nothing is not.
        if len(slot.tokens) - slot.answer_start < (16 if loop is not None else 2):
            self._reject("answer too short")
            return False
        if slot.kind in ("explain", "letter", "story", "chat"):
            text = self.tokenizer.decode(answer[:90], skip_special_tokens=True)
            self.passages.append(text.rsplit(".", 1)[0] + ".")
        return True


class _PackedLinear(torch.nn.Module):
    """A frozen linear layer with its weight in oneDNN's blocked layout, which saves reordering it in every pass."""

    def __init__(self, linear: torch.nn.Linear, rows: int) -> None:
        super().__init__()
        self.weight = linear.weight  # what `get_output_embeddings().weight` promises
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return result


def pack_linears(model: Any, rows: int) -> None:
    """Repack a frozen bfloat16 CPU model's linear layers for passes of ``rows`` rows, in place; elsewhere do nothing.

    Measured on two cores with AMX, 128 rows: 34 ms a pass instead of 46 (the linear layers alone).
    """
    weight = model.get_input_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child.bias is None:
                setattr(parent, name, _PackedLinear(child, rows))


def write_corpus(model: Any, tokenizer: Any, config: CorpusConfig, folder: Path) -> None:
    """Generate conversations into ``folder`` as safetensors shards until ``config.answer_tokens`` answer tokens exist.

    Resumable: complete shards stay, an interrupted one is made again.  Shards appear by an atomic rename.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "corpus.json"
    fixed = {k: getattr(config, k) for k in config.__slots__ if k not in ("answer_tokens", "slots")}
    if settings.exists() and json.loads(settings.read_text()) != fixed:
        raise ValueError(f"{folder} was generated with other settings; choose another folder or the same settings")
    settings.write_text(json.dumps(fixed, indent=1))
    shards = sorted(folder.glob("shard-*.safetensors"))
    have = sum(int(_metadata(s)["answer_tokens"]) for s in shards)
    generator = CorpusGenerator(model, tokenizer, config, round_index=len(shards))
    for shard in shards:
        generator.seen.update(bytes.fromhex(h) for h in json.loads(_metadata(shard)["seen"]))
    known = len(generator.seen)
    buffer = _ShardBuffer()
    with tqdm(total=config.answer_tokens, initial=have, unit="tok", desc="answers", smoothing=0.05) as bar:
        if have >= config.answer_tokens:
            return
        for conversation in generator.run():
            buffer.add(conversation)
            bar.update(len(conversation.tokens) - conversation.answer_start)
            have += len(conversation.tokens) - conversation.answer_start
            if buffer.total >= SHARD_TOKENS or have >= config.answer_tokens:
                seen = list(generator.seen)[known:]
                buffer.write(
                    folder / f"shard-{len(shards):05d}.safetensors", [k.hex() for k in seen], generator.rejected
                )
                shards.append(folder)
                known, buffer = len(generator.seen), _ShardBuffer()
            if have >= config.answer_tokens:
                return


def _metadata(shard: Path) -> dict[str, str]:
    with safe_open(shard, "pt") as file:
        meta: dict[str, str] = file.metadata()
        return meta


@dataclass(slots=True)
class _ShardBuffer:
    items: list[Conversation] = field(default_factory=list)
    total: int = 0

    def add(self, item: Conversation) -> None:
        self.items.append(item)
        self.total += len(item.tokens)

    def write(self, path: Path, seen: list[str], rejected: dict[str, int]) -> None:
        lengths = torch.tensor([len(i.tokens) for i in self.items])
        starts = torch.tensor([i.answer_start for i in self.items])
        tensors = {
            "token_ids": torch.tensor([t for i in self.items for t in i.tokens], dtype=torch.int32),
            "features": torch.cat([i.features.cpu() for i in self.items]),
            "lengths": lengths,
            "answer_starts": starts,
            "greedy": torch.tensor([i.greedy for i in self.items]),
        }
        metadata = {
            "format": "eagle2-corpus",
            "version": "1",
            "answer_tokens": str(int((lengths - starts).sum())),
            "kinds": json.dumps([i.kind for i in self.items]),
            "rejected": json.dumps(rejected),
            "seen": json.dumps(seen),
        }
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata)
        partial.replace(path)
