"""Speed: our lanes against each other, Hugging Face ``generate`` and llama.cpp, on the same prompts, interleaved.

What makes the ratios fair: one process and one copy of the weights; every method is warmed up; on each prompt all methods
run before the next prompt, in rotating order, so that a machine that gets slower meanwhile does so for all; seconds are
from the call to the last token, the prefill and the caches' allocation included; outputs are cut at the stop and at the
cap, and nothing after them is counted.  Greedy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tqdm import tqdm

from .corpus import loop_start
from .cost import CostModel
from .engine import Engine, Settings
from .evaluate import aligned
from .generate import Prefill, Step, Stops, generate, now
from .lookup import MAX_DRAFT, PromptLookup
from .race import first_difference
from .trace import machinery
from .verify import SamplingParams

QUICK_QUESTIONS = Path(__file__).parent.parent / "assets" / "bench" / "quick.jsonl"
QUICK_LIMIT, QUICK_TOKENS = 6, 64  # one prompt of each kind; within five minutes on two cores
WARM_UP_TOKENS = 12
BASE = "ar"

METHODS = {
    "ar": "plain autoregressive decoding by our loop",
    "eagle2": "dynamic tree 3/4/5 (depth, top_k, total_tokens)",
    "eagle2-auto": "dynamic tree sized by the cost model, with copies of earlier text",
    "eagle2-auto-nolookup": "the same without copies",
    "eagle2-paper": "dynamic tree 6/10/59, the paper's 7B setting",
    "static": "static tree 3/4/5",
    "lookup": "our prompt lookup",
    "hf": "Hugging Face generate",
    "hf-lookup": f"Hugging Face generate, prompt_lookup_num_tokens={MAX_DRAFT}",
    "llamacpp": "llama.cpp, autoregressive, on the GGUF file given",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle2": {"depth": 3, "top_k": 4, "total_tokens": 5},
    "eagle2-auto": {"depth": "auto", "top_k": 3, "total_tokens": "auto"},
    "eagle2-auto-nolookup": {"depth": "auto", "top_k": 3, "total_tokens": "auto", "lookup": False},
    "eagle2-paper": {"depth": 6, "top_k": 10, "total_tokens": 59},
    "static": {"tree": "static", "depth": 3, "top_k": 4, "total_tokens": 5},
}
# general.file_type of a GGUF file (llama.cpp's enum llama_ftype)
GGUF_TYPES = {"0": "float32", "1": "float16", "2": "Q4_0", "3": "Q4_1", "7": "Q8_0", "15": "Q4_K_M", "32": "bfloat16"}


class MethodUnavailableError(ValueError):
    """The method is unknown or cannot run here; the message says why."""


@dataclass(slots=True)
class Phases:
    """Where our loop's seconds went: the prefill, and the steps' drafting, verification and commit.

    ``passes``: what the steps' passes cost by the engine's cost model, in autoregressive steps; 0: there is none.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    steps: int = 0
    passes: float = 0.0

    @property
    def decode(self) -> float:
        return self.draft + self.verify + self.commit


Lane = Callable[[list[int], int], tuple[list[int], Phases | None]]  # prompt ids, cap -> ids, and where the time went
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Run:
    """One method on one prompt: ids up to the stop, and the seconds of the whole call."""

    ids: tuple[int, ...]
    seconds: float
    phases: Phases | None = None

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a run gives at least one token")

    @property
    def tokens_per_second(self) -> float:
        return len(self.ids) / self.seconds


@dataclass(frozen=True, slots=True)
class Block:
    """All methods' runs on one prompt in one round."""

    set: str
    prompt: int  # index within the set
    round: int
    runs: Mapping[str, Run]

    def __post_init__(self) -> None:
        if BASE not in self.runs:
            raise ValueError(f"every block needs a run of {BASE!r}, to which the others are compared")

    def ratio(self, method: str) -> float:
        """Tokens per second over our autoregressive lane's; the ratio of the seconds where the ids are equal."""
        return self.runs[method].tokens_per_second / self.runs[BASE].tokens_per_second


