"""Greedy acceptance without verification passes: the target decodes once, plainly; the loop then replays it.

Greedy speculative decoding is lossless (EAGLE-2 paper, section 3.1): whatever the draft head proposes, the output is the
target's own greedy text.  So the text and the target's features of it can be had first, for many prompts in one batch,
and the ordinary loop with the ordinary drafter runs against the recording: at a node on the recorded path the target's
choice is the next recorded token, and no other node can be reached.  tau is the full loop's, and one recording serves
any number of heads and trees.

What is exact: the tokens are the argmax of the batched passes and the features come from these same passes.  They differ
from the full loop's only by rounding (matrix products of other shapes); where the two top logits are closer than that,
the texts may part, and what is measured is another, equally greedy text of the target.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import Cache

from .corpus import slot_attention, weights_fingerprint
from .models import _line
from .target import PREFILL_CHUNK, PrefixLayer, Target, TargetOutput
from .tree import DraftTree
from .verify import check_finite

BATCH_ROWS = 32  # prompts decoded at once
BATCH_TOKENS = 16_384  # rows times columns of a batch's KV cache, which bounds its memory
FORMAT, VERSION = "eagle2-recording", "1"


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A target's greedy run: ``token_ids`` are prompt and output, ``features [n - 1, H]`` the post-norm hidden states.

    Row i was computed from ``token_ids[: i + 1]``; the last token was never fed, so it has no row.
    """

    token_ids: tuple[int, ...]
    prompt_length: int
    features: Tensor

    def __post_init__(self) -> None:
        if not 0 < self.prompt_length < len(self.token_ids):
            raise ValueError("a recording holds a prompt and at least one token of output")
        if self.features.ndim != 2 or len(self.features) != len(self.token_ids) - 1:
            raise ValueError("a recording holds one feature for each token but the last")

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.token_ids[: self.prompt_length]

    @property
    def output_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_length :]


