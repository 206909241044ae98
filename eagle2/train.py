"""Train a draft head on the target's own text, on one device or several, resumable from its checkpoints.

The recipe follows EAGLE (arXiv 2401.15077, section 4.2): regression on the target's next feature (smooth L1) and soft
cross-entropy between the target's and the draft distribution through the frozen LM head.  Two things are added.
*Several of the head's own steps* (HASS, arXiv 2408.15766): while a tree is drafted, the head reads its own output in
place of the target's feature, so it is trained on that too, with the attention that drafting will give it.  *A reduced
vocabulary in the loss*: the rows of the LM head for the most frequent tokens only, which makes a step several times
cheaper.

Several processes (``accelerate launch``) split each batch and sum their gradients, so that their number changes how
long a run takes and not what it gives, apart from rounding and the noise that is drawn.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import InitProcessGroupKwargs  # type: ignore[import-untyped]
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from .corpus import CorpusError, check_target, damaged, full_disk_in_a_sentence, read_metadata, shard_files, write_file
from .head import EagleHead, HeadConfig, _Layer
from .models import _line, _sync

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a training run. Each own step s has weight ``step_decay ** s`` in the loss."""

    epochs: float = 4.0
    batch_tokens: int = 2048  # about this many positions in a batch
    learning_rate: float = 1.5e-3
    final_rate: float = 0.02  # share of the peak at the end of the cosine
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 0.5
    own_steps: int = 3
    step_decay: float = 0.5
    feature_weight: float = 0.2
    hard_share: float = 0.5  # share of the target's first choice in what is learnt; the rest is its full distribution
    noise: float = 0.05  # uniform noise on the target's features, in units of their standard deviation
    ema: float = 0.999
    loss_vocab: int = 8192
    draft_vocab: int = 0  # most frequent tokens, the only ones that the head drafts (FR-Spec); 0: all
    init: str = ""  # folder of a head for the same target to start from; empty: a new one
    heldout: float = 0.02  # share of conversations, chosen by a hash of the prompt
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.batch_tokens < 1 or self.own_steps < 1 or self.loss_vocab < 2:
            raise ValueError("epochs, batch_tokens and own_steps must be positive, loss_vocab at least 2")
        if min(self.learning_rate, self.clip, self.step_decay) <= 0:
            raise ValueError("learning_rate, clip and step_decay must be above 0")
        if min(self.warmup_steps, self.weight_decay, self.feature_weight, self.noise) < 0:
            raise ValueError("warmup_steps, weight_decay, feature_weight and noise must not be below 0")
        if not (0 <= self.hard_share <= 1 and 0 <= self.final_rate <= 1 and 0 <= self.ema < 1):
            raise ValueError("hard_share and final_rate must lie between 0 and 1, ema from 0 to below 1")
        if not 0 < self.heldout < 0.5:
            raise ValueError("heldout must lie between 0 and 0.5")
        if self.draft_vocab < 0 or self.draft_vocab == 1:
            raise ValueError("draft_vocab must be 0 (all tokens) or at least 2")