def lanes(
    engine: Engine, methods: Sequence[str] | None = None, gguf: str | None = None
) -> tuple[dict[str, Lane], dict[str, str], dict[str, str]]:
    """The methods that can run, their precisions, and sentences on those of the default list that cannot.

    ``methods`` None: all of them.  One that is named and cannot run is a `MethodUnavailableError`.
    """
    check_methods(methods or ())
    made: dict[str, Lane] = {}
    precision: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for name in [BASE, *(name for name in METHODS if name != BASE and (methods is None or name in methods))]:
        try:
            if name == "llamacpp":
                made[name], precision[name] = _llamacpp(engine, gguf)
            else:
                made[name], precision[name] = _lane(name, engine), engine.dtype
        except MethodUnavailableError as error:
            if methods is not None:
                raise
            skipped[name] = str(error)
    return made, precision, skipped


def check_methods(methods: Sequence[str]) -> None:
    """Raise for a name that is no method's."""
    for name in methods:
        if name not in METHODS:
            raise MethodUnavailableError(f"there is no method {name!r}; choose among {', '.join(METHODS)}")


def _lane(name: str, engine: Engine) -> Lane:
    if name == "hf":
        return partial(_hugging_face, engine, {})
    if name == "hf-lookup":
        return partial(_hugging_face, engine, {"prompt_lookup_num_tokens": MAX_DRAFT})
    if name == "lookup":
        return partial(_loop, engine, partial(_lookup, engine), False)
    if name == BASE:
        settings = Settings()
    else:
        try:
            settings = Settings(**SETTINGS[name])
            if settings.tree_settings.automatic:
                engine.calibrate()
        except (TypeError, ValueError) as error:
            raise MethodUnavailableError(f"{name} cannot run: {error}") from error
    return partial(_loop, engine, partial(_tree, engine, settings, name != BASE), name != BASE)


def _tree(
    engine: Engine, settings: Settings, drafted: bool, prompt_ids: list[int], count: int
) -> Iterator[Prefill | Step]:
    return engine.run(prompt_ids, dataclasses.replace(settings, max_new_tokens=count), drafted=drafted)


def _lookup(engine: Engine, prompt_ids: list[int], count: int) -> Iterator[Prefill | Step]:
    target = engine.target.fork()
    return generate(
        target, PromptLookup(target.device), prompt_ids, sampling=SamplingParams(),
        stops=Stops(count, engine.eos_ids), max_nodes=MAX_DRAFT,
    )  # fmt: skip


def _loop(
    engine: Engine, start: Callable[[list[int], int], Iterator[Prefill | Step]], head: bool, prompt_ids: list[int],
    count: int,
) -> tuple[list[int], Phases | None]:  # fmt: skip
    """``head``: a draft head's passes belong to a step that drafts."""
    ids: list[int] = []
    phases = Phases()
    for item in start(prompt_ids, count):
        if isinstance(item, Prefill):
            ids.append(item.token)
            phases.prefill += item.seconds
        else:
            ids += item.emitted
            phases.draft += item.draft_seconds
            phases.verify += item.verify_seconds
            phases.commit += item.commit_seconds
            phases.steps += 1
            if engine.costs is not None:
                phases.passes += _passes(engine.costs, step=item, head=head)
    return ids, phases


def _passes(costs: CostModel, step: Step, head: bool) -> float:
    """A step's passes in autoregressive steps: the target's over its rows, the head's over the root and each fed layer."""
    proposal = step.proposal
    seconds = costs.verify(1 + len(proposal.kept))
    if head and len(proposal.expanded) > 1:
        seconds += costs.draft(1) + sum(costs.draft(len(layer)) for layer in proposal.selected)
    return seconds / costs.verify(1)


def _hugging_face(
    engine: Engine, arguments: Mapping[str, Any], prompt_ids: list[int], count: int
) -> tuple[list[int], Phases | None]:
    """``generate`` of the very model object that our target took its weights from, with the attention it was loaded with.

    Penalties and bans of its generation config are in force in all lanes alike.
    """
    model = engine.target.model
    ids = torch.tensor([prompt_ids], device=engine.target.device)
    eos = sorted(engine.eos_ids)
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0, **arguments,
        )  # fmt: skip
    return output[0, len(prompt_ids) :].tolist(), None


