"""Starts SGLang's Engine with FASER, lets it measure what rounds cost, and says what came out.

The measurement is the start-up's own (``worker/start_profile.py``) with more depths, batch sizes
and repeats; the Engine serves nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser_sglang import config

NO_LIMIT_S = 1e6


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own arguments, and those for the server: what stands behind ``--``."""
    own, _, further = [*argv], None, []
    if "--" in own:
        further = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    parser = argparse.ArgumentParser(
        prog="python -m faser_sglang.profile",
        description="Measure what drafting and verifying cost on this machine, for "
        "--faser-cost-table.",
        epilog="Arguments of sglang.launch_server follow behind --, and should be those that the "
        "server will have.",
    )
    add = parser.add_argument
    add("--model", required=True, help="the target")
    add("--draft", help="the draft model or head; none for --drafter ngram")
    add("--drafter", default="auto", choices=config.DRAFTERS, help="as --faser-drafter")
    add("--output", default="cost.json", type=Path, help="the table (default: %(default)s)")
    add("--max-batch", type=int, help="most requests at once (default: as many as the server runs)")
    add("--repeats", default=10, type=int, help="rounds of each shape (default: %(default)s)")
    add("--plot", type=Path, help="a figure of the table: .svg, .png or .pdf")
    args = parser.parse_args(own)
    for name, least in (("max_batch", 1), ("repeats", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it takes {least} or more.")
    _check_files(parser, args)
    return args, further


def _check_files(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from faser_sglang.validation import unwritable

    for name in ("output", "plot"):
        path = getattr(args, name)
        reason = None if path is None else unwritable(path)
        if reason:
            parser.error(f"--{name} {path} cannot be written: {reason}.")
    if args.plot is None:
        return
    if args.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot is {args.plot}; it takes a name that ends in .svg, .png or .pdf.")
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib; run: pip install matplotlib")


def server_arguments(args: argparse.Namespace, further: Sequence[str]) -> list[str]:
    """The command line of the server that measures."""
    draft = [] if args.draft is None else ["--speculative-draft-model-path", args.draft]
    most = max(args.max_batch or 0, 48)
    is_given = any(word.split("=")[0] == "--max-running-requests" for word in further)
    return [
        "--model-path", args.model, "--speculative-algorithm", "FASER", *draft,
        "--faser-drafter", args.drafter, "--log-level", "warning",
        *([] if is_given else ["--max-running-requests", str(most)]), *further,
    ]  # fmt: skip


def check_settings(settings: config.FaserConfig) -> None:
    """Raises ValueError for --faser-* flags with which nothing would be measured."""
    if settings.mode == "off" or settings.depth != "auto" or settings.cost_table is not None:
        raise ValueError(
            "nothing is measured with --faser-mode off, --faser-depth or --faser-cost-table; "
            "leave them out."
        )


def measure(args: argparse.Namespace, further: Sequence[str], partial: Path) -> None:
    """Start an Engine that writes its table to ``partial``; raises ValueError for bad arguments."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    server_args: Any = prepare_server_args(server_arguments(args, further))
    check_settings(config.load())
    config.ask_profile(
        output=str(partial),
        repeats=args.repeats,
        max_batch=args.max_batch,
        budget_s=NO_LIMIT_S,
    )
    Engine(server_args=server_args).shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 with a sentence on standard error."""
    from faser_sglang.control.cost import CostTable
    from faser_sglang.profile.report import plot, summary

    args, further = parse(sys.argv[1:] if argv is None else argv)
    partial = args.output.absolute().with_name(f".{args.output.name}.{os.getpid()}")
    try:
        measure(args, further, partial)
        if not partial.is_file():
            raise ValueError("the server started without measuring; is --speculative-num-steps 0?")
        table = CostTable.load(partial)
        partial.replace(args.output)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        partial.unlink(missing_ok=True)
    print(summary(table))
    if args.plot is not None:
        plot(table, args.plot)
        print(f"Figure: {args.plot}")
    print(f"Written to {args.output}. Start the server with --faser-cost-table {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
