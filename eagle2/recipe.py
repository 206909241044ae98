"""The settings of a training run from a file (TOML, YAML or JSON), checked key by key.

``assets/head-smollm2-135m/train.toml`` is a complete example with comments.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .corpus import CorpusConfig
from .engine import Settings
from .models import DEFAULT_PRESET, _line
from .train import PRECISIONS, TrainConfig

STAGES = ("generate", "train", "evaluate", "all", "stats")
DTYPES = ("float32", "bfloat16", "float16")


class RecipeError(ValueError):
    """A setting cannot be used; the message names the key and the file."""


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """Question files for tau, and how they are run; without files only the held-out figures are made.

    ``depth`` counts layers of drafted tokens, ``total_tokens`` drafted nodes without the root; ``limit`` is the number
    of questions of each file, 0 for all.
    """

    questions: tuple[str, ...] = ()
    depth: int = 6
    top_k: int = 10
    total_tokens: int = 59
    max_new_tokens: int = 128
    temperature: float = 0.0
    limit: int = 0

    def __post_init__(self) -> None:
        _ = self.settings  # its own checks, before hours of training instead of after
        if self.limit < 0:
            raise ValueError("limit must not be below 0")

    @property
    def settings(self) -> Settings:
        """How each question is run."""
        return Settings(
            max_new_tokens=self.max_new_tokens, temperature=self.temperature, depth=self.depth, top_k=self.top_k,
            total_tokens=self.total_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of a run. ``corpus_folders``: use this text, generate none. Times are in minutes; 0: no limit.

    ``long_corpus`` is text of a second kind, with settings of its own: conversations with long prompts take a larger
    KV cache, which would slow the short ones down.
    """

    target: str = DEFAULT_PRESET
    out: str = ""
    corpus_folders: tuple[str, ...] = ()
    dtype: str = "bfloat16"  # of the target
    mixed_precision: str = "bf16"  # of the training
    device: str = "auto"
    max_minutes: float = 0.0  # of training in one call
    save_minutes: float = 2.0  # between checkpoints
    evaluate_every: int = 200  # steps
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    long_corpus: CorpusConfig | None = None
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.mixed_precision not in PRECISIONS:
            raise ValueError(f"mixed_precision must be one of {', '.join(PRECISIONS)}, not {self.mixed_precision!r}")
        if self.max_minutes < 0 or self.save_minutes < 0 or self.evaluate_every < 1:
            raise ValueError("max_minutes and save_minutes must not be below 0, evaluate_every must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as in a settings file."""
        data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return data


def read_settings(path: str | Path) -> dict[str, Any]:
    """The tables of a settings file, unchecked. Raises `RecipeError` where it cannot be read."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml  # type: ignore[import-untyped]  # comes with transformers

            try:
                data = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(" ".join(str(error).split())) from error
        elif path.suffix == ".json":
            data = json.loads(text)
        else:
            raise RecipeError(f"{path}: a settings file ends in .toml, .yaml or .json")
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not valid: {_line(error)}") from error
    if not isinstance(data, dict):
        raise RecipeError(f"{path} holds no settings")
    return data


def parse_setting(text: str) -> dict[str, Any]:
    """``train.epochs=2`` as nested tables; the value as in TOML, or else plain text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set wants KEY=VALUE, for example train.epochs=2, not {text!r}")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for name in reversed(key.strip().split(".")):
        parsed = {name: parsed}
    result: dict[str, Any] = parsed
    return result


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Nested tables joined; ``over`` wins."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge(result[key], value) if both else value
    return result


def make_recipe(data: dict[str, Any], source: str) -> Recipe:
    """Checked settings; errors name ``source`` (the file) and the key."""
    recipe: Recipe = _build(Recipe, data, source, "")
    return recipe


def _build(kind: Any, table: dict[str, Any], source: str, where: str) -> Any:
    hints = typing.get_type_hints(kind)
    for key in table:
        if key not in hints:
            raise RecipeError(f"{source}: unknown key {where}{key}; known are {', '.join(hints)}")
    values = {key: _value(hints[key], value, source, where + key) for key, value in table.items()}
    try:
        return kind(**values)
    except RecipeError:
        raise
    except ValueError as error:
        raise RecipeError(f"{source}{', section ' + where[:-1] if where else ''}: {error}") from error


def _value(kind: Any, value: Any, source: str, key: str) -> Any:
    if typing.get_origin(kind) is types.UnionType:  # X | None
        if value is None:
            return None
        (kind,) = (choice for choice in typing.get_args(kind) if choice is not types.NoneType)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, dict):
            return _build(kind, value, source, f"{key}.")
        raise RecipeError(f"{source}: {key} must be a section, not {value!r}")
    if typing.get_origin(kind) is tuple:
        (item, *_) = typing.get_args(kind)
        if not isinstance(value, (list, tuple)):
            raise RecipeError(f"{source}: {key} must be a list, not {value!r}")
        return tuple(_value(item, entry, source, key) for entry in value)
    right = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if not right or (isinstance(value, bool) and kind is not bool):
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise RecipeError(f"{source}: {key} must be {words[kind]}, not {value!r}")
    if kind is float and not math.isfinite(value):
        raise RecipeError(f"{source}: {key} must be a finite number")
    return float(value) if kind is float else value