def _llamacpp(engine: Engine, gguf: str | None) -> tuple[Lane, str]:
    """llama.cpp through llama-cpp-python, and the precision that the file says it holds."""
    if gguf is None:
        raise MethodUnavailableError("llamacpp needs the weights as a GGUF file: --gguf FILE")
    if engine.model_settings:
        raise MethodUnavailableError(
            f"llamacpp would not follow the model's generation config, which sets {', '.join(engine.model_settings)}"
        )
    if importlib.util.find_spec("llama_cpp") is None:
        raise MethodUnavailableError("llamacpp needs the package llama-cpp-python, which is not installed")
    if not Path(gguf).is_file():
        raise MethodUnavailableError(f"the GGUF file {gguf} does not exist")
    llama_cpp: Any = importlib.import_module("llama_cpp")
    threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        model_path=gguf, n_ctx=min(engine.target.max_length, 4096), n_threads=threads, n_threads_batch=threads,
        verbose=False,
    )  # fmt: skip
    if model.n_vocab() != engine.target.vocab_size:
        raise MethodUnavailableError(
            f"{gguf} has a vocabulary of {model.n_vocab()} tokens, the target {engine.target.vocab_size}"
        )

    def run(prompt_ids: list[int], count: int) -> tuple[list[int], Phases | None]:
        model.reset()  # it would keep the KV of a prompt that it has just seen
        ids: list[int] = []
        for token in model.generate(prompt_ids, temp=0.0, repeat_penalty=1.0):
            ids.append(int(token))
            if token in engine.eos_ids or len(ids) == count:
                break
        return ids, None

    kind = str(model.metadata.get("general.file_type"))
    return run, GGUF_TYPES.get(kind, f"GGUF file type {kind}")


@dataclass(slots=True)
class Measured:
    """What came out; ``interrupted``: the last prompt was not finished by all methods and is not in it."""

    blocks: list[Block]
    skipped: dict[str, int]  # set -> prompts that leave no room in the context
    interrupted: bool = False


def measure(
    methods: Mapping[str, Lane], sets: Mapping[str, Sequence[list[int]]], *, max_new_tokens: int,
    eos_ids: frozenset[int], max_length: int, clock: Clock, rounds: int = 1, progress: bool = True,
) -> Measured:  # fmt: skip
    """Run all ``methods`` on the prompts (ids) of ``sets``, ``rounds`` times; see the module's text for the order.

    An interrupt (Ctrl-C) ends the measurement early.
    """
    stops = Stops(max_new_tokens, eos_ids)
    jobs: list[tuple[str, int, list[int]]] = []
    skipped: dict[str, int] = {}
    for name, prompts in sets.items():
        fitting = [(index, ids) for index, ids in enumerate(prompts) if len(ids) + max_new_tokens <= max_length]
        skipped[name] = len(prompts) - len(fitting)
        jobs += [(name, index, ids) for index, ids in fitting]
    if not jobs:
        raise ValueError(f"no prompt leaves room for {max_new_tokens} new tokens in the context of {max_length}")
    measured = Measured([], skipped)
    names = list(methods)
    bar = tqdm(total=rounds * len(jobs) * len(names), unit="run", disable=not progress)
    with bar:
        try:
            for name in names:
                bar.set_description_str(f"warm-up, {name}")
                methods[name](jobs[0][2], min(WARM_UP_TOKENS, max_new_tokens))
            turn = 0
            for number in range(rounds):
                for set_name, index, prompt_ids in jobs:
                    first = turn % len(names)
                    runs: dict[str, Run] = {}
                    for name in names[first:] + names[:first]:
                        bar.set_description_str(f"{set_name} {index + 1}, {name}")
                        began = clock()
                        ids, phases = methods[name](prompt_ids, max_new_tokens)
                        seconds = clock() - began
                        count, _ = stops.cut([], ids)
                        runs[name] = Run(tuple(ids[:count]), seconds, phases)
                        bar.update()
                    measured.blocks.append(Block(set_name, index, number, {name: runs[name] for name in names}))
                    turn += 1
        except KeyboardInterrupt:
            measured.interrupted = True
    return measured


