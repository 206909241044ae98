"""Settings files: every wrong one gives a sentence that names key and file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from eagle2.corpus import CorpusConfig
from eagle2.recipe import Recipe, RecipeError, make_recipe, merge, parse_setting, read_settings

EXAMPLE = Path(__file__).parent.parent / "assets" / "head-smollm2-135m" / "train.toml"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", 'target = "x"\nout = "o"\n[train]\nepochs = 2\n[evaluate]\nquestions = ["q.jsonl"]\n'),
        ("a.yaml", "target: x\nout: o\ntrain: {epochs: 2}\nevaluate:\n  questions: [q.jsonl]\n"),
        ("a.json", '{"target": "x", "out": "o", "train": {"epochs": 2}, "evaluate": {"questions": ["q.jsonl"]}}'),
    ],
)
def test_the_same_settings_in_three_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    recipe = make_recipe(read_settings(tmp_path / name), name)
    assert (recipe.target, recipe.out, recipe.evaluate.questions) == ("x", "o", ("q.jsonl",))
    assert recipe.train.epochs == 2.0
    assert recipe.corpus == Recipe().corpus
    assert make_recipe(recipe.to_dict(), "again") == recipe


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"tagret": "x"}, r"^f\.toml: unknown key tagret; known are target"),
        ({"train": {"epoch": 1}}, r"f\.toml: unknown key train\.epoch;"),
        ({"train": {"epochs": "many"}}, r"f\.toml: train\.epochs must be a number, not 'many'"),
        ({"train": {"epochs": float("nan")}}, r"train\.epochs must be a finite number"),
        ({"train": {"warmup_steps": 1.5}}, r"train\.warmup_steps must be a whole number"),
        ({"corpus": {"slots": True}}, r"corpus\.slots must be a whole number"),
        ({"corpus": 3}, r"corpus must be a section"),
        ({"corpus_folders": "a"}, r"corpus_folders must be a list"),
        ({"train": {"heldout": 0.7}}, r"f\.toml, section train: heldout must lie between"),
        ({"train": {"learning_rate": -1.0}}, r"section train: learning_rate"),
        ({"corpus": {"answer_tokens": 0}}, r"section corpus: answer_tokens"),
        ({"evaluate": {"depth": 0}}, r"section evaluate: depth"),
        ({"mixed_precision": "fp8"}, r"f\.toml: mixed_precision must be one of bf16, fp16, no, not 'fp8'"),
        ({"dtype": "int8"}, r"dtype must be one of"),
        ({"save_minutes": -1}, r"save_minutes must not be below 0"),
    ],
)
def test_wrong_settings_are_named(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_recipe(data, "f.toml")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "x = ", "is not valid"),
        ("a.yaml", "x: [1", "is not valid"),
        ("a.yaml", "- 1", "holds no settings"),
        ("a.json", "{", "is not valid"),
        ("a.ini", "", "ends in .toml"),
        ("b.toml", None, "cannot be read: No such file"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=f"{name}.*{message}") as caught:
        read_settings(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_single_settings_from_the_command_line() -> None:
    data = merge({"train": {"epochs": 1, "seed": 2}}, parse_setting("train.epochs=3"))
    assert data == {"train": {"epochs": 3, "seed": 2}}
    assert parse_setting("out=some/folder") == {"out": "some/folder"}
    assert parse_setting('evaluate.questions=["a"]') == {"evaluate": {"questions": ["a"]}}
    with pytest.raises(RecipeError, match="KEY=VALUE"):
        parse_setting("epochs")


def test_the_example_has_every_key() -> None:
    data = read_settings(EXAMPLE)
    make_recipe(data, str(EXAMPLE))
    for name, section in (("", data), *((key, data[key]) for key in ("corpus", "long_corpus", "train", "evaluate"))):
        kind = Recipe() if not name else getattr(Recipe(long_corpus=CorpusConfig()), name)
        assert set(section) == {field.name for field in dataclasses.fields(kind)}, name
