"""Directions of import (design, section 2)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# module -> modules of ours that it may import
ALLOWED: dict[str, set[str]] = {
    "trace": set(),
    "cost": set(),
    "tree": set(),
    "text": set(),
    "prompts": set(),
    "hub": set(),
    "presets": {"hub"},
    "models": {"hub", "presets"},
    "verify": {"native", "tree", "trace"},
    "native": {"models"},
    "lean": {"head", "native"},
    "graphs": {"lean", "zero"},
    "zero": set(),
    "target": {"graphs", "lean", "tree"},
    "checkpoint": set(),
    "head": {"checkpoint"},
    "draft": {"tree"},
    "eagle": {"cost", "draft", "head", "lean", "lookup", "native", "target", "tree", "verify"},
    "device": {"draft", "eagle", "graphs", "head", "lean", "target", "tree", "verify"},
    "lookup": {"draft", "tree"},
    "processors": {"target", "tree"},
    "generate": {"draft", "processors", "target", "tree", "verify"},
    "record": {"generate", "native", "trace", "verify"},
    "race": {"generate", "record", "text", "trace", "verify"},
    "engine": {
        "calibrate",
        "cost",
        "device",
        "draft",
        "eagle",
        "generate",
        "head",
        "lean",
        "models",
        "processors",
        "race",
        "target",
        "trace",
        "verify",
    },
    "calibrate": {"cost", "eagle", "generate", "head", "lean", "models", "native", "target", "tree", "verify"},
    "chat": {"draft", "engine", "generate", "models", "race", "target", "trace"},
    "gallery": {"engine", "race", "trace"},
    "corpus": {"lean", "models", "prompts"},
    "train": {"corpus", "head", "models"},
    "recipe": {"corpus", "engine", "models", "train"},
    "stats": {"train"},
    "stages": {"corpus", "engine", "evaluate", "head", "models", "recipe", "stats", "train"},
    "replay": {"corpus", "models", "target", "tree", "verify"},
    "evaluate": {"corpus", "engine", "generate", "models", "replay"},
    "bench": {"corpus", "cost", "engine", "evaluate", "generate", "lookup", "race", "trace", "verify"},
    "export": {"head", "models"},
    "__init__": set(),
    "__main__": {
        "bench",
        "chat",
        "corpus",
        "cost",
        "engine",
        "evaluate",
        "export",
        "gallery",
        "generate",
        "models",
        "race",
        "recipe",
        "stages",
        "trace",
    },
}


def imports(path: Path, package: str) -> set[str]:
    """Modules of ``package`` that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            if node.level == 1 and path.parent.name == package:
                found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
            elif node.module and node.module.split(".")[0] == package:
                parts = node.module.split(".")
                found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith(package + ".")}
    return found - {"__version__"}


def test_imports_point_in_the_designs_direction() -> None:
    files = {path.stem: path for path in (ROOT / "eagle2").glob("*.py")}
    assert set(files) == set(ALLOWED), "a new module needs its arrows here and in the design"
    for name, path in files.items():
        wrong = imports(path, "eagle2") - ALLOWED[name]
        assert not wrong, f"eagle2/{name}.py imports {', '.join(sorted(wrong))}"


def test_visual_knows_only_traces_and_the_engine_knows_no_visual() -> None:
    for path in (ROOT / "visual").glob("*.py"):
        assert imports(path, "eagle2") <= {"trace", "cost"}, path.name
    for path in (ROOT / "eagle2").glob("*.py"):
        # The command line sits on top of both: `bench --chart` draws.
        assert imports(path, "visual") <= ({"bench"} if path.stem == "__main__" else set()), path.name


@pytest.mark.parametrize("module", ["eagle2.trace", "eagle2.cost", "eagle2.gallery", "visual"])
def test_opens_where_torch_cannot_be_imported(module: str) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'gradio'): sys.modules[name] = None\n"
        f"import importlib; importlib.import_module({module!r})\n"
        "import pkgutil, visual\n"
        f"[importlib.import_module('visual.' + m.name) for m in pkgutil.iter_modules(visual.__path__)]\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_importing_the_library_has_no_side_effects() -> None:
    code = (
        "import torch, random\n"
        "before = torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), random.getstate()\n"
        "import eagle2.engine, eagle2.train, eagle2.evaluate, eagle2.__main__\n"
        "after = torch.get_num_threads(), torch.get_default_dtype(), torch.initial_seed(), random.getstate()\n"
        "assert before == after\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