class CorpusData:
    """All shards of one or more corpus folders. Tokens are in memory; features stay on disk, mapped.

    Conversation c has the tokens ``token_ids[offsets[c] : offsets[c] + lengths[c]]``; ``kinds [C]`` says what its
    prompt was.  Raises `CorpusError` for an empty folder, damaged shards, and, with ``target``
    (`corpus.target_identity`), for another target's text.
    """

    def __init__(self, *folders: Path, target: dict[str, Any] | None = None) -> None:
        self.shards: list[Path] = []
        self.kinds: list[str] = []
        self._features: list[Tensor] = []  # each [T of the shard, H], bfloat16
        parts: dict[str, list[Tensor]] = {key: [] for key in ("token_ids", "lengths", "answer_starts", "greedy")}
        shard_of, starts = [], []
        for folder in folders:
            found = shard_files(folder)
            if not found:
                raise CorpusError(f"{folder} holds no shards; generate text first")
            for path in found:
                metadata = read_metadata(path)
                if target is not None:
                    check_target(path, metadata, target)
                try:
                    with safe_open(path, "pt") as file:
                        shard = {key: file.get_tensor(key) for key in (*parts, "features")}
                    kinds = json.loads(metadata["kinds"])
                except (SafetensorError, OSError, KeyError, ValueError) as error:
                    raise damaged(path, error) from error
                _check_shard(path, shard, kinds, target)
                for key, values in parts.items():
                    values.append(shard[key])
                lengths = shard["lengths"]
                shard_of.append(torch.full_like(lengths, len(self.shards)))
                starts.append(lengths.cumsum(0) - lengths)
                self.shards.append(path)
                self.kinds += kinds
                self._features.append(shard["features"])
        widths = {part.shape[1] for part in self._features}
        if len(widths) != 1:
            raise CorpusError(f"the corpus mixes features of {sorted(widths)} numbers: it is of several targets")
        (self.width,) = widths
        self.token_ids = torch.cat(parts["token_ids"]).long()  # [T]
        self.lengths = torch.cat(parts["lengths"])  # [C]
        self.answer_starts = torch.cat(parts["answer_starts"])  # [C]
        self.greedy = torch.cat(parts["greedy"])  # [C]
        self.offsets = self.lengths.cumsum(0) - self.lengths  # [C]
        self._shard_of, self._starts = torch.cat(shard_of), torch.cat(starts)

    @property
    def answer_tokens(self) -> int:
        return int((self.lengths - self.answer_starts).sum())

    def features(self, row: int) -> Tensor:
        """Features of conversation ``row``, ``[length - 1, H]``: its last token was never fed to the target."""
        start = int(self._starts[row])
        return self._features[int(self._shard_of[row])][start : start + int(self.lengths[row]) - 1]

    def split(self, share: float) -> tuple[list[int], list[int]]:
        """Conversations for training and held out; the same prompt is always on the same side.

        Of equal conversations (shards of several runs can have some) only the first is used.
        """
        train: list[int] = []
        held: list[int] = []
        seen: set[bytes] = set()
        for index in range(len(self.lengths)):
            start = int(self.offsets[index])
            whole = self.token_ids[start : start + int(self.lengths[index])].numpy().tobytes()
            key = hashlib.blake2b(whole, digest_size=12).digest()
            if key in seen:
                continue
            seen.add(key)
            prompt = self.token_ids[start : start + int(self.answer_starts[index])]
            digest = hashlib.blake2b(prompt.numpy().tobytes(), digest_size=4).digest()
            (held if int.from_bytes(digest, "big") / 2**32 < share else train).append(index)
        return train, held

    def frequent_tokens(self, count: int, eos: set[int]) -> Tensor:
        """The most frequent token ids, sorted ``[count]``; ends of turn are always among them."""
        counts = torch.bincount(self.token_ids)
        counts[list(eos)] = counts.max() + 1
        return counts.topk(min(count, int((counts > 0).sum()))).indices.sort().values

    def batch(self, rows: list[int]) -> Batch:
        """Pad the conversations ``rows`` to one length."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        features = torch.zeros(len(rows), longest, self.width, dtype=torch.bfloat16)
        for i, row in enumerate(rows):
            start, length = int(self.offsets[row]), int(lengths[i])
            tokens[i, :length] = self.token_ids[start : start + length]
            features[i, : length - 1] = self.features(row)
        if not torch.isfinite(features).all():
            bad = next(row for i, row in enumerate(rows) if not torch.isfinite(features[i]).all())
            raise damaged(self.shards[int(self._shard_of[bad])], "it holds features that are not numbers")
        return Batch(tokens, features, lengths, self.answer_starts[rows], self.greedy[rows])


def _check_shard(path: Path, shard: dict[str, Tensor], kinds: Any, target: dict[str, Any] | None) -> None:
    lengths, starts, tokens, features = (shard[k] for k in ("lengths", "answer_starts", "token_ids", "features"))
    sizes = {len(lengths), len(starts), len(shard["greedy"]), len(kinds)}
    if len(sizes) != 1 or not len(lengths) or features.dim() != 2:
        raise damaged(path, "its parts do not fit together")
    if not int(lengths.sum()) == len(tokens) == len(features) or bool(((starts < 1) | (starts > lengths)).any()):
        raise damaged(path, "its lengths do not add up")
    if target is not None and features.shape[1] != target["hidden_size"]:
        raise CorpusError(
            f"{path} was written by another target: its features have {features.shape[1]} numbers, "
            f"this target's {target['hidden_size']}"
        )
    if int(tokens.min()) < 0 or (target is not None and int(tokens.max()) >= target["vocab_size"]):
        raise damaged(path, "it holds token ids that the target does not have")


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded conversations: ``tokens [B, S]``, ``features [B, S, H]``, ``lengths``, ``answer_starts``, ``greedy [B]``."""

    tokens: Tensor
    features: Tensor
    lengths: Tensor
    answer_starts: Tensor
    greedy: Tensor

    def targets(self) -> Tensor:
        """Boolean ``[B, S - 1]``: positions i whose pair (token i+1, feature i) is trained to give feature i+1.

        Feature i+1 decides token i+2, which must be a drafted answer token: the first one comes from the prefill.
        """
        at = torch.arange(self.tokens.shape[1] - 1)
        return (at[None] + 2 > self.answer_starts[:, None]) & (at[None] + 2 < self.lengths[:, None])