class _Counted:
    """Rows without a cache: nothing is computed, so nothing is kept but their number."""

    def __init__(self) -> None:
        self.length = self.capacity = 0

    def fork(self) -> _Counted:
        return _Counted()

    def reset(self, capacity: int) -> None:
        self.length = 0

    def reserve(self, capacity: int) -> None:
        pass  # there are no rows to make room for

    def truncate(self, length: int) -> None:
        self.length = length

    def keep(self, rows: Sequence[int]) -> None:
        self.length += len(rows)

    def forward(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a replay reads its passes from the recording")


class ReplayTarget(Target):
    """A `Target` whose passes are read from a recording; embeddings and LM head are the model's own.

    Good for greedy verification only: ``logits`` are 1 at the recorded choice and 0 elsewhere, ``hidden`` is the recorded
    feature on the recorded path and 0 off it, where greedy verification cannot come.
    """

    def __init__(self, model: Any, recording: Recording) -> None:
        super().__init__(model, runs=_Counted())
        self.recording = recording

    def fork(self) -> ReplayTarget:
        return ReplayTarget(self.model, self.recording)

    def prefill(self, token_ids: Sequence[int], capacity: int) -> TargetOutput:
        """``logits [1, V]`` of the last prompt token, ``hidden [S, H]`` of all."""
        prompt = self.recording.prompt_ids
        if tuple(token_ids) != prompt:
            raise ValueError("the recording is of another prompt")
        self.reset()
        self._runs.keep(range(len(prompt)))
        features = self.recording.features[: len(prompt)].to(self.device, self.dtype)
        return TargetOutput(self._one_hot([self.recording.token_ids[len(prompt)]]), features)

    def forward(self, tree: DraftTree) -> TargetOutput:
        """``logits [N, V]`` and ``hidden [N, H]`` of a tree under the next recorded token."""
        ids, at = self.recording.token_ids, self.length
        tokens = tree.token_ids.tolist()
        if at >= len(ids) - 1:
            raise ValueError(f"the recording ends with token {at}, the run goes on")
        if tokens[0] != ids[at]:
            raise ValueError(f"token {at} of the run is not the recorded one; a replay is for greedy decoding only")
        n = len(tokens)
        index = [-1] * n  # position in the recording of each node on the recorded path
        index[0] = at
        for node in range(1, n):
            before = index[tree.parents[node]]
            if 0 <= before < len(ids) - 1 and tokens[node] == ids[before + 1]:
                index[node] = before + 1
        # After the recording's end (a token that ends the run, drafted with children) nothing counts any more.
        known = [node for node in range(n) if 0 <= index[node] < len(ids) - 1]
        choices = [-1] * n
        hidden = torch.zeros(n, self.recording.features.shape[1], dtype=self.dtype, device=self.device)
        for node in known:
            choices[node] = ids[index[node] + 1]
        hidden[known] = self.recording.features[[index[node] for node in known]].to(self.device, self.dtype)
        self._pass_rows = n
        return TargetOutput(self._one_hot(choices), hidden)

    def _one_hot(self, choices: Sequence[int]) -> Tensor:
        """``[n, V]``: 1 at each row's choice, 0 elsewhere; a row without a choice (-1) is all 0."""
        logits = torch.zeros(len(choices), self.vocab_size, dtype=torch.float32, device=self.device)
        rows = [row for row, choice in enumerate(choices) if choice >= 0]
        logits[rows, [choices[row] for row in rows]] = 1.0
        return logits


Report = Callable[[int], None]


def record(
    target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, eos_ids: Iterable[int],
    report: Report | None = None,
) -> Iterator[Recording]:  # fmt: skip
    """Decode ``prompts`` greedily, many at once; yields their recordings in order, batch by batch.

    Ends, like the loop, after a token of ``eos_ids``, at ``max_new_tokens`` or where the context is full.  ``report`` is
    called with the number of tokens that each row of the batch has so far.  Raises `ContextLengthError`.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    for prompt in prompts:
        target.check_prompt(prompt)
    eos = frozenset(eos_ids)
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        longest = max([len(prompt), *map(len, batch)])
        if batch and (len(batch) == BATCH_ROWS or (len(batch) + 1) * (longest + max_new_tokens) > BATCH_TOKENS):
            yield from _decode(target, batch, max_new_tokens, eos, report)
            batch = []
        batch.append(prompt)
    if batch:
        yield from _decode(target, batch, max_new_tokens, eos, report)


@torch.inference_mode()
def _decode(
    target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: frozenset[int], report: Report | None
) -> list[Recording]:
    """One batch, padded on the left, so that all rows write the same column of the KV cache."""
    longest = max(map(len, prompts))
    # As in the loop: the last token is not fed, so one more fits than the context has positions left.
    limits = [min(max_new_tokens, target.max_length - len(prompt) + 1) for prompt in prompts]
    batch = _Batch(target, [longest - len(prompt) for prompt in prompts], longest + max(limits))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
    for begin in range(0, longest, PREFILL_CHUNK):
        hidden = batch.forward(ids[:, begin : begin + PREFILL_CHUNK])
    outputs: list[list[int]] = [[] for _ in prompts]
    with _decoding_attention(target):
        while True:
            logits = target.lm_head(hidden[:, -1])  # [rows, V]
            choices = check_finite(logits, "target", len(max(outputs, key=len)))
            going = []
            for place, row in enumerate(batch.rows):
                output = outputs[row]
                if len(output) < limits[row] and not (output and output[-1] in eos):
                    output.append(choices[place])
                    if len(output) < limits[row] and output[-1] not in eos:
                        going.append(place)
            if report is not None:
                report(len(max(outputs, key=len)))
            if not going:
                break
            if len(going) <= 0.75 * len(batch.rows):
                batch.select(going)
                choices = [choices[place] for place in going]
            hidden = batch.forward(torch.tensor(choices)[:, None])
    recordings = []
    for row, (prompt, output) in enumerate(zip(prompts, outputs)):
        first = longest - len(prompt)
        features = batch.features[row, first : first + len(prompt) + len(output) - 1].clone()
        recordings.append(Recording((*prompt, *output), len(prompt), features))
    return recordings


class _Batch:
    """The KV cache and the features of a batch; ``rows`` are the prompts that are still in it."""

    def __init__(self, target: Target, padding: Sequence[int], capacity: int) -> None:
        self.target = target
        self.rows = list(range(len(padding)))
        self.first = torch.tensor(padding, device=target.device)  # [rows], each row's first column that isn't padding
        self.layers = [PrefixLayer(capacity) for _ in range(target.config.num_hidden_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.features = torch.zeros(
            len(padding), capacity, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def select(self, places: Sequence[int]) -> None:
        """Keep only these rows of the batch."""
        self.rows = [self.rows[place] for place in places]
        index = torch.tensor(places, device=self.target.device)
        self.first = self.first[index]
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[index], layer.values[index]

    def forward(self, token_ids: Tensor) -> Tensor:
        """Hidden states ``[rows, n, H]`` of ``token_ids [rows, n]`` in the next n columns."""
        target, begin = self.target, self.layers[0].length
        end = begin + token_ids.shape[1]
        columns = torch.arange(end, device=target.device)
        own = columns[begin:]
        visible = (columns <= own[:, None]) & (columns >= self.first[:, None, None])  # [rows, n, end]
        mask = torch.zeros(visible.shape, dtype=target.dtype, device=target.device)
        mask.masked_fill_(~visible, torch.finfo(target.dtype).min)
        # Padding and rows that have ended compute something that nobody reads, within the model's positions.
        positions = (own - self.first[:, None]).clamp(0, target.max_length - 1)
        hidden: Tensor = target.model.base_model(
            input_ids=token_ids.to(target.device), attention_mask=mask[:, None], position_ids=positions,
            cache=self.cache, use_cache=True,
        ).last_hidden_state  # fmt: skip
        self.features[self.rows, begin:end] = hidden
        for layer in self.layers:
            layer.keep(range(end - begin))
        return hidden


def _decoding_attention(target: Target) -> contextlib.AbstractContextManager[None]:
    """On a CPU, the corpus generator's attention: one query a row without copying the KV of grouped heads."""
    if target.device.type != "cpu" or target.config._attn_implementation != "sdpa":
        return contextlib.nullcontext()
    return slot_attention(target.model)


class RecordingStore:
    """Recordings in a folder, one safetensors file a prompt, so that another head needs no pass of the target.

    A file's name is a hash of all that the recording depends on: the target's name and a sample of its weights, dtype,
    context, ``eos_ids``, ``max_new_tokens`` and the prompt's ids.
    """

    def __init__(self, folder: Path, target: Target, name: str, *, max_new_tokens: int, eos_ids: Iterable[int]) -> None:
        self.folder, self.target = folder, target
        self.max_new_tokens, self.eos_ids = max_new_tokens, frozenset(eos_ids)
        folder.mkdir(parents=True, exist_ok=True)
        about = [
            FORMAT, VERSION, name, str(target.dtype), target.max_length, target.vocab_size, target.hidden_size,
            max_new_tokens, sorted(self.eos_ids), weights_fingerprint(target.model, torch.float32),
        ]  # fmt: skip
        self._base = json.dumps(about)

    def path(self, prompt_ids: Sequence[int]) -> Path:
        digest = hashlib.blake2b(f"{self._base} {list(prompt_ids)}".encode(), digest_size=16).hexdigest()
        return self.folder / f"{digest}.safetensors"

    def load(self, prompt_ids: Sequence[int]) -> Recording | None:
        """The recording, or None where there is none.  Raises ValueError for a damaged or foreign file."""
        path = self.path(prompt_ids)
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tokens, features = file.get_tensor("token_ids"), file.get_tensor("features")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read ({_line(error)})") from error
        if (metadata.get("format"), metadata.get("version"), metadata.get("name")) != (FORMAT, VERSION, path.stem):
            raise ValueError(f"{path} is not the recording that its name promises")
        if metadata.get("digest") != _digest(tokens, features):
            raise ValueError(f"{path} is damaged")
        if features.dtype != self.target.dtype or features.shape[-1] != self.target.hidden_size:
            raise ValueError(f"{path} is of another target")
        recording = Recording(tuple(tokens.tolist()), len(prompt_ids), features)
        if recording.prompt_ids != tuple(prompt_ids) or not self._ends_right(recording):
            raise ValueError(f"{path} is of another run")
        return recording

    def save(self, recording: Recording) -> None:
        path = self.path(recording.prompt_ids)
        tensors = {
            "token_ids": torch.tensor(recording.token_ids, dtype=torch.int64),
            "features": recording.features.cpu().contiguous(),
        }
        metadata = {"format": FORMAT, "version": VERSION, "name": path.stem, "digest": _digest(**tensors)}
        partial = path.with_suffix(f".{os.getpid()}.partial")
        try:
            save_file(tensors, partial, metadata)
            partial.replace(path)
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written ({_line(error)})") from error
        finally:
            partial.unlink(missing_ok=True)

    def _ends_right(self, recording: Recording) -> bool:
        output = recording.output_ids
        if not all(0 <= token < self.target.vocab_size for token in output):
            return False
        if len(output) > self.max_new_tokens or self.eos_ids & set(output[:-1]):
            return False
        full = recording.prompt_length + len(output) - 1 == self.target.max_length
        return full or len(output) == self.max_new_tokens or output[-1] in self.eos_ids


def _digest(token_ids: Tensor, features: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (token_ids, features):
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