def row(method: str, set_name: str, precision: str, blocks: Sequence[Block]) -> dict[str, Any]:
    """One method's figures on one set.

    ``speedup``: median over the prompts of the tokens per second over our autoregressive lane's on the same prompt in
    the same round (over rounds: their median), ``quartiles`` beside it; ``speedup_total``: all tokens by all seconds.
    Where the ids are equal (``equal_share``) that is the ratio of the seconds.  ``loop_share``: outputs that end in a
    loop.  Of our own lanes also: ``tau``, tokens per target pass without the prefill's; ``shares`` of the loop's seconds;
    and ``efficiency``, which says how much is lost between a step's passes: the decoding speed-up (the prefill left out
    of both lanes' whole seconds) over ``tau / cost``, cost being that of a step's passes in autoregressive steps, as
    `eagle2.calibrate` measured them one by one (None without a cost model).
    """
    runs = [block.runs[method] for block in blocks]
    bases = [block.runs[BASE] for block in blocks]
    by_prompt: dict[int, list[float]] = {}
    for block in blocks:
        by_prompt.setdefault(block.prompt, []).append(block.ratio(method))
    ratios = [statistics.median(values) for values in by_prompt.values()]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    rate = _rate(runs)
    result: dict[str, Any] = {
        "method": method,
        "set": set_name,
        "precision": precision,
        "speedup": statistics.median(ratios),
        "speedup_total": rate / _rate(bases),
        "quartiles": [quartiles[0], quartiles[2]],
        "tau": None,
        "tokens_per_second": rate,
        "equal_share": statistics.fmean(run.ids == base.ids for run, base in zip(runs, bases)),
        "loop_share": statistics.fmean(loop_start(list(run.ids)) is not None for run in runs),
        "prompts": len(ratios),
        "tokens": sum(len(run.ids) for run in runs),
        "seconds": sum(run.seconds for run in runs),
        "shares": None,
        "efficiency": None,
    }
    phases, base_phases = _sum(runs), _sum(bases)
    if phases is None or base_phases is None or not phases.steps or not base_phases.steps:
        return result
    total = phases.prefill + phases.decode
    drafted = result["tokens"] - len(runs)  # each run's first token is the prefill's
    result["tau"] = drafted / phases.steps
    result["shares"] = {
        name: getattr(phases, name) / total for name in ("prefill", "draft", "verify", "commit")
    }  # fmt: skip
    base_drafted = sum(len(run.ids) for run in bases) - len(bases)
    speedup = (drafted / (result["seconds"] - phases.prefill)) / (
        base_drafted / (sum(run.seconds for run in bases) - base_phases.prefill)
    )
    if phases.passes:
        result["efficiency"] = speedup / (result["tau"] / (phases.passes / phases.steps))
    return result


def _rate(runs: Sequence[Run]) -> float:
    return sum(len(run.ids) for run in runs) / sum(run.seconds for run in runs)


def _sum(runs: Sequence[Run]) -> Phases | None:
    """None where one run's phases are not known."""
    total = Phases()
    for run in runs:
        if run.phases is None:
            return None
        for field in dataclasses.fields(Phases):
            setattr(total, field.name, getattr(total, field.name) + getattr(run.phases, field.name))
    return total


AVERAGED = ("speedup", "speedup_total", "tau", "tokens_per_second", "equal_share", "loop_share", "efficiency")


def rows(measured: Measured, precision: Mapping[str, str]) -> list[dict[str, Any]]:
    """`row` for each set and method; of several sets also their unweighted means, as set "mean"."""
    sets = list(dict.fromkeys(block.set for block in measured.blocks))
    made = [
        row(method, name, precision[method], [block for block in measured.blocks if block.set == name])
        for name in sets
        for method in (measured.blocks[0].runs if measured.blocks else ())
    ]
    if len(sets) < 2:
        return made
    for method in measured.blocks[0].runs:
        own = [entry for entry in made if entry["method"] == method]
        mean: dict[str, Any] = dict.fromkeys(own[0]) | {
            "method": method, "set": "mean", "precision": precision[method],
            **{key: sum(entry[key] for entry in own) for key in ("prompts", "tokens", "seconds")},
        }  # fmt: skip
        for key in AVERAGED:
            values = [entry[key] for entry in own]
            mean[key] = None if None in values else statistics.fmean(cast(list[float], values))
        made.append(mean)
    return made


