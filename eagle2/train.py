"""Train a draft head on the target's own text: generate, train, save, each stage resumable from disk.

The recipe follows EAGLE (arXiv 2401.15077, section 4.2): regression on the target's next feature (smooth L1) and soft
cross-entropy between the target's and the draft distribution through the frozen LM head.  Two things are added.
*Several of the head's own steps* (HASS, arXiv 2408.15766): while a tree is drafted, the head reads its own output in
place of the target's feature, so it is trained on that too, with the attention that drafting will give it.  *A reduced
vocabulary in the loss*: the rows of the LM head for the most frequent tokens only, which makes a step several times
cheaper.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from .corpus import CorpusConfig, pack_linears, write_corpus
from .head import EagleHead, HeadConfig, _Layer
from .models import load_model


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings of a training run. Each own step s has weight ``step_decay ** s`` in the loss."""

    epochs: float = 4.0
    batch_tokens: int = 2048  # about this many positions in a batch
    learning_rate: float = 1e-3
    final_rate: float = 0.02  # share of the peak at the end of the cosine
    warmup_steps: int = 100
    weight_decay: float = 0.01
    clip: float = 0.5
    own_steps: int = 3
    step_decay: float = 0.9
    feature_weight: float = 0.2
    hard_share: float = 0.5  # share of the target's first choice in what is learnt; the rest is its full distribution
    noise: float = 0.05  # uniform noise on the target's features, in units of their standard deviation
    ema: float = 0.999
    loss_vocab: int = 8192
    heldout: float = 0.02  # share of conversations, chosen by a hash of the prompt
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs <= 0 or self.batch_tokens < 1 or self.own_steps < 1 or self.loss_vocab < 2:
            raise ValueError("epochs, batch_tokens, own_steps and loss_vocab must be positive")
        if not 0 <= self.hard_share <= 1:
            raise ValueError("hard_share must lie between 0 and 1")
        if not 0 < self.heldout < 0.5:
            raise ValueError("heldout must lie between 0 and 0.5")


