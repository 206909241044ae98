"""Command line: ``python -m eagle2 generate|chat|race|trace|gallery|models|eval|bench|train|export``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import DEFAULT_PRESET, ModelError

if TYPE_CHECKING:
    from .chat import Conversation, Turn
    from .cost import Size
    from .engine import Engine, Settings
    from .generate import Prefill, Step
    from .race import LaneProgress, RunRecorder

# torch and transformers are imported by the commands that need them: --help and usage errors answer at once.

EPILOG = """\
examples:
  python -m eagle2 generate "Write a haiku about rain."
  python -m eagle2 chat --system "Answer in one sentence."
  python -m eagle2 race "10+2=" --max-new-tokens 64
  python -m eagle2 race "Tell me a story." --depth 6 --top-k 10 --total-tokens 59    (the paper's tree)
  python -m eagle2 trace "10+2=" -o run.json.gz
  python -m eagle2 gallery --only lighthouse
  python -m eagle2 models
  python -m eagle2 eval --questions questions.jsonl --limit 20 --json
  python -m eagle2 bench --quick --dtype bfloat16 --chart speed.html
  python -m eagle2 train --out my-head --answer-tokens 200000
  python -m eagle2 export --head my-head/head --to vllm --out my-head-vllm

Settings mean the same in every command. depth counts layers of drafted tokens and total-tokens
drafted nodes without the root; EAGLE's official code calls the paper's setting depth=5, total_token=60.
Exit codes: 0 done, 1 it could not be done (one sentence says why), 2 wrong usage, 130 interrupted.
"""

TRAIN_OPTIONS: tuple[tuple[str, str, type, str], ...] = (
    ("--model", "target", str, f"preset, local folder or hub id (default: {DEFAULT_PRESET})"),
    ("--out", "out", str, "folder for the text (corpus/), the run (run/) and the head (head/)"),
    ("--dtype", "dtype", str, "of the target: bfloat16 (default), float16 or float32"),
    ("--device", "device", str, "auto (default), cpu, cuda, cuda:1, ..."),
    ("--mixed-precision", "mixed_precision", str, "of the training: bf16 (default), fp16 or no"),
    ("--max-minutes", "max_minutes", float, "stop training after this time; the next call goes on"),
    ("--answer-tokens", "corpus.answer_tokens", int, "text to generate"),
    ("--slots", "corpus.slots", int, "conversations decoded at once"),
    ("--epochs", "train.epochs", float, "passes over the text"),
    ("--learning-rate", "train.learning_rate", float, "peak"),
    ("--own-steps", "train.own_steps", int, "the head's own steps that are trained"),
    ("--batch-tokens", "train.batch_tokens", int, "positions in a batch, of all processes together"),
    ("--heldout", "train.heldout", float, "share of the conversations"),
    ("--seed", "seed", int, "of text and training"),
)

CHAT_HELP = """\
A conversation, streamed as generate does. What was said before is neither computed nor tokenised again.

Each line is a message; on a terminal Ctrl-C stops an answer and keeps what came, Ctrl-D ends. Lines that begin with "/":
  /reset          forget the conversation
  /system TEXT    forget it and begin anew under this system prompt; without TEXT: under none
Lines from a pipe are turns of one conversation. --json prints one object per turn. A model without a chat template is
asked as "User: ..." and answers as "Assistant: ...".
"""
STYLES = {"drafted": "\x1b[34;4m", "plain": "", "prefill": "\x1b[33m", "bonus": "\x1b[33m", "correction": "\x1b[33m"}
RESET = "\x1b[0m"


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m eagle2", description="EAGLE-2: speculative decoding with dynamic draft trees.", epilog=EPILOG,
        formatter_class=formatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    models = argparse.ArgumentParser(add_help=False)
    group = models.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_PRESET, help="preset, local folder or hub id (default: %(default)s)")
    group.add_argument("--head", metavar="FOLDER", help="draft head; a preset brings its own")
    group.add_argument("--full-vocabulary", action="store_true",
                       help="draft over the target's whole vocabulary even if the head comes with a reduced one")  # fmt: skip
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
                       help="auto: float32 on CPU, bfloat16 on a GPU")  # fmt: skip
    group.add_argument("--device", default="auto",
                       help="auto, cpu, cuda, cuda:1, ..., or spread: over all GPUs, then memory and disk")  # fmt: skip
    group.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    group.add_argument("--calibrate", action="store_true",
                       help="measure the costs behind automatic trees anew (else once per model and machine)")  # fmt: skip

    group.add_argument("--row-invariant", action="store_true",
                       help="passes in which a row does not depend on how many ride along (native ones are so anyway): in half "
                       "precision on a CPU, both lanes then hardly ever part")  # fmt: skip

    group.add_argument("--exact-draft", action="store_true",
                       help="run the draft head as it was loaded, not with eight bits per weight, as beside native passes "
                       "(eval always does)")  # fmt: skip

    runs = argparse.ArgumentParser(add_help=False)
    group = runs.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=int, default=128, help="exact cap (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    group.add_argument("--sample-top-k", type=int, default=0, help="sample among this many tokens; 0: all (default)")
    group.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling; 1: off (default)")
    group.add_argument("--seed", type=int, default=0, help="of the sampling (default: %(default)s)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop after this text; may be repeated"
    )
    group = runs.add_argument_group("draft tree")
    group.add_argument("--tree", choices=("dynamic", "static"), default="dynamic",
                       help="dynamic: EAGLE-2; static: one fixed shape, as in EAGLE-1 (default: %(default)s)")  # fmt: skip
    group.add_argument("--depth", type=_size, metavar="N|auto",
                       help="layers of drafted tokens; auto: as many as pay at each step")  # fmt: skip
    group.add_argument("--top-k", type=int, metavar="N", help="nodes fed per layer, children of each")
    group.add_argument("--total-tokens", type=_size, metavar="N|auto",
                       help="nodes kept for verification; auto: as many as pay at each step (default of the three sizes: auto 3 "
                       "auto on a CPU, the paper's 6 10 59 on a GPU; where one is given, or the tree is static, or for eval: 3 4 5)")  # fmt: skip
    group.add_argument("--lookup", action=argparse.BooleanOptionalAction,
                       help="copies of earlier text join the tree where they look better (default: in automatic trees)")  # fmt: skip

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", action="store_true", help="print one JSON object on standard output and nothing else")

    prompt = argparse.ArgumentParser(add_help=False)
    prompt.add_argument("prompt", help='the user\'s message; "-" reads standard input')

    def command(name: str, help_: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=help_, description=help_, parents=list(parents), formatter_class=formatter
        )

    sub = command("generate", "Stream text, coloured by origin: drafted and accepted, or the target's own.",
                  prompt, models, runs, output)  # fmt: skip
    sub.add_argument("--no-draft", action="store_true", help="plain autoregressive decoding")
    sub.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    sub = command("chat", "A conversation: streams answers as generate does; what was said before is not computed again.",
                  models, runs, output)  # fmt: skip
    sub.description = CHAT_HELP
    sub.add_argument("--system", default="", metavar="TEXT", help="system prompt, where the model's template takes one")
    sub.add_argument("--no-draft", action="store_true", help="plain autoregressive decoding")
    sub.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    command("race", "EAGLE-2 against autoregressive decoding, each on its own clock.", prompt, models, runs, output)
    sub = command(
        "trace", "Record a race step by step into a file that the viewer opens.", prompt, models, runs, output
    )
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help="run.json or run.json.gz")
    sub = command("gallery", "Record the app's runs again, as assets/traces/index.toml describes them.", models, output)
    sub.add_argument(
        "--only", action="append", default=[], metavar="ID", help="this run; may be repeated (default: all)"
    )
    sub.add_argument("--folder", metavar="FOLDER", help="with an index.toml of your own (default: assets/traces)")
    command("models", "The presets, the memory each needs, and which of them fit this machine.", output)
    sub = command("eval", "tau, acceptance by depth and calibration over question files.", models, runs, output)
    sub.add_argument("--questions", required=True, nargs="+", metavar="FILE",
                     help="FastChat JSONL, first turns are used; a folder: all its .jsonl files")  # fmt: skip
    sub.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each file")
    sub.add_argument("--full-loop", action="store_true",
                     help="verify each draft tree; without it greedy runs are replayed from the target's plain output")  # fmt: skip
    sub.add_argument("--cache", metavar="FOLDER", help="keep the target's outputs here, for the next head or tree")
    sub.add_argument("--workers", type=int, default=1, metavar="N",
                     help="processes, each with its own copy of the models and one thread (default: %(default)s)")  # fmt: skip
    sub = command("bench", "Speed of our lanes, Hugging Face generate and llama.cpp, on the same prompts, interleaved.",
                  models, output)  # fmt: skip
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument("--questions", nargs="+", metavar="FILE",
                      help="FastChat JSONL, first turns are used; a folder: all its .jsonl files")  # fmt: skip
    what.add_argument("--quick", action="store_true", help="a few prompts of our own, 64 new tokens: some minutes")
    sub.add_argument("--limit", type=int, metavar="N", help="only the first N questions of each file (--quick: 6)")
    sub.add_argument("--max-new-tokens", type=int, help="exact cap (default: 128, --quick: 64)")
    sub.add_argument("--methods", nargs="+", metavar="NAME",
                     help="ar (always run), eagle2, eagle2-auto, eagle2-auto-nolookup, eagle2-paper, static, lookup, hf, hf-lookup, llamacpp; "
                     "default: all that can run here")  # fmt: skip
    sub.add_argument(
        "--rounds", type=int, default=1, metavar="N", help="times all prompts are run (default: %(default)s)"
    )
    sub.add_argument("--gguf", metavar="FILE", help="the same weights for llama.cpp (needs llama-cpp-python)")
    sub.add_argument("--chart", metavar="FILE", help="also draw the speed-ups, beside the paper's, into this HTML page")
    sub = command("train", "Generate text with the target, train a draft head on it, evaluate it; resumable.", output)
    sub.add_argument("--config", metavar="FILE", help=".toml, .yaml or .json; assets/head-smollm2-135m/train.toml has all "
                     "keys. Without it: settings.json in the out folder, if there is one; options win over files")  # fmt: skip
    sub.add_argument("--stage", default="all", choices=("generate", "train", "evaluate", "all", "stats"),
                     help="stats: describe the text and do nothing else (default: %(default)s)")  # fmt: skip
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key: train.final_rate=0.1")
    sub.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")
    for option, key, type_, help_ in TRAIN_OPTIONS:
        sub.add_argument(option, dest=key, type=type_, metavar=type_.__name__.upper(), help=help_)
    for option, key, help_ in (
        ("--corpus-folder", "corpus_folders", "use this text and generate none; may be repeated"),
        ("--questions", "evaluate.questions", "measure tau on this question file; may be repeated"),
    ):
        sub.add_argument(option, dest=key, action="append", metavar="PATH", help=help_)
    sub = command("export", "Write a draft head as EAGLE's official code or vLLM load it.", output)
    sub.add_argument("--head", required=True, metavar="FOLDER", help="the head, as train writes it")
    sub.add_argument("--to", required=True, choices=("official", "vllm"), help="the program that shall load it")
    sub.add_argument("--out", required=True, metavar="DIR", help="new folder, or one from an earlier export")
    sub.add_argument("--model", help="the head's target; official needs it, since its embedding goes into the file")
    return parser


def _size(text: str) -> Size:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, not {text!r}") from None


def _loader(args: argparse.Namespace) -> Callable[[], Engine]:
    """Loads the engine; a worker process can do so too, since nothing of it is defined in this ``__main__``."""
    from .engine import Engine

    return functools.partial(
        Engine.load, args.model, args.head, dtype=args.dtype, device=args.device, full_vocabulary=args.full_vocabulary,
        costs="measure" if args.calibrate else "auto", row_invariant=args.row_invariant, exact_draft=args.exact_draft,
    )  # fmt: skip


def _engine(args: argparse.Namespace) -> Engine:
    return _loader(args)()


def _settings(args: argparse.Namespace) -> Settings:
    from .engine import Settings, default_sizes

    sizes = {name: value for name in ("depth", "top_k", "total_tokens") if (value := getattr(args, name)) is not None}
    if not sizes and args.tree == "dynamic" and args.command != "eval":
        sizes = default_sizes(args.device)
    return Settings(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, sample_top_k=args.sample_top_k,
        top_p=args.top_p, seed=args.seed, tree=args.tree, lookup=args.lookup, stop=tuple(args.stop), **sizes,
    )  # fmt: skip


def _prompt(args: argparse.Namespace) -> str:
    text: str = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty; write something")
    return text


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False))


def _generate(args: argparse.Namespace) -> None:
    settings, prompt = _settings(args), _prompt(args)
    engine = _engine(args)
    from .race import RunRecorder
    from .trace import lane_summary

    ids = engine.encode(prompt)
    recorder = RunRecorder(engine.tokenizer, prompt, ids, settings.sampling, record=False)
    progress = _stream(args, recorder, engine.run(ids, settings, drafted=not args.no_draft))
    if args.json:
        _print_json(
            lane_summary(progress, progress.token_ids, progress.target_passes)
            | {"finish_reason": progress.finish_reason, "tau": progress.tau, "settings": engine.metadata(settings)}
        )
        return
    print()
    legend = f"{STYLES['drafted']}drafted{RESET}, {STYLES['bonus']}target's own{RESET}; " if _coloured(args) else ""
    print(
        f"{legend}{len(progress.token_ids)} tokens, tau {progress.tau:.2f} tokens per target pass, the target's own included, "
        f"{progress.tokens_per_second:.1f} tokens/s ({_conditions(engine.metadata(settings), drafted=not args.no_draft)}; "
        f"one run, no warm-up), ended by {progress.finish_reason}",
        file=sys.stderr,
    )  # fmt: skip


def _coloured(args: argparse.Namespace) -> bool:
    return args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ)


def _stream(args: argparse.Namespace, recorder: RunRecorder, items: Iterator[Prefill | Step]) -> LaneProgress:
    """Decode, and print the text as it comes unless JSON is asked for."""
    lane = "autoregressive" if args.no_draft else "eagle2"
    progress = recorder.lanes[lane]
    coloured, shown = _coloured(args), 0
    for item in items:
        recorder.add(lane, item)
        if args.json:
            continue
        for piece, origin in list(zip(progress.pieces, progress.origins))[shown:]:
            print(f"{STYLES[origin]}{piece}{RESET}" if coloured and STYLES[origin] else piece, end="", flush=True)
        shown = len(progress.pieces)
    return progress


def _chat(args: argparse.Namespace) -> None:
    settings = _settings(args)
    engine = _engine(args)
    from .chat import Conversation
    from .trace import STOPPED, lane_summary

    if settings.tree_settings.automatic and not args.no_draft:
        engine.calibrate()  # here and not in the first answer
    talk, system = Conversation(engine, args.system), args.system
    typed = sys.stdin.isatty() and not args.json
    while (line := _line_of_input("> " if typed else "")) is not None:
        command, _, rest = line.partition(" ")
        if not line.strip():
            continue
        if command in ("/reset", "/system"):
            system = rest.strip() if command == "/system" else system
            talk = Conversation(engine, system)
            continue
        try:
            if command.startswith("/") and typed:
                raise ValueError(f"there is no command {command}; there are /reset and /system")
            progress, turn = _answer(args, talk, line, settings)
        except (ValueError, ArithmeticError) as error:
            if not typed:  # a pipe's next line was meant for another conversation than this one
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        reason = progress.finish_reason or STOPPED
        if args.json:
            _print_json(
                lane_summary(progress, progress.token_ids, progress.target_passes)
                | {"prompt": line, "prompt_tokens": len(turn.prompt_ids), "reused_tokens": turn.reused}
                | {"finish_reason": reason, "tau": progress.tau, "settings": engine.metadata(settings)}
            )
            continue
        print(flush=True)
        print(
            f"{len(progress.token_ids)} tokens, tau {progress.tau:.2f}, {progress.tokens_per_second:.1f} tokens/s, "
            f"{turn.reused} of {len(turn.prompt_ids)} prompt tokens reused, ended by {reason}",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _line_of_input(prompt: str) -> str | None:
    """The next line; None at the end.  On a terminal Ctrl-C throws the line away, as in a shell."""
    while True:
        try:
            if prompt:
                return input(prompt)
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()


def _answer(args: argparse.Namespace, talk: Conversation, line: str, settings: Settings) -> tuple[LaneProgress, Turn]:
    """Stream one answer; Ctrl-C ends it after the step under way, a second one at once."""
    from .race import RunRecorder

    turn = talk.ask(line, settings, drafted=not args.no_draft)
    recorder = RunRecorder(talk.engine.tokenizer, line, turn.prompt_ids, settings.sampling, record=False)
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def until_asked(items: Iterator[Prefill | Step]) -> Iterator[Prefill | Step]:
        for item in items:
            yield item
            if asked:
                return

    before = signal.signal(signal.SIGINT, stop)
    try:
        with closing(turn.items) as items:  # type: ignore[type-var]
            progress = _stream(args, recorder, until_asked(items))
    finally:
        signal.signal(signal.SIGINT, before)
    return progress, turn


def _race(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    settings, prompt = _settings(args), _prompt(args)
    engine = _engine(args)
    trace = None
    with tqdm(total=2 * settings.max_new_tokens, unit="tok", leave=False, desc="race", disable=None) as bar:
        for update in engine.race(prompt, settings):
            bar.update(len(update.eagle2.token_ids) + len(update.autoregressive.token_ids) - bar.n)
            trace = update.trace
    assert trace is not None  # the last update has it
    plain = trace.autoregressive
    assert plain is not None
    difference = trace.difference
    if getattr(args, "output", None):
        _save(trace, args.output)
    if args.json:
        _print_json(trace.summary())
        return
    meta = trace.metadata
    print(trace.text)
    print()
    print(f"{'lane':<16}{'tokens':>8}{'seconds':>10}{'tokens/s':>10}{'passes':>8}")
    print(
        f"{'EAGLE-2':<16}{len(trace.output_ids):>8}{trace.seconds:>10.2f}{trace.tokens_per_second:>10.1f}{len(trace.steps):>8}"
    )
    print(
        f"{'autoregressive':<16}{len(plain.token_ids):>8}{plain.seconds:>10.2f}{plain.tokens_per_second:>10.1f}{plain.target_passes:>8}"
    )
    print()
    print(
        f"speed-up {trace.speedup or 0:.2f}x (tokens/s on own clocks, prefill included), tau {trace.tau:.2f} tokens per target pass, "
        "the target's own included"
    )
    if trace.equal:
        print("same tokens: yes")
    elif settings.temperature > 0:
        print(
            f"same tokens: no, from output position {difference.index if difference else 0}: the lanes draw differently"
        )
    elif difference is not None:
        gap = "one lane ended there" if difference.logit_gap is None else f"logit gap {difference.logit_gap:.4g}"
        print(f"same tokens: no, from output position {difference.index} ({gap}: near 0 means rounding)")
    print(
        f"{_conditions(meta)}, temperature {settings.temperature}, {settings.max_new_tokens} new tokens; one run, no warm-up"
    )
    if settings.tree_settings.automatic and trace.steps:
        count = len(trace.steps)
        print(
            f"automatic tree: on average {sum(len(step.kept) for step in trace.steps) / count:.1f} nodes kept in "
            f"{sum(max(step.depths) for step in trace.steps) / count:.1f} drafted layers; "
            f"{sum(len(step.token_ids) == 1 for step in trace.steps)} of {count} steps without a draft"
        )


def _conditions(meta: Mapping[str, Any], *, drafted: bool = True) -> str:
    """What a figure is printed with, from `Engine.metadata`."""
    from .trace import machinery

    tree, versions = meta["tree"], meta["versions"]
    head = (
        f", head {meta['head']} in {meta['draft_weights']}, {tree['kind']} tree {tree['depth']}/{tree['top_k']}/{tree['total_tokens']}"
        f"{' with lookup' * tree['lookup']}, {meta['draft_vocab']} tokens drafted"
    )
    return (
        f"{meta['target']}{head if drafted else ', no draft head'}, {machinery(meta)}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}"
    )


def _save(trace: Any, path: str) -> None:
    try:
        trace.save(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error
    print(f"wrote {path} ({Path(path).stat().st_size / 1024:.0f} kB, {len(trace.steps)} steps)", file=sys.stderr)


def _trace(args: argparse.Namespace) -> None:
    folder = Path(args.output).resolve().parent
    if not folder.is_dir():  # before minutes of work, not after
        raise ValueError(f"the folder {folder} does not exist")
    _race(args)


def _gallery(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from . import gallery
    from .trace import machinery

    folder = Path(args.folder) if args.folder else gallery.FOLDER
    entries = gallery.chosen(gallery.read_index(folder / gallery.INDEX), args.only)
    for entry in entries:  # before minutes of work, not after
        entry.settings()
    engine = _engine(args)
    engine.calibrate()  # the runs hold what passes cost, which the view "Why this tree" shows
    # The first passes after loading are slow; the run that happens to be recorded first would show that.
    for _ in engine.race(entries[0].prompt, dataclasses.replace(entries[0], max_new_tokens=8).settings()):
        pass
    rows = []
    for number, entry in enumerate(entries, start=1):
        with tqdm(total=2 * entry.max_new_tokens, unit="tok", leave=False, desc=entry.id, disable=None) as bar:
            recording = gallery.record(engine, entry, folder, bar.update)
        rows.append(gallery.row(recording))
        print(f"{number}/{len(entries)} {recording.path}", file=sys.stderr)
    if args.json:
        _print_json({"runs": rows, "settings": engine.metadata(entries[0].settings())})
        return
    print(gallery.table(rows))
    meta = recording.trace.metadata
    print(f"{meta['target']}, head {meta['head']}, {machinery(meta)}")


def _models(args: argparse.Namespace) -> None:
    from . import models

    rows = models.overview()
    if args.json:
        _print_json(rows)
        return
    for device in rows["devices"]:
        print(f"{device['device']}: {device['name']}, {device['free_bytes'] / 1e9:.1f} GB free")
    print()
    print(f"{'preset':<23}{'memory':>9} {'dtype':<9}{'runs here':<27}{'tree':<9}target and head; licence")
    for row in rows["presets"]:
        runs = [
            f"{device}, {dtype}"
            if dtype == models.auto_dtype(row["name"], device)
            else f"{device} with --dtype {dtype}"
            for device, dtype in row["fits"].items()
            if dtype
        ]
        what = f"{row['target']} + {row['head']}; {row['licence']}{', gated' if row['gated'] else ''}"
        print(
            f"{row['name']:<23}{row['memory_bytes'][row['dtype']] / 1e9:>6.1f} GB {row['dtype']:<9}"
            f"{runs[0] if runs else 'no, too large':<27}{'/'.join(map(str, row['tree'].values())):<9}{what}"
            f"{'; ' + row['note'] if row['note'] else ''}"
        )
    print()
    print(
        "Memory is computed: parameters of target and head, key and value rows of two lanes of 4096 tokens (or the "
        "context), 1 GiB for the process. tree: the paper's depth/top-k/total-tokens, the root not counted. A gated model "
        "needs its terms accepted on the hub and a token in HF_TOKEN."
    )


def _eval(args: argparse.Namespace) -> None:
    from .evaluate import evaluate_sets, read_question_sets, table

    for option, value in (("--limit", args.limit), ("--workers", args.workers)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    args.exact_draft = True  # figures of a head are of that head, on every machine
    settings, sets = _settings(args), read_question_sets(args.questions, args.limit)
    cache = Path(args.cache) if args.cache else None
    if cache is not None:  # before minutes of work, not after
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the cache folder {cache} cannot be made: {error.strerror or error}") from error
    result = evaluate_sets(
        _loader(args), sets, settings, full_loop=args.full_loop, cache=cache, workers=args.workers,
        threads=args.threads or 1,
    )  # fmt: skip
    if args.json:
        _print_json(result)
        return
    print(table(result))
    print()
    print(
        f"{_conditions(result['settings'])}, temperature {settings.temperature}, "
        f"{settings.max_new_tokens} new tokens, by {result['method']}; tau counts the target's own token and leaves out "
        "the prefill's; >=d: share of the steps that accepted d draft tokens or more"
    )


def _bench(args: argparse.Namespace) -> None:
    from . import bench
    from .evaluate import read_question_sets

    for option, value in (
        ("--limit", args.limit),
        ("--rounds", args.rounds),
        ("--max-new-tokens", args.max_new_tokens),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, not {value}")
    if args.chart and not Path(args.chart).resolve().parent.is_dir():  # before minutes of work, not after
        raise ValueError(f"the folder {Path(args.chart).resolve().parent} does not exist")
    bench.check_methods(args.methods or ())
    sets = read_question_sets(
        [bench.QUICK_QUESTIONS] if args.quick else args.questions,
        args.limit or (bench.QUICK_LIMIT if args.quick else None),
    )
    result = bench.bench(
        _engine(args), sets, max_new_tokens=args.max_new_tokens or (bench.QUICK_TOKENS if args.quick else 128),
        methods=args.methods, rounds=args.rounds, gguf=args.gguf,
    )  # fmt: skip
    if args.json:
        _print_json(result)
    elif result["rows"]:
        print(bench.table(result))
    if args.chart and result["rows"]:
        from visual import bench as chart

        chart.write(args.chart, result["rows"], result["settings"])
        print(f"wrote {args.chart}", file=sys.stderr)
    if result["interrupted"]:
        raise KeyboardInterrupt


def _train(args: argparse.Namespace) -> None:
    from .recipe import make_recipe, merge, parse_setting, read_settings
    from .stages import train_head

    data: dict[str, Any] = {}
    source = args.config or (str(Path(args.out) / "settings.json") if args.out else "")
    if args.config or (source and Path(source).exists()):
        data = read_settings(source)
    given = vars(args)
    keys = [key for _, key, _, _ in TRAIN_OPTIONS if key != "seed"] + ["corpus_folders", "evaluate.questions"]
    over = {key: given[key] for key in keys if given[key] is not None}
    if args.seed is not None:
        over |= {"corpus.seed": args.seed, "train.seed": args.seed}
    for key, value in over.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        data = merge(data, value)
    for text in args.set:
        data = merge(data, parse_setting(text))
    recipe = make_recipe(data, f"{source} with the options given" if source else "the options given")
    try:
        result = train_head(recipe, args.stage)
    except KeyboardInterrupt:
        print(f"\nwhat was made is kept in {recipe.out}; the same command goes on from there", file=sys.stderr)
        raise
    if result is None:  # another process of `accelerate launch` prints
        return
    if args.json:
        _print_json(result)
    elif "heldout" not in result:
        for key, value in result.items():
            print(f"{key.replace('_', ' '):<32}{json.dumps(value)}")
    else:
        held = ", ".join(f"{k} {v:.3f}" for k, v in result["heldout"].items())
        print(f"head in {Path(recipe.out) / 'head'}; held out: {held}")
        for name, entry in result.get("tau", {}).get("sets", {}).items():
            print(f"tau {entry['tau']:.3f} on {name}")


def _export(args: argparse.Namespace) -> None:
    from .export import export_head

    result = export_head(args.head, args.out, args.to, model=args.model).to_dict()
    if args.json:
        _print_json(result)
        return
    print(f"{result['folder']}: {result['layout']} layout, {result['bytes'] / 1e6:.1f} MB, {result['dtype']}")
    for name, shape in result["tensors"].items():
        origin = "  (copied from the target)" if name in result["copied_from_target"] else ""
        print(f"  {name:<42}{'x'.join(map(str, shape)):>14}{origin}")
    if result["left_out"]:
        print(f"left out, since the loader does not know it: {', '.join(result['left_out'])}")


COMMANDS = {
    "generate": _generate, "chat": _chat, "race": _race, "trace": _trace, "gallery": _gallery, "models": _models,
    "eval": _eval, "bench": _bench, "train": _train, "export": _export,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    # Libraries' notices would end up between a user's own lines; real faults are exceptions.
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        if getattr(args, "threads", None) is not None:
            if args.threads < 1:
                raise ValueError(f"--threads must be at least 1, not {args.threads}")
            import torch

            torch.set_num_threads(args.threads)
        COMMANDS[args.command](args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone: `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ModelError, OSError, ArithmeticError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        print(f"error: {lines[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