def bench(
    engine: Engine, questions: Mapping[str, Sequence[str]], *, max_new_tokens: int, methods: Sequence[str] | None = None,
    rounds: int = 1, gguf: str | None = None, clock: Clock | None = None, progress: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Measure and give plain values: ``rows``, ``runs`` (one by one) and what they must be printed with."""
    if rounds < 1:
        raise ValueError(f"there must be at least 1 round, not {rounds}")
    if len(questions) > 1 and "mean" in questions:
        raise ValueError('a question file must not be called "mean", which is the row of all files together')
    with contextlib.suppress(ValueError):  # an engine that was told to do without costs
        engine.calibrate()
    ours, precision, skipped = lanes(engine, methods, gguf)
    sets = {name: [engine.encode(text) for text in texts] for name, texts in questions.items()}
    device = engine.target.device
    measured = measure(
        ours, sets, max_new_tokens=max_new_tokens, eos_ids=engine.eos_ids, max_length=engine.target.max_length,
        clock=clock or partial(now, device), rounds=rounds, progress=progress,
    )  # fmt: skip
    about = engine.metadata(Settings(max_new_tokens=max_new_tokens))  # with the costs that an automatic tree measured
    for key in ("tree", "seed", "stop"):  # each method has its own tree, and nothing is drawn
        del about[key]
    if "llamacpp" in ours:
        about["versions"]["llama-cpp-python"] = importlib.metadata.version("llama-cpp-python")
    return {
        "rows": rows(measured, precision),
        "runs": [
            {
                "set": block.set, "prompt": block.prompt, "round": block.round, "method": name,
                "tokens": len(run.ids), "seconds": run.seconds,
                "first_difference": first_difference(run.ids, block.runs[BASE].ids),
            }
            for block in measured.blocks
            for name, run in block.runs.items()
        ],
        "methods": {name: METHODS[name] for name in ours},
        "unavailable": skipped,
        "skipped_prompts": measured.skipped,
        "rounds": rounds,
        "interrupted": measured.interrupted,
        "settings": about,
    }  # fmt: skip


def table(result: Mapping[str, Any]) -> str:
    """`bench`'s rows as text: a table for each set, then their mean."""
    lines: list[str] = []
    for name in dict.fromkeys(entry["set"] for entry in result["rows"]):
        own = [entry for entry in result["rows"] if entry["set"] == name]
        what = "mean of the sets" if name == "mean" else f"{name}, {own[0]['prompts']} prompts"
        head = ["speed-up", "quartiles", "total", "tokens/s", "tau", "efficiency", "draft", "verify", "equal", "loops"]
        cells = [[what, *head]]
        for entry in own:
            shares = entry["shares"] or {}
            low_high = entry["quartiles"]
            cells.append(
                [
                    entry["method"],
                    f"{entry['speedup']:.2f}x",
                    "-" if low_high is None else f"{low_high[0]:.2f}-{low_high[1]:.2f}",
                    f"{entry['speedup_total']:.2f}x",
                    f"{entry['tokens_per_second']:.1f}",
                    "-" if entry["tau"] is None else f"{entry['tau']:.2f}",
                    _percent(entry["efficiency"]),
                    _percent(shares.get("draft")),
                    _percent(shares.get("verify")),
                    _percent(entry["equal_share"]),
                    _percent(entry["loop_share"]),
                ]
            )
        lines += [*aligned(cells), ""]
    for name, why in result["unavailable"].items():
        lines.append(f"not measured: {name}, since {why}" if not why.startswith(name) else f"not measured: {why}")
    left_out = sum(result["skipped_prompts"].values())
    if left_out:
        lines.append(f"{left_out} prompts left no room in the context and are in no figure")
    if result["interrupted"]:
        lines.append("interrupted: prompts that not all methods have finished are in no figure")
    meta = result["settings"]
    lines += [
        f"{meta['target']}, head {meta['head']} in {meta['draft_weights']}, {machinery(meta)}, "
        f"{meta['max_new_tokens']} new tokens, greedy, rounds: {result['rounds']}, torch {meta['versions']['torch']}, "
        f"transformers {meta['versions']['transformers']}",
        f"speed-up: tokens/s over {BASE}'s on the same prompt, prefill included, median over prompts; total: all tokens by "
        "all seconds; efficiency: decoding speed-up over tau / (calibrated cost of a step's passes, in autoregressive "
        f"steps); tau: tokens per target pass, the target's own included, without the prefill's; equal: outputs with {BASE}'s "
        "ids; loops: outputs that end in a loop; every method ran once before, unmeasured (warm-up)",
    ]
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
