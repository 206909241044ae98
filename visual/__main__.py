"""``python -m visual RUN.json.gz``: a recorded run as one page that plays without a server, a network or a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle2.trace import Trace, TraceError
from visual.player import export_html


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m visual", description="Make one HTML page of a recorded run (python -m eagle2 trace)."
    )
    parser.add_argument("trace", type=Path, help="a trace, .json or .json.gz")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: beside the trace, ending in .html)")
    given = parser.parse_args(arguments)
    output = given.output or given.trace.with_name(given.trace.name.split(".json")[0] + ".html")
    try:
        output.write_text(export_html(Trace.load(given.trace)), encoding="utf-8")
    except (TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
