"""A loaded target with its head and tokenizer, and the settings of a run: what the app and the command line share."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch

from . import __version__, models
from .calibrate import calibrate, calibrated, machine_key
from .cost import CostModel, Size
from .device import DeviceEagleDrafter
from .draft import Drafter, RootOnly
from .eagle import DraftVocabulary, EagleDrafter, TreeSettings
from .generate import Prefill, Step, Stops, generate
from .head import DraftHead, EagleHead
from .lean import LeanHead
from .processors import describe, settings_in_force
from .race import RaceUpdate, RunRecorder, race
from .target import Target
from .trace import Trace
from .verify import SamplingParams

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_NEW_TOKENS = 4096

Progress = Callable[[str, int, int], None]  # stage, done, total
Costs = CostModel | Literal["auto", "measure"] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run; every bad value is a ValueError of one sentence.

    The tree's defaults (3, 4, 5) are small since a target pass on a CPU grows dear with its rows (see `default_sizes`); the
    paper's 7B tree is depth 6, top_k 10, total_tokens 59.  ``depth`` and ``total_tokens`` may be "auto": the engine's cost model then
    chooses them at every step.  ``lookup``: copies of earlier text join the tree where they look better; None: in
    automatic trees only.
    """

    max_new_tokens: int = 96
    temperature: float = 0.0
    sample_top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    tree: Literal["dynamic", "static"] = "dynamic"
    depth: Size = 3
    top_k: int = 4
    total_tokens: Size = 5
    lookup: bool | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.max_new_tokens <= MAX_NEW_TOKENS:
            raise ValueError(f"max_new_tokens must lie between 1 and {MAX_NEW_TOKENS}, not {self.max_new_tokens}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"the seed must lie between 0 and 2^63 - 1, not {self.seed}")
        _ = self.sampling, self.tree_settings  # their own checks

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.sample_top_k, self.top_p)

    @property
    def tree_settings(self) -> TreeSettings:
        lookup = "auto" in (self.depth, self.total_tokens) if self.lookup is None else self.lookup
        return TreeSettings(self.tree, self.depth, self.top_k, self.total_tokens, lookup)

    def describe(self) -> dict[str, Any]:
        """Plain values for traces and JSON."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "sampling": {"temperature": self.temperature, "top_k": self.sample_top_k, "top_p": self.top_p},
            "tree": {
                "kind": self.tree, "depth": self.depth, "top_k": self.top_k, "total_tokens": self.total_tokens,
                "lookup": self.tree_settings.lookup,
            },
            "stop": list(self.stop),
        }  # fmt: skip


def default_sizes(device: str = "auto") -> dict[str, Any]:
    """Tree sizes for a machine, as arguments of `Settings`: automatic on CPUs, where rows are dear, the paper's on GPUs.

    ``top_k`` 3: with automatic trees 2, 3 and 4 gave modelled speed-ups of 1.82, 1.81 and 1.80 over six question sets.
    """
    if device in ("auto", models.SPREAD):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda"):
        return {"depth": 6, "top_k": 10, "total_tokens": 59}
    return {"depth": "auto", "top_k": 3, "total_tokens": "auto"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of, loaded but not set up for passes yet."""

    model: Any
    tokenizer: Any
    head: EagleHead
    name: str
    head_name: str
    dtype: str
    full_vocabulary: bool = False

    @classmethod
    def load(
        cls, model: str, head: str | None = None, *, dtype: str = "auto", device: str = "auto",
        progress: Progress | None = None, full_vocabulary: bool = False,
    ) -> Parts:  # fmt: skip
        """The arguments are those of `Engine.load`."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if dtype == "auto":
            dtype = models.auto_dtype(model, device)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be auto or one of {', '.join(DTYPES)}, not {dtype!r}")
        folder, head_name = models.head_files(model, head, dtype=dtype, device=device, progress=progress)
        loaded, tokenizer = models.load_model(model, dtype=DTYPES[dtype], device=device, progress=progress)
        # Where the target is spread, the engine puts the head beside the LM head.
        beside = "cpu" if device == models.SPREAD else device
        eagle_head = EagleHead.load(folder, target=loaded, device=beside, dtype=DTYPES[dtype])
        return cls(
            model=loaded, tokenizer=tokenizer, head=eagle_head, name=model, head_name=head_name, dtype=dtype,
            full_vocabulary=full_vocabulary,
        )  # fmt: skip

    @property
    def layers(self) -> int:
        """Of the target."""
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def weight_bytes(self) -> int:
        """Of the weights."""
        weights = (*self.model.parameters(), *self.head.parameters())
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def engine(self, device: str | None = None, **options: Any) -> Engine:
        """An engine of these parts, which move to ``device`` first where one is named."""
        if device is not None:
            self.model.to(device)
        return Engine(
            self.model, self.tokenizer, self.head, name=self.name, head_name=self.head_name,
            full_vocabulary=self.full_vocabulary, **options,
        )  # fmt: skip


class Engine:
    """One target, one head, one tokenizer. Runs share the weights; each run has caches of its own.

    ``full_vocabulary``: draft over all of the target's tokens even if the head comes with a reduced vocabulary.
    ``costs`` serve automatic trees: a cost model, "auto" (measured here, or read from the cache folder, when first
    needed), "measure" (measured now, whatever the cache holds) or None (automatic trees are refused).
    ``row_invariant``: see `Target`; where sums are in half precision (not on x86 CPUs) both lanes then hardly ever part.
    Native passes (`eagle2.native`) are so without being asked, at no cost.
    ``exact_draft``: beside native passes the draft head runs with eight bits per weight, which the output does not depend
    on; with this it runs as it was loaded.
    """

    def __init__(
        self, model: Any, tokenizer: Any, head: EagleHead, *, name: str, head_name: str, full_vocabulary: bool = False,
        costs: Costs = "auto", row_invariant: bool = False, exact_draft: bool = False,
    ) -> None:  # fmt: skip
        self.target = Target(model, invariant=row_invariant)
        self.model_settings = settings_in_force(model)  # penalties and bans of the model's generation config
        self.head = head.to(self.target.feature_device)
        self.tokenizer, self.name, self.head_name = tokenizer, name, head_name
        # On the same blocks as the target, where these run it.
        lean_head = self.target.why_not_lean is None and LeanHead.refusal(head) is None
        self.rounded_draft = lean_head and not exact_draft and self.target.forward_name == "native"
        self._draft_head: DraftHead = LeanHead(head, rounded=self.rounded_draft) if lean_head else head
        self.vocabulary = DraftVocabulary(
            self.target, None if full_vocabulary else head.draft_token_ids, rounded=self.rounded_draft
        )
        eos = model.generation_config.eos_token_id
        if eos is None:
            eos = tokenizer.eos_token_id
        self.eos_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        if not (costs is None or isinstance(costs, CostModel) or costs in ("auto", "measure")):
            raise ValueError(f"costs must be a cost model, 'auto', 'measure' or None, not {costs!r}")
        self.costs = costs if isinstance(costs, CostModel) else None  # what is known of them
        self._may_measure = costs is not None
        self._on_device: DeviceEagleDrafter | None = None  # the last one, which lends its buffers to the next run's
        if costs == "measure":
            self.calibrate(force=True)

    @classmethod
    def load(
        cls, model: str = models.DEFAULT_PRESET, head: str | None = None, *, dtype: str = "auto", device: str = "auto",
        progress: Progress | None = None, full_vocabulary: bool = False, costs: Costs = "auto",
        row_invariant: bool = False, exact_draft: bool = False,
    ) -> Engine:  # fmt: skip
        """Load a preset, a local folder or a hub id; ``head`` is a folder or a hub id (a preset brings its own).

        ``dtype="auto"``: float32 on CPU, where both lanes then give the same ids; half precision (a preset's own) on a GPU.
        ``device``: auto, cpu, cuda, cuda:1, or "spread" over all GPUs, this machine's memory and its disk.
        """
        parts = Parts.load(model, head, dtype=dtype, device=device, progress=progress, full_vocabulary=full_vocabulary)
        return parts.engine(costs=costs, row_invariant=row_invariant, exact_draft=exact_draft)

    @property
    def dtype(self) -> str:
        return str(self.target.dtype).split(".")[-1]

    @property
    def device(self) -> str:
        return str(self.target.device)

    @property
    def draft_weights(self) -> str:
        """Dtype of the weights that drafts are made with."""
        return "int8" if self.rounded_draft else str(next(self.head.parameters()).dtype).split(".")[-1]

    def encode(self, prompt: str) -> list[int]:
        """Prompt ids with the chat template; ValueError for an empty prompt and for a list of them."""
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt must be one text, not a {type(prompt).__name__}; run prompts one at a time")
        if not prompt.strip():
            raise ValueError("the prompt is empty; write something")
        return models.encode_chat(self.tokenizer, [{"role": "user", "content": prompt}])

    def calibrate(self, *, force: bool = False) -> CostModel:
        """What passes cost here: known, else from the cache folder, else measured (about 3 seconds).  ``force``: measured."""
        if self.costs is None or force:
            if not self._may_measure:
                raise ValueError("an automatic tree needs a cost model, and this engine was loaded without one")
            key = machine_key(self.target, self._draft_head, self.vocabulary, name=self.name, head_name=self.head_name)
            self.costs = calibrated(key, lambda: calibrate(self.target, self._draft_head, self.vocabulary), force=force)
        return self.costs

    def stops(self, settings: Settings) -> Stops:
        return Stops(settings.max_new_tokens, self.eos_ids, settings.stop, self.tokenizer.decode)

    def drafter(self, settings: Settings, target: Target) -> EagleDrafter | DeviceEagleDrafter:
        tree = settings.tree_settings
        if DeviceEagleDrafter.refusal(self.head, tree) is None:
            if self._on_device is None or self._on_device.settings != tree:
                self._on_device = DeviceEagleDrafter(self.head, self.target, tree, self.vocabulary)
            return self._on_device.fork()
        return EagleDrafter(
            self._draft_head, target, tree, self.vocabulary, costs=self.calibrate() if tree.automatic else None
        )

    def run(self, prompt_ids: list[int], settings: Settings, *, drafted: bool = True) -> Iterator[Prefill | Step]:
        """One lane on a fresh cache; ``drafted=False`` is plain autoregressive decoding by the same loop."""
        target = self.target.fork()
        drafter: Drafter = self.drafter(settings, target) if drafted else RootOnly(target.device)
        generator = torch.Generator().manual_seed(settings.seed)
        return generate(
            target, drafter, prompt_ids, sampling=settings.sampling, stops=self.stops(settings), generator=generator,
            max_nodes=settings.tree_settings.total_limit,
        )  # fmt: skip

    def race(self, prompt: str, settings: Settings) -> Iterator[RaceUpdate]:
        """Both lanes on ``prompt``; closing the iterator ends the run at the next step."""
        ids = self.encode(prompt)
        lanes = {
            "eagle2": self.run(ids, settings),
            "autoregressive": self.run(ids, settings, drafted=False),
        }
        recorder = RunRecorder(self.tokenizer, prompt, ids, settings.sampling)
        return race(lanes, recorder, self.metadata(settings))

    def follow(self, prompt: str, settings: Settings) -> Iterator[Trace | None]:
        """An EAGLE-2 run without the other lane: None after each step, the recording at the end."""
        ids = self.encode(prompt)
        recorder = RunRecorder(self.tokenizer, prompt, ids, settings.sampling)
        with closing(self.run(ids, settings)) as items:  # type: ignore[type-var]
            for item in items:
                recorder.add("eagle2", item)
                yield None
        yield recorder.trace(self.metadata(settings))

    def trace(self, prompt: str, settings: Settings) -> Trace:
        """Record an EAGLE-2 run without the other lane."""
        *_, made = self.follow(prompt, settings)
        assert made is not None  # the last one
        return made

    def metadata(self, settings: Settings) -> dict[str, Any]:
        """What a figure must be printed with."""
        import transformers

        return {
            "target": self.name,
            "head": self.head_name,
            "draft_vocab": self.vocabulary.size,
            "draft_weights": self.draft_weights,
            "dtype": self.dtype,
            "arithmetic": str(self.target.arithmetic).split(".")[-1],
            "device": _device_name(self.target.device),
            "threads": torch.get_num_threads(),
            "forward": self.target.forward_name,
            "row_invariant": self.target.row_invariant,
            **({} if self._on_device is None else {"draft_forward": str(self._on_device.status)}),
            **settings.describe(),
            **({"generation_config": describe(self.model_settings)} if self.model_settings else {}),
            **({} if self.costs is None else {"costs": self.costs.to_dict()}),
            "versions": {
                "eagle2": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "clock": "measured",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.machine()})"