class CorpusData:
    """All shards of a corpus in memory: flat tensors and one row of bounds per conversation."""

    def __init__(self, folder: Path) -> None:
        shards = [load_file(path) for path in sorted(folder.glob("shard-*.safetensors"))]
        if not shards:
            raise ValueError(f"{folder} holds no shards; generate text first")
        self.token_ids = torch.cat([s["token_ids"] for s in shards]).long()  # [T]
        self.features = torch.cat([s["features"] for s in shards])  # [T, H], bfloat16
        self.lengths = torch.cat([s["lengths"] for s in shards])  # [C]
        self.answer_starts = torch.cat([s["answer_starts"] for s in shards])  # [C]
        self.greedy = torch.cat([s["greedy"] for s in shards])  # [C]
        self.offsets = self.lengths.cumsum(0) - self.lengths  # [C]
        self.features[self.offsets + self.lengths - 1] = 0  # of the last token, which was never fed

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
        features = torch.zeros(len(rows), longest, self.features.shape[1], dtype=self.features.dtype)
        for i, row in enumerate(rows):
            start, length = int(self.offsets[row]), int(lengths[i])
            tokens[i, :length] = self.token_ids[start : start + length]
            features[i, :length] = self.features[start : start + length]
        return Batch(tokens, features, lengths, self.answer_starts[rows], self.greedy[rows])


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

    def __init__(self, head: EagleHead, embeds: Tensor) -> None:
        """``embeds [B, S, H]``: embedding of the token after each feature."""
        self.head, self.embeds = head, embeds
        batch, length, _ = embeds.shape
        self.positions = torch.arange(length, device=embeds.device)[None].expand(batch, length)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def run(self, features: Tensor) -> Tensor:
        """The next pass over ``features [B, S, H]``; returns its outputs ``[B, S, H]``."""
        layer: _Layer = self.head.layers[0]  # type: ignore[assignment]
        x = self.head.join(self.embeds, features)
        queries, keys, values = layer.self_attn.qkv(x, *self.head.rotary(self.positions, x.dtype))
        self.keys.append(keys)
        self.values.append(values)
        attended = layer.self_attn.attend(
            queries, torch.cat(self.keys, 2), torch.cat(self.values, 2), self._mask(queries)
        )
        return layer.finish(x, attended)

    def _mask(self, like: Tensor) -> Tensor | None:
        number, length, device = len(self.keys), self.embeds.shape[1], like.device
        if number == 1:
            return None
        rows = torch.arange(length, device=device)[:, None]
        columns = torch.arange(length, device=device)[None]
        blocks = [columns <= rows - number + 1]
        blocks += [columns == rows - number + own for own in range(2, number + 1)]
        mask = torch.cat(blocks, 1)
        mask[:, 0] |= ~mask.any(1)  # rows before the path begins see something, for the softmax; they are not trained
        additive = torch.zeros(mask.shape, dtype=like.dtype, device=device)
        return additive.masked_fill_(~mask, torch.finfo(like.dtype).min)[None, None]


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
            passes = OwnSteps(self.head, F.embedding(tokens[:, 1:], self.embedding))
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
        return torch.autocast(self.device.type, torch.bfloat16)

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
        entropy, count = 0.0, 0
        rows = [row for row in rows if bool(self.data.greedy[row])]
        for group in batches(self.data, rows, batch_tokens, 0):
            batch = self.data.batch(group)
            tokens, features = batch.tokens.to(self.device), batch.features.to(self.device)
            wanted = batch.targets().to(self.device)
            inputs = features[:, :-1].float()
            with self._autocast():
                passes = OwnSteps(head, F.embedding(tokens[:, 1:], self.embedding))
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

        With ``max_seconds`` the schedule is the same, but the run stops early and can go on later.  Returns the last
        held-out figures, of the averaged weights.
        """
        config = self.config
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
        averaged = copy.deepcopy(self.head)
        step = 0
        checkpoint = out / "checkpoint.pt"
        if checkpoint.exists():
            state = torch.load(checkpoint, map_location=self.device, weights_only=True)
            if state["config"] != dataclasses.asdict(config) or state["total"] != total:
                raise ValueError(f"{checkpoint} is of a run with other settings or data; choose another folder")
            self.head.load_state_dict(state["head"])
            averaged.load_state_dict(state["averaged"])
            optimizer.load_state_dict(state["optimizer"])
            step = state["step"]
        figures: dict[str, float] = {}
        begun = saved = time.monotonic()
        self.head.train()
        with (
            (out / "log.csv").open("a", newline="") as file,
            tqdm(total=total, initial=step, unit="step", smoothing=0.05) as bar,
        ):
            log = csv.writer(file)
            while step < total:
                epoch, skip = divmod(step, per_epoch)
                for group in list(batches(self.data, train, config.batch_tokens, config.seed * 1000 + epoch))[skip:]:
                    rate = self._rate(step, total)
                    for parameters in optimizer.param_groups:
                        parameters["lr"] = rate
                    noise = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
                    loss, parts = self.loss(self.data.batch(group), noise)
                    if not math.isfinite(float(loss.detach())):
                        raise RuntimeError(f"the loss is not finite at step {step}; lower the learning rate")
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.clip)
                    optimizer.step()
                    step += 1
                    keep = min(config.ema, step / (step + 10))
                    with torch.no_grad():
                        for mean, value in zip(averaged.parameters(), self.head.parameters()):
                            mean.lerp_(value, 1 - keep)
                    bar.update()
                    bar.set_postfix({k: f"{v:.3f}" for k, v in parts.items() if k.startswith("ce")})
                    now = time.monotonic()
                    done = step >= total or now - begun > max_seconds
                    if step % evaluate_every == 0 or done:
                        figures = self.evaluate(averaged, held)
                        log.writerow(
                            [step, f"{now - begun:.0f}", f"{rate:.2e}", json.dumps(parts), json.dumps(figures)]
                        )
                        file.flush()
                        bar.write(
                            f"step {step} loss {float(loss.detach()):.3f} "
                            + " ".join(f"{k} {v:.3f}" for k, v in figures.items()),
                            file=sys.stderr,
                        )
                    if now - saved > save_every or done:
                        _save_checkpoint(checkpoint, {
                            "config": dataclasses.asdict(config), "total": total, "step": step,
                            "head": self.head.state_dict(), "averaged": averaged.state_dict(),
                            "optimizer": optimizer.state_dict(),
                        })  # fmt: skip
                        averaged.save(out)
                        saved = time.monotonic()
                    if done or step >= total or step % per_epoch == 0:
                        break
                if time.monotonic() - begun > max_seconds:
                    break
        return figures or self.evaluate(averaged, held)

    def _rate(self, step: int, total: int) -> float:
        config = self.config
        if step < config.warmup_steps:
            return config.learning_rate * (step + 1) / config.warmup_steps
        along = (step - config.warmup_steps) / max(total - config.warmup_steps, 1)
        low = config.final_rate
        return config.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0))))


def _save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


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


def make_trainer(model: Any, data: CorpusData, config: TrainConfig) -> Trainer:
    """A trainer with a new head for ``model`` (any causal LM whose config has the Llama family's names)."""
    device = model.get_input_embeddings().weight.device
    eos = model.generation_config.eos_token_id
    vocab = data.frequent_tokens(config.loss_vocab, set(eos if isinstance(eos, list) else [eos])).to(device)
    lm_head = model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    embedding = model.get_input_embeddings().weight.detach().to(torch.bfloat16)
    head = new_head(HeadConfig.for_target(model.config.get_text_config()), config.seed).to(device)
    return Trainer(head, data, config, embedding, lm_head[vocab].contiguous(), vocab, device)


def train_head(
    name: str, out: Path, corpus: CorpusConfig, config: TrainConfig, *, device: str = "auto"
) -> dict[str, float]:
    """All stages for the target ``name``: text into ``out/corpus``, checkpoints into ``out/run``, the head ``out/head``.

    Each stage goes on from where it was cut.  Returns the held-out figures (`Trainer.evaluate`), which also stand in
    ``out/head/training.json`` with all settings.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(name, dtype=torch.bfloat16, device=device)
    if model.get_output_embeddings() is None:
        raise ValueError(f"{name} has no LM head that a draft head could use")
    pack_linears(model, corpus.slots)
    write_corpus(model, tokenizer, corpus, out / "corpus")
    data = CorpusData(out / "corpus")
    trainer = make_trainer(model, data, config)
    figures = trainer.fit(out / "run")
    EagleHead.load(out / "run").save(out / "head")
    record = {
        "target": name,
        "corpus": dataclasses.asdict(corpus),
        "training": dataclasses.asdict(config),
        "conversations": len(data.lengths),
        "answer_tokens": int((data.lengths - data.answer_starts).sum()),
        "heldout": figures,
    }
    (out / "head" / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return figures
