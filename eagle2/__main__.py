"""Command line: ``python -m eagle2 generate|race|trace|eval|train``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .models import DEFAULT_PRESET, ModelError

if TYPE_CHECKING:
    from .engine import Engine, Settings

# torch and transformers are imported by the commands that need them: --help and usage errors answer at once.

EPILOG = """\
examples:
  python -m eagle2 generate "Write a haiku about rain."
  python -m eagle2 race "10+2=" --max-new-tokens 64
  python -m eagle2 race "Tell me a story." --depth 6 --top-k 10 --total-tokens 59    (the paper's tree)
  python -m eagle2 trace "10+2=" -o run.json.gz
  python -m eagle2 eval --questions questions.jsonl --limit 20 --json
  python -m eagle2 train --out my-head --answer-tokens 200000

Settings mean the same in every command. depth counts layers of drafted tokens and total-tokens
drafted nodes without the root; EAGLE's official code calls the paper's setting depth=5, total_token=60.
Exit codes: 0 done, 1 it could not be done (one sentence says why), 2 wrong usage, 130 interrupted.
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
    group.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"),
                       help="auto: float32 on CPU, bfloat16 on a GPU")  # fmt: skip
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    group.add_argument("--threads", type=int, help="CPU threads (default: torch's own choice)")

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
    group.add_argument("--depth", type=int, default=3, help="layers of drafted tokens (default: %(default)s)")
    group.add_argument(
        "--top-k", type=int, default=4, help="nodes fed per layer, children of each (default: %(default)s)"
    )
    group.add_argument("--total-tokens", type=int, default=5, help="nodes kept for verification (default: %(default)s)")

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
    command("race", "EAGLE-2 against autoregressive decoding, each on its own clock.", prompt, models, runs, output)
    sub = command(
        "trace", "Record a race step by step into a file that the viewer opens.", prompt, models, runs, output
    )
    sub.add_argument("-o", "--output", required=True, metavar="FILE", help="run.json or run.json.gz")
    sub = command("eval", "tau and acceptance by depth over a question file.", models, runs, output)
    sub.add_argument("--questions", required=True, metavar="FILE.jsonl", help="FastChat format; first turns are used")
    sub.add_argument("--limit", type=int, metavar="N", help="only the first N questions")
    sub = command("train", "Generate text with the target and train a draft head on it; resumable.", models, output)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="holds the text (corpus/) and the head (head/)")
    sub.add_argument("--answer-tokens", type=int, default=1_000_000, help="text to generate (default: %(default)s)")
    sub.add_argument("--slots", type=int, default=96, help="conversations decoded at once (default: %(default)s)")
    sub.add_argument("--epochs", type=float, default=4.0, help="default: %(default)s")
    sub.add_argument("--learning-rate", type=float, default=1e-3, help="peak (default: %(default)s)")
    sub.add_argument(
        "--own-steps", type=int, default=3, help="the head's own steps that are trained (default: %(default)s)"
    )
    sub.add_argument("--batch-tokens", type=int, default=2048, help="positions in a batch (default: %(default)s)")
    sub.add_argument("--heldout", type=float, default=0.02, help="share of the conversations (default: %(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="of text and training (default: %(default)s)")
    return parser


def _engine(args: argparse.Namespace) -> Engine:
    from .engine import Engine

    return Engine.load(args.model, args.head, dtype=args.dtype, device=args.device)


def _settings(args: argparse.Namespace) -> Settings:
    from .engine import Settings

    return Settings(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, sample_top_k=args.sample_top_k,
        top_p=args.top_p, seed=args.seed, tree=args.tree, depth=args.depth, top_k=args.top_k,
        total_tokens=args.total_tokens, stop=tuple(args.stop),
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
    lane = "autoregressive" if args.no_draft else "eagle2"
    progress = recorder.lanes[lane]
    coloured = args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    shown = 0
    for item in engine.run(ids, settings, drafted=not args.no_draft):
        recorder.add(lane, item)
        if args.json:
            continue
        for piece, origin in list(zip(progress.pieces, progress.origins))[shown:]:
            print(f"{STYLES[origin]}{piece}{RESET}" if coloured and STYLES[origin] else piece, end="", flush=True)
        shown = len(progress.pieces)
    if args.json:
        _print_json(
            lane_summary(progress, progress.token_ids, progress.target_passes)
            | {"finish_reason": progress.finish_reason, "tau": progress.tau, "settings": engine.metadata(settings)}
        )
        return
    print()
    legend = f"{STYLES['drafted']}drafted{RESET}, {STYLES['bonus']}target's own{RESET}; " if coloured else ""
    print(
        f"{legend}{len(progress.token_ids)} tokens, tau {progress.tau:.2f}, {progress.tokens_per_second:.1f} tokens/s "
        f"({engine.name}, {engine.dtype}, {engine.device}), ended by {progress.finish_reason}",
        file=sys.stderr,
    )  # fmt: skip


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
    tree = meta["tree"]
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
        f"speed-up {trace.speedup or 0:.2f}x (tokens/s on own clocks, prefill included), tau {trace.tau:.2f} tokens per target pass"
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
        f"{meta['target']}, head {meta['head']}, {meta['dtype']} on {meta['device']}, {meta['threads']} threads, "
        f"{tree['kind']} tree {tree['depth']}/{tree['top_k']}/{tree['total_tokens']}, torch {meta['versions']['torch']}, "
        f"transformers {meta['versions']['transformers']}; one run, no warm-up"
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


def _eval(args: argparse.Namespace) -> None:
    from .evaluate import evaluate, read_questions

    if args.limit is not None and args.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {args.limit}")
    settings, prompts = _settings(args), read_questions(args.questions, args.limit)
    engine = _engine(args)
    result = evaluate(engine, prompts, settings)
    result["questions"] = Path(args.questions).name
    if args.json:
        _print_json(result)
        return
    meta = result["settings"]
    tree = meta["tree"]
    print(
        f"tau {result['tau']:.3f} over {result['prompts']} prompts ({result['tokens']} tokens, {result['target_passes']} target passes)"
    )
    shares = ", ".join(f"{depth}: {share:.3f}" for depth, share in enumerate(result["acceptance_by_depth"], 1))
    print(f"share of steps that accepted at least n draft tokens: {shares}")
    print(f"accepted / drafted {result['acceptance_rate']:.3f}; outputs that end in a loop {result['looping']:.2f}")
    print(
        f"{meta['target']}, head {meta['head']}, {meta['dtype']}, {tree['kind']} tree "
        f"{tree['depth']}/{tree['top_k']}/{tree['total_tokens']}, temperature {settings.temperature}, "
        f"{settings.max_new_tokens} new tokens; tau counts the target's own token and leaves out the prefill's"
    )


def _train(args: argparse.Namespace) -> None:
    from .corpus import CorpusConfig
    from .train import TrainConfig, train_head

    corpus = CorpusConfig(answer_tokens=args.answer_tokens, slots=args.slots, seed=args.seed)
    config = TrainConfig(
        epochs=args.epochs, learning_rate=args.learning_rate, own_steps=args.own_steps,
        batch_tokens=args.batch_tokens, heldout=args.heldout, seed=args.seed,
    )  # fmt: skip
    figures = train_head(args.model, Path(args.out), corpus, config, device=args.device)
    if args.json:
        _print_json(figures)
        return
    print(f"head in {Path(args.out) / 'head'}; held out: " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()))


COMMANDS = {"generate": _generate, "race": _race, "trace": _trace, "eval": _eval, "train": _train}


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