def batches(data: CorpusData, rows: list[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """One epoch in batches of similar lengths, in random order."""
    generator = torch.Generator().manual_seed(seed)
    jitter = torch.rand(len(rows), generator=generator) * 16
    order = torch.argsort(data.lengths[rows] + jitter)
    groups: list[list[int]] = []
    group: list[int] = []
    longest = 0
    for index in order.tolist():
        longest = max(longest, int(data.lengths[rows[index]]))
        if group and (len(group) + 1) * longest > batch_tokens:
            groups.append(group)
            group, longest = [], int(data.lengths[rows[index]])
        group.append(rows[index])
    if group:
        groups.append(group)
    for index in torch.randperm(len(groups), generator=generator).tolist():
        yield groups[index]


class OwnSteps:
    """Forward passes of the head as drafting will run them.

    Pass 1 reads the target's features.  Pass s reads the outputs of pass s - 1, shifted by one position; its row at
    position i sees what a node at depth s of a tree sees: the rows of pass 1 up to position i - s + 1, and one row of
    each later pass on its own path.
    """

    def __init__(self, head: EagleHead, embeds: Tensor, needed: Tensor | None = None) -> None:
        """``embeds [B, S, H]``: embedding of the token after each feature.

        ``needed [B, S]`` (boolean; None: all) are the rows whose outputs are wanted, here or as inputs of the next
        pass. Of the others only the keys and values of pass 1 are computed.
        """
        self.head, self.embeds = head, embeds
        batch, length, _ = embeds.shape
        self.positions = torch.arange(length, device=embeds.device)[None].expand(batch, length)
        self.needed = torch.ones(batch, length, dtype=torch.bool, device=embeds.device) if needed is None else needed
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def run(self, features: Tensor) -> Tensor:
        """The next pass over ``features [B, S, H]``; returns its outputs ``[B, S, H]``, zero where not needed."""
        layer: _Layer = self.head.layers[0]  # type: ignore[assignment]
        if self.keys:
            x = self.head.join(self.embeds[self.needed][None], features[self.needed][None])
            cos, sin = self.head.rotary(self.positions[self.needed][None], x.dtype)
            queries, keys, values = (self._spread(part) for part in layer.self_attn.qkv(x, cos, sin))
        else:
            x = self.head.join(self.embeds, features)
            queries, keys, values = layer.self_attn.qkv(x, *self.head.rotary(self.positions, x.dtype))
            x = x[self.needed][None]
        self.keys.append(keys)
        self.values.append(values)
        output = layer.finish(x, layer.self_attn.o_proj(self._attend(queries)[self.needed][None]))
        return output.new_zeros(self.embeds.shape).index_put((self.needed,), output[0])

    def _spread(self, rows: Tensor) -> Tensor:
        """``rows [1, heads, n, D]`` of the needed positions to ``[B, heads, S, D]``."""
        grid = rows.new_zeros(*self.needed.shape, rows.shape[1], rows.shape[3])
        return grid.index_put((self.needed,), rows[0].transpose(0, 1)).transpose(1, 2)

    def _attend(self, queries: Tensor) -> Tensor:
        """Attention of the newest pass; ``queries [B, heads, S, D]`` to ``[B, S, heads * D]``.

        A row sees a triangle of pass 1 but only one row of each later pass, so those are single products, not matrices.
        """
        batch, heads, length, dim = queries.shape
        kv_heads, number = self.keys[0].shape[1], len(self.keys)
        grouped = queries.reshape(batch, kv_heads, -1, length, dim) * dim**-0.5
        scores = torch.matmul(grouped.flatten(2, 3), self.keys[0].transpose(2, 3)).view(*grouped.shape[:4], length)
        rows = torch.arange(length, device=queries.device)
        hidden = rows[None] > rows[:, None] - number + 1
        parts = [scores.masked_fill(hidden, torch.finfo(scores.dtype).min)]
        own_values = []
        for own in range(1, number):
            shift = number - 1 - own
            parts.append((grouped * _later(self.keys[own], shift)[:, :, None]).sum(-1, keepdim=True))
            own_values.append(_later(self.values[own], shift)[:, :, None])
        weights = torch.cat(parts, -1).float().softmax(-1).to(queries.dtype)
        seen = weights[..., :length].flatten(2, 3)
        output = torch.matmul(seen, self.values[0]).view_as(grouped)
        for own, values in enumerate(own_values):
            output = output + weights[..., length + own, None] * values
        return output.permute(0, 3, 1, 2, 4).reshape(batch, length, heads * dim)


def _reach(wanted: Tensor, steps: int) -> Tensor:
    """``wanted [B, S]`` and the ``steps - 1`` positions before each, whose outputs are the inputs of later passes."""
    needed = wanted.clone()
    for back in range(1, steps):
        needed[:, :-back] |= wanted[:, back:]
    return needed


def _later(rows: Tensor, shift: int) -> Tensor:
    """``rows [B, heads, S, D]`` moved ``shift`` positions on; zeros before them."""
    return F.pad(rows, (0, 0, shift, 0))[:, :, : rows.shape[2]] if shift else rows


class SoftCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``softmax(hidden @ rows.T)`` against ``target_probs``, without keeping the logits.

    ``hidden [n, H]``, ``rows [v, H]`` (frozen), ``target_probs [n, v]``.  Works chunk by chunk and forms the gradient
    on the way: the logits of a chunk stay in the cache of the CPU, which makes it three times faster here.
    """

    CHUNK = 256

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, target_probs: Tensor) -> Tensor:
        gradient = torch.empty_like(hidden)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, len(hidden), SoftCrossEntropy.CHUNK):
            part = slice(start, start + SoftCrossEntropy.CHUNK)
            logits = F.linear(hidden[part].to(rows.dtype), rows).float()
            wanted = target_probs[part].float()
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += normaliser.sum() - (wanted * logits).sum()
            difference = logits.sub_(normaliser).exp_().sub_(wanted)
            gradient[part] = (difference.to(rows.dtype) @ rows).to(gradient.dtype)
        ctx.save_for_backward(gradient.div_(max(len(hidden), 1)))
        return (total / max(len(hidden), 1)).float()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_outputs[0].to(gradient.dtype), None, None


@dataclass(slots=True)
class Trainer:
    """One training run. ``lm_rows [v, H]`` are the LM head's rows of ``vocab [v]``; ``embedding [V, H]`` the target's."""

    head: EagleHead
    data: CorpusData
    config: TrainConfig
    embedding: Tensor
    lm_head: Tensor
    vocab: Tensor
    device: torch.device
    precision: str = "bf16"
    accelerator: Accelerator = field(default_factory=lambda: make_accelerator())

    def loss(self, batch: Batch, generator: torch.Generator | None) -> tuple[Tensor, dict[str, float]]:
        """Weighted loss over the own steps, and what it is made of."""
        config = self.config
        tokens = batch.tokens.to(self.device)
        features = batch.features.to(self.device).float()
        wanted = batch.targets().to(self.device)
        following = features[:, 1:]  # feature i + 1
        inputs = features[:, :-1]
        scale = inputs.std()
        if generator is not None and config.noise:
            noise = torch.rand(inputs.shape, generator=generator).to(self.device)
            inputs = inputs + (noise - 0.5) * (2 * config.noise) * scale
        with torch.no_grad(), self._autocast():
            # The answer begins behind the template's header, so no trained row lies before its own path's begin.
            wanted_features = following[wanted]
            target_probs = self._target_probs(wanted_features)
        parts: dict[str, float] = {}
        total = torch.zeros((), device=self.device)
        weights = [config.step_decay**s for s in range(config.own_steps)]
        with self._autocast():
            needed = _reach(wanted, config.own_steps)
            passes = OwnSteps(self.head, F.embedding(tokens[:, 1:], self.embedding), needed)
            for step, weight in enumerate(weights):
                output = passes.run(inputs)
                got = output[wanted].float()
                soft = SoftCrossEntropy.apply(got, self.lm_head, target_probs)
                regression = F.smooth_l1_loss(got, wanted_features)
                total = total + weight * (soft + config.feature_weight * regression)
                parts[f"ce{step + 1}"] = float(soft.detach())
                parts[f"l1{step + 1}"] = float(regression.detach())
                inputs = torch.cat((features[:, :1].to(output.dtype), output[:, :-1]), 1)
        return total / sum(weights), parts

    def _target_probs(self, features: Tensor) -> Tensor:
        """What the draft distribution is to match ``[n, v]``: the target's, mixed with its first choice."""
        result = torch.empty(len(features), len(self.lm_head), dtype=self.lm_head.dtype, device=features.device)
        for start in range(0, len(features), SoftCrossEntropy.CHUNK):
            part = slice(start, start + SoftCrossEntropy.CHUNK)
            logits = F.linear(features[part].to(self.lm_head.dtype), self.lm_head).float()
            best = logits.argmax(-1, keepdim=True)
            probs = logits.softmax(-1).mul_(1 - self.config.hard_share)
            result[part] = probs.scatter_add_(1, best, torch.full_like(best, self.config.hard_share, dtype=probs.dtype))
        return result

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, PRECISIONS[self.precision], enabled=self.precision != "no")

    @torch.no_grad()
    def evaluate(self, head: EagleHead, rows: list[int], batch_tokens: int = 8192, depth: int = 5) -> dict[str, float]:
        """Held-out figures over all drafted answer positions, greedy conversations only.

        ``accept_s``: share of positions where the head's s-th own step puts the target's token first, given that its
        earlier steps did; ``chain_tau``: tokens per target pass of a greedy chain of ``depth`` tokens, 1 + the sum of
        the products.  A tree accepts more than a chain.  ``ce``: cross-entropy of the first step over the loss's
        vocabulary.
        """
        head.eval()
        right, seen = [0.0] * depth, [0.0] * depth
        entropy, count = 0.0, 0.0
        rows = [row for row in rows if bool(self.data.greedy[row])]
        rows = rows[self.accelerator.process_index :: self.accelerator.num_processes]
        for group in batches(self.data, rows, batch_tokens, 0):
            batch = self.data.batch(group)
            tokens, features = batch.tokens.to(self.device), batch.features.to(self.device)
            wanted = batch.targets().to(self.device)
            inputs = features[:, :-1].float()
            with self._autocast():
                passes = OwnSteps(head, F.embedding(tokens[:, 1:], self.embedding), _reach(wanted, depth))
                alive = wanted
                for step in range(depth):
                    output = passes.run(inputs)
                    logits = F.linear(output[wanted], self.lm_head).float()
                    if step == 0:
                        target = F.linear(features[:, 1:][wanted].to(logits.dtype), self.lm_head).float().softmax(-1)
                        entropy += float(F.cross_entropy(logits, target, reduction="sum"))
                        count += len(logits)
                    best = torch.zeros(wanted.shape, dtype=torch.long, device=self.device)
                    best[wanted] = self.vocab[logits.argmax(-1)]
                    actual = torch.cat((tokens[:, 2:], torch.full_like(tokens[:, :1], -1)), 1)
                    hit = (best == actual) & wanted
                    seen[step] += float((alive & wanted).sum())
                    right[step] += float((hit & alive).sum())
                    # The next step's row at i + 1 goes on from this step's row at i.
                    alive = torch.cat((torch.zeros_like(alive[:, :1]), (hit & alive)[:, :-1]), 1) & wanted
                    inputs = torch.cat((inputs[:, :1], output[:, :-1].float()), 1)
        *sums, entropy, count = self._summed([*right, *seen, entropy, count])
        right, seen = sums[:depth], sums[depth:]
        result = {f"accept_{s + 1}": right[s] / max(seen[s], 1) for s in range(depth)}
        product, tau = 1.0, 1.0
        for s in range(depth):
            product *= result[f"accept_{s + 1}"]
            tau += product
        head.train()
        return result | {"chain_tau": tau, "ce": entropy / max(count, 1)}

    def fit(
        self, out: Path, *, evaluate_every: int = 200, save_every: float = 120.0, max_seconds: float = math.inf
    ) -> dict[str, float]:
        """Train from the last checkpoint in ``out`` (or the start); writes ``log.csv``, ``checkpoint.pt``, the head.

        ``save_every`` and ``max_seconds`` are in seconds.  With ``max_seconds`` the schedule is the same, but the run
        stops early and can go on later.  Returns the last held-out figures, of the averaged weights.

        Ctrl-C and SIGTERM end the run after the step under way with a checkpoint and `KeyboardInterrupt`.  Raises
        `ValueError` for a corpus that is too small and a checkpoint of another run, `FloatingPointError` where the loss
        is not finite, `OSError` with a sentence where the disk is full.
        """
        config = self.config
        main = self.accelerator.is_main_process
        out.mkdir(parents=True, exist_ok=True)
        train, held = self.data.split(config.heldout)
        if not train or not any(bool(self.data.greedy[row]) for row in held):
            raise ValueError(
                "the corpus is too small to hold anything out; generate more text or raise the held-out share"
            )
        per_epoch = sum(1 for _ in batches(self.data, train, config.batch_tokens, 0))
        total = max(1, round(per_epoch * config.epochs))
        optimizer = torch.optim.AdamW(
            self.head.parameters(),
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=config.weight_decay,
            fused=True,
        )
        scaler = self.accelerator.scaler  # of fp16, else None
        averaged = copy.deepcopy(self.head)
        step = tokens = 0  # tokens: answer positions trained on
        spent = 0.0  # seconds of earlier sessions
        figures: dict[str, float] = {}
        checkpoint = out / "checkpoint.pt"
        run = {
            "config": dataclasses.asdict(config), "total": total, "precision": self.precision,
            "conversations": len(self.data.lengths),
        }  # fmt: skip
        if checkpoint.exists():
            state = _load_checkpoint(checkpoint, run, self.device)
            self.head.load_state_dict(state["head"])
            averaged.load_state_dict(state["averaged"])
            optimizer.load_state_dict(state["optimizer"])
            if scaler is not None:
                scaler.load_state_dict(state["scaler"])
            step, tokens, spent, figures = state["step"], state["tokens"], state["seconds"], state["figures"]
        begun = saved = time.monotonic()
        self.head.train()
        with (
            full_disk_in_a_sentence(out),
            _Log(out, step, main) as log,
            _signals() as asked,
            tqdm(total=total, initial=step, unit="step", desc="training", smoothing=0.05, disable=not main) as bar,
        ):
            done = step >= total
            while not done:
                epoch, skip = divmod(step, per_epoch)
                groups = list(batches(self.data, train, config.batch_tokens, config.seed * 1000 + epoch))
                # Each order packs into a few batches more or less: all epochs have `per_epoch` steps.
                for group in (groups * 2)[skip:per_epoch]:
                    rate = self._rate(step, total)
                    for parameters in optimizer.param_groups:
                        parameters["lr"] = rate
                    loss, parts = self._gradients(group, step)
                    if not math.isfinite(loss):
                        raise FloatingPointError(
                            f"the loss is not finite at step {step}; lower the learning rate or try another precision"
                        )
                    if scaler:
                        scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    step += 1
                    tokens += self._positions(group)
                    keep = min(config.ema, step / (step + 10))
                    with torch.no_grad():
                        for mean, value in zip(averaged.parameters(), self.head.parameters()):
                            mean.lerp_(value, 1 - keep)
                    bar.update()
                    bar.set_postfix({k: f"{v:.3f}" for k, v in parts.items() if k.startswith("ce")})
                    now = time.monotonic()
                    late, interrupted = (
                        bool(n) for n in self._summed([float(main and now - begun > max_seconds), float(bool(asked))])
                    )
                    done = step >= total or late
                    if step % evaluate_every == 0 or done:
                        figures = self.evaluate(averaged, held)
                        log.add(
                            {"step": step, "seconds": round(spent + now - begun), "rate": rate, "tokens": tokens,
                             "loss": loss} | parts | {f"heldout_{k}": v for k, v in figures.items()}
                        )  # fmt: skip
                        if main:
                            shown = " ".join(f"{k} {v:.3f}" for k, v in figures.items())
                            bar.write(f"step {step} loss {loss:.3f} {shown}", file=sys.stderr)
                    if main and (now - saved > save_every or done or interrupted):
                        _save_checkpoint(checkpoint, run | {
                            "step": step, "tokens": tokens, "seconds": spent + time.monotonic() - begun,
                            "figures": figures, "head": self.head.state_dict(), "averaged": averaged.state_dict(),
                            "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict() if scaler else {},
                        })  # fmt: skip
                        save_head(averaged, out)
                        saved = time.monotonic()
                    if interrupted:
                        raise KeyboardInterrupt
                    if done:
                        break
        return figures or self.evaluate(averaged, held)

    def _positions(self, rows: list[int]) -> int:
        """How many positions of the conversations ``rows`` are trained on; see `Batch.targets`."""
        return int((self.data.lengths[rows] - self.data.answer_starts[rows] - 1).clamp(min=0).sum())

    def _gradients(self, group: list[int], step: int) -> tuple[float, dict[str, float]]:
        """Leave the gradients of the loss over ``group`` in the head, the same in all processes.

        Each process takes its share of the conversations.  The loss is a mean over positions, so a share weighs by its
        positions, and the sum over the processes is what one process would have got.  Returns the whole loss, and what
        this process's share of it is made of.
        """
        index, processes = self.accelerator.process_index, self.accelerator.num_processes
        own = group[index::processes]
        weight = self._positions(own) / max(self._positions(group), 1)
        self.head.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        parts: dict[str, float] = {}
        if weight:
            noise = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step + index * 1_000_000_007)
            loss, parts = self.loss(self.data.batch(own), noise)
            self.accelerator.backward(loss * weight)
        if processes > 1:
            # Through OwnSteps the head is not called as a module, so DDP's hooks would not fire: one explicit sum.
            owners = list(self.head.parameters())
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in owners])
            flat = self.accelerator.reduce(flat, "sum")
            for parameter, piece in zip(owners, flat.split([p.numel() for p in owners])):
                parameter.grad = piece.view_as(parameter)
        (whole,) = self._summed([float(loss.detach()) * weight])
        return whole, parts

    def _summed(self, values: list[float]) -> list[float]:
        """Each value, summed over the processes."""
        if self.accelerator.num_processes == 1:
            return values
        # float32, which every device has; the sums here stay exact below 2 ** 24
        total: list[float] = self.accelerator.reduce(torch.tensor(values, device=self.device), "sum").tolist()
        return total

    def _rate(self, step: int, total: int) -> float:
        config = self.config
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        along = (step - config.warmup_steps) / max(total - config.warmup_steps, 1)
        low = config.final_rate
        return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0))))


