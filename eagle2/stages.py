"""From a target to a draft head: generate text, train, evaluate, save. Each stage goes on from where it was cut.

In ``out``: ``settings.json``, ``corpus/`` and ``long_corpus/`` (shards), ``run/`` (checkpoint, log, head so far), ``evaluation.json``, and
``head/`` (the head and ``training.json``, everything there is to know about it).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]

from .corpus import (
    CorpusConfig,
    full_disk_in_a_sentence,
    pack_linears,
    plan_corpus,
    shard_files,
    target_identity,
    write_file,
)
from .engine import Engine
from .evaluate import evaluate_sets, read_question_sets
from .head import EagleHead
from .models import load_model, model_files
from .recipe import STAGES, Recipe, RecipeError, read_settings
from .stats import corpus_stats
from .train import CorpusData, make_accelerator, make_trainer, read_log, save_head


def train_head(recipe: Recipe, stage: str = "all") -> dict[str, Any] | None:
    """Run a stage (`STAGES`) or all; what is complete is skipped. Returns what stands in ``head/training.json``.

    "train" goes on to save the head; "evaluate" needs a run.  "generate" and "stats" return the text's statistics.  Under
    ``accelerate launch`` all processes call this; only the first returns figures, the others None.  All must see the
    same folders.  Raises `RecipeError`, `CorpusError`, `ModelError` and what `Trainer.fit` raises.
    """
    if stage not in STAGES:
        raise RecipeError(f"the stage must be one of {', '.join(STAGES)}, not {stage!r}")
    if stage == "stats":
        return _stats(recipe)
    if not recipe.out:
        raise RecipeError("there is no out folder: give --out or the key out")
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)
    check_settings(recipe, out)
    if recipe.mixed_precision == "fp16" and (recipe.device == "cpu" or not torch.cuda.is_available()):
        raise RecipeError("mixed_precision fp16 needs a GPU; use bf16 or no")
    if recipe.device.startswith("cuda:") and torch.cuda.is_available():
        torch.cuda.set_device(recipe.device)
    accelerator = make_accelerator(recipe.mixed_precision, recipe.device)
    if accelerator.is_main_process:
        write_file(out / "settings.json", lambda p: p.write_text(json.dumps(recipe.to_dict(), indent=1) + "\n"))
    with full_disk_in_a_sentence(out):
        return _run(recipe, stage, out, accelerator)


def _run(recipe: Recipe, stage: str, out: Path, accelerator: Accelerator) -> dict[str, Any] | None:
    own = recipe.device == "auto" or accelerator.num_processes > 1
    device = str(accelerator.device) if own else recipe.device
    model, tokenizer = load_model(recipe.target, dtype=getattr(torch, recipe.dtype), device=device)
    if model.get_output_embeddings() is None:
        raise RecipeError(f"{recipe.target} has no LM head that a draft head could use")
    target = target_identity(recipe.target, model)
    if stage in ("generate", "all") and not recipe.corpus_folders:
        for config, folder in _texts(recipe):
            plan = plan_corpus(
                model, tokenizer, config, folder, name=recipe.target,
                rank=accelerator.process_index, ranks=accelerator.num_processes,
            )  # fmt: skip
            accelerator.wait_for_everyone()  # all have read the folder before one writes
            if plan.missing:
                pack_linears(model, config.slots)
            plan.run()
            accelerator.wait_for_everyone()
    data = CorpusData(*_folders(recipe), target=target)
    if stage == "generate":
        accelerator.end_training()  # a process that ends with its group open may be aborted
        return corpus_stats(data, tokenizer, recipe.train.heldout) if accelerator.is_main_process else None
    trainer = make_trainer(model, data, recipe.train, precision=recipe.mixed_precision, accelerator=accelerator)
    del model  # the trainer keeps the two matrices that it needs
    if stage == "evaluate":
        if not (out / "run" / "checkpoint.pt").exists():
            raise RecipeError(f"{out / 'run'} holds no training to evaluate; run the stage train first")
        head = EagleHead.load(out / "run", device=trainer.device)
        figures = trainer.evaluate(head, data.split(recipe.train.heldout)[1])
    else:
        figures = trainer.fit(
            out / "run",
            evaluate_every=recipe.evaluate_every,
            save_every=60 * recipe.save_minutes,
            max_seconds=60 * recipe.max_minutes or math.inf,
        )
    accelerator.end_training()  # from here on the first process works alone
    if not accelerator.is_main_process:
        return None
    curve = [{key: float(value) for key, value in row.items() if value} for row in read_log(out / "run")]
    (out / "head").mkdir(exist_ok=True)
    save_head(EagleHead.load(out / "run"), out / "head")
    record = {
        "target": target,
        "settings": recipe.to_dict(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")},
        "device": torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"CPU, {torch.get_num_threads()} threads",
        "processes": accelerator.num_processes,
        "corpus": corpus_stats(data, tokenizer, recipe.train.heldout),
        "heldout": figures,
        "curve": curve,
    }

    def save_record() -> None:
        write_file(out / "head" / "training.json", lambda p: p.write_text(json.dumps(record, indent=1) + "\n"))

    save_record()  # before the questions, which take their time
    if stage != "train" and recipe.evaluate.questions:
        del trainer, data
        record["tau"] = _tau(recipe, out, device)
        save_record()
    return record


def check_settings(recipe: Recipe, out: Path) -> None:
    """Raise `RecipeError` where what ``out`` already holds was made with other settings; the key is named.

    Fixed by text that exists: the target, its dtype, and the corpus section but for its size and slots.  Fixed by a
    checkpoint: the target, mixed_precision and the train section.  Everything else may change from call to call.
    """
    path = out / "settings.json"
    if not path.exists():
        return
    before, now = read_settings(path), recipe.to_dict()
    fixed: list[tuple[str, ...]] = []
    for name in ("corpus", "long_corpus"):
        if shard_files(out / name) and not recipe.corpus_folders:
            fixed += [("target",), ("dtype",)]
            fixed += [(name, key) for key in now[name] or {} if key not in ("answer_tokens", "slots")]
    if (out / "run" / "checkpoint.pt").exists():
        fixed += [("target",), ("mixed_precision",), ("corpus_folders",), *(("train", key) for key in now["train"])]
    for keys in fixed:
        was: Any = before
        new: Any = now
        for key in keys:
            was, new = (was or {}).get(key), new[key]
        if was is not None and was != new:
            raise RecipeError(f"{path}: {'.'.join(keys)} was {was!r}, now {new!r}; choose another out folder")


def _tau(recipe: Recipe, out: Path, device: str) -> dict[str, Any]:
    """`evaluate_sets` of the saved head over the recipe's questions; kept in ``evaluation.json``, made once per head."""
    config = recipe.evaluate
    sets = read_question_sets(config.questions, config.limit or None)
    weights = hashlib.blake2b((out / "head" / "model.safetensors").read_bytes(), digest_size=16).hexdigest()
    of = {"head": weights, "settings": recipe.to_dict()["evaluate"]}
    path = out / "evaluation.json"
    if path.exists():
        known = read_settings(path)
        if known.get("of") == of:
            return dict(known["result"])
    load = functools.partial(Engine.load, recipe.target, str(out / "head"), device=device, exact_draft=True)
    result = evaluate_sets(load, sets, config.settings)
    write_file(path, lambda p: p.write_text(json.dumps({"of": of, "result": result}, indent=1) + "\n"))
    return result


def _folders(recipe: Recipe) -> list[Path]:
    return [Path(folder) for folder in recipe.corpus_folders] or [folder for _, folder in _texts(recipe)]


def _texts(recipe: Recipe) -> list[tuple[CorpusConfig, Path]]:
    """The texts that are to be generated, and their folders."""
    texts = [(recipe.corpus, Path(recipe.out) / "corpus")]
    if recipe.long_corpus is not None:
        texts.append((recipe.long_corpus, Path(recipe.out) / "long_corpus"))
    return texts


def _stats(recipe: Recipe) -> dict[str, Any]:
    from transformers import AutoTokenizer

    if not recipe.out and not recipe.corpus_folders:
        raise RecipeError("there is no text to look at: give --corpus-folder or --out")
    data = CorpusData(*_folders(recipe))
    tokenizer = AutoTokenizer.from_pretrained(model_files(recipe.target, weights=False))
    return corpus_stats(data, tokenizer, recipe.train.heldout)
