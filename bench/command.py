"""Which benchmarks there are, and how their results are shown.

A command is a module of this package with two functions:

    add_arguments(parser)    its own flags; `--json` is everyone's
    run(arguments) -> Row    measures; the keys carry their units (`pp512_tok_s`, `ttft_p50_ms`)

To add one, write the module and name it in COMMANDS. Knows nothing of what is measured.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

Row = Mapping[str, object]
COMMANDS: Mapping[str, str] = {
    "engine": "How fast the engine is on this machine, beside what the machine could do.",
    "overhead": "What everything but the engine costs: requests a second, time and CPU per request.",
    "streams": "How many streams of 50 tokens a second stay smooth.",
    "serve": "How fast any OpenAI-compatible server is, under a load that you choose.",
    "peers": "kvmesh beside llama.cpp, vLLM on CPU and transformers, in turns, with ratios.",
    "neighbours": "What workers on one machine cost each other.",
    "store": "How fast pages move: into a node's store, and from one node's store to another's.",
    "accuracy": "How far a model's answers are from those of a float32 oracle.",
}


class BenchError(Exception):
    """It cannot be measured; the message says why."""


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> Row: ...


def main(words: Sequence[str], *, program: str = "python -m bench") -> int:
    """Runs one benchmark; the exit code: 0 measured, 1 not, 2 wrong usage."""
    if not words or words[0] in ("-h", "--help"):
        print(_overview(program))
        return 0 if words else 2
    name, *rest = words
    if name not in COMMANDS:
        print(f"{program}: there is no benchmark {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command: Command = importlib.import_module(f"bench.{name}")
    parser = argparse.ArgumentParser(
        prog=f"{program} {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one object instead of a table")
    arguments = parser.parse_args(rest)
    try:
        row = command.run(arguments)
    except BenchError as error:
        print(f"{program} {name}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(row) if arguments.json else table(row))
    return 0


def table(row: Row) -> str:
    """One line per key."""
    width = max(len(key) for key in row)
    return "\n".join(f"{key:{width}}  {_shown(value)}" for key, value in row.items())


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _overview(program: str) -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [f"usage: {program} NAME [--json] …", "", *lines, "", f"{program} NAME --help says more."]
    )