class _Log:
    """``log.csv`` in ``out``, a row for each evaluation, and TensorBoard's files where it is installed."""

    def __init__(self, out: Path, step: int, main: bool) -> None:
        self.path = out / "log.csv" if main else None
        # What a killed run logged behind its last checkpoint comes again.
        self.rows: list[dict[str, Any]] = [row for row in read_log(out) if int(row["step"]) <= step]
        self.board: Any = None
        if main:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(out / "tensorboard", purge_step=step)
            except ImportError:
                print("no TensorBoard log: `pip install tensorboard` for one; log.csv has all figures", file=sys.stderr)

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *error: object) -> None:
        if self.board is not None:
            self.board.close()

    def add(self, row: dict[str, Any]) -> None:
        if self.path is None:
            return
        self.rows.append({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
        write_file(self.path, self._write)
        if self.board is not None:
            for key, value in row.items():
                self.board.add_scalar(key, value, row["step"])

    def _write(self, path: Path) -> None:
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)


def read_log(out: Path) -> list[dict[str, str]]:
    """The rows of ``out/log.csv``; none where there is no log (or one of version 0.1, which had no header)."""
    try:
        with (out / "log.csv").open(newline="") as file:
            return [row for row in csv.DictReader(file) if row.get("step", "").isdigit()]
    except FileNotFoundError:
        return []


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Within the block Ctrl-C and SIGTERM only add their number to the list: a step is never cut in two."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield asked
        return
    before = {number: signal.signal(number, lambda n, _: asked.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    def write(partial: Path) -> None:
        with partial.open("wb") as file:  # an open file tells of a full disk in clearer words than a path
            torch.save(state, file)

    write_file(path, write)


def _load_checkpoint(path: Path, run: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The checkpoint, if it is whole and of this run: the same settings and text."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        before = {key: state[key] for key in (*run, "step", "tokens", "seconds", "figures", "scaler")}
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise ValueError(f"{path} cannot be read ({_line(error)}); delete it to train from the start") from error
    was, now = (d["config"] | {k: d[k] for k in run if k != "config"} for d in (before, run))
    changed = [key for key in now if was.get(key) != now[key]]
    if changed:
        raise ValueError(
            f"{path} is of a run with other settings or data ({', '.join(changed)}); choose another folder"
        )
    return state


def save_head(head: EagleHead, folder: Path) -> None:
    """Save a head so that ``folder`` holds the old one or the new one, whenever the power goes."""
    partial = folder / "head.partial"
    with full_disk_in_a_sentence(folder):
        head.save(partial)
        for name in ("config.json", "model.safetensors"):
            _sync(partial / name)
            os.replace(partial / name, folder / name)
        partial.rmdir()
        _sync(folder)


def new_head(config: HeadConfig, seed: int) -> EagleHead:
    """A head that starts out as "the next feature is like this one": what is added to that starts at zero."""
    torch.manual_seed(seed)
    head = EagleHead(config)
    layer: _Layer = head.layers[0]  # type: ignore[assignment]
    with torch.no_grad():
        head.fc.weight[:, : config.hidden_size].normal_(std=0.02)
        head.fc.weight[:, config.hidden_size :].copy_(torch.eye(config.hidden_size))
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    return head


def make_accelerator(mixed_precision: str = "bf16", device: str = "auto") -> Accelerator:
    """This process's `accelerate.Accelerator`: one of several under ``accelerate launch`` or torchrun, else alone.

    Raises `ValueError` for fp16 without a GPU.
    """
    # The state is accelerate's own singleton; without this a second run in one process could not differ in precision.
    # Only fp16 needs accelerate's help (the gradient scaler); autocast is entered in `Trainer._autocast`.
    AcceleratorState._reset_state()
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=12))  # until the slowest has generated its share
    return Accelerator(
        cpu=device == "cpu",
        mixed_precision="fp16" if mixed_precision == "fp16" else "no",
        kwargs_handlers=[patience],
    )


def make_trainer(
    model: Any,
    data: CorpusData,
    config: TrainConfig,
    *,
    precision: str = "bf16",
    accelerator: Accelerator | None = None,
) -> Trainer:
    """A trainer with a new head for ``model`` (any causal LM whose config has the Llama family's names).

    ``precision``: bf16 or fp16 for autocast in that type (fp16 with a gradient scaler, on a GPU), or no.
    """
    device = model.get_input_embeddings().weight.device
    dtype = PRECISIONS[precision]
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    vocab = data.frequent_tokens(config.loss_vocab, ends).to(device)
    lm_head = model.get_output_embeddings().weight.detach().to(dtype)
    embedding = model.get_input_embeddings().weight.detach().to(dtype)
    target_config = model.config.get_text_config()
    if config.init:
        head = EagleHead.load(config.init, target_config=target_config, device=device).requires_grad_(True)
    else:
        head = new_head(HeadConfig.for_target(target_config), config.seed).to(device)
    head.with_draft_tokens(data.frequent_tokens(config.draft_vocab, ends) if config.draft_vocab else None)
    return Trainer(
        head, data, config, embedding, lm_head[vocab].contiguous(), vocab, device, precision,
        accelerator or make_accelerator(precision, device.type),
    )  # fmt: skip
