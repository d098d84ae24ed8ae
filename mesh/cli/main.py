"""The command line: which commands there are, and what their arguments are.

Exit codes: 0 done, 1 it failed (the reason is on standard error), 2 wrong usage,
3 there is no mesh running there, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mesh.cli.failure import Failure

PROGRAM = "kvmesh"
Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words == ["--version"]:
        words = ["version"]
    if words[:1] == ["bench"]:
        # Its own program: benchmarks load the engine, which nothing here may know.
        return _guarded(lambda: _bench(words[1:]))
    arguments = parser().parse_args(words, argparse.Namespace(argv=words))
    if not hasattr(arguments, "module"):
        parser().print_help()
        return 2
    handler: Handler = importlib.import_module(f"mesh.cli.{arguments.module}").run
    return _guarded(lambda: handler(arguments))


def _guarded(command: Callable[[], int]) -> int:
    try:
        return command()
    except Failure as failure:
        print(f"{PROGRAM}: {failure}", file=sys.stderr)
        return failure.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _bench(words: Sequence[str]) -> int:
    try:
        command = importlib.import_module("bench.command")
    except ModuleNotFoundError as error:
        raise Failure(f"benchmarks need a checkout of the source ({error})") from error
    status: int = command.main(words, program=f"{PROGRAM} bench")
    return status


def parser() -> argparse.ArgumentParser:
    """All commands."""
    top = argparse.ArgumentParser(
        prog=PROGRAM, allow_abbrev=False, description="Serves language models with prefill and decode apart."
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    _add_up(commands)
    _command(commands, "down", "stop", "Drains and stops the mesh.")
    status = _command(commands, "status", "status", "Shows every process of the mesh.")
    status.add_argument("--json", action="store_true", help="for programs")
    _add_replacing(commands)
    _add_chaos(commands)
    _add_chat(commands)
    _add_keys(commands)
    _add_models(commands)
    _add_organisations(commands)
    logs = _command(commands, "logs", "logs", "Shows the logs of one process or of all.")
    logs.add_argument("name", nargs="?", help="a process or a role (default: all)")
    logs.add_argument("-f", "--follow", action="store_true", help="keep showing what is added")
    logs.add_argument("-n", "--lines", type=int, default=50, help="how many of the last lines (default 50)")
    trace = _command(commands, "trace", "trace", "Shows where one request spent its time.")
    trace.add_argument("id", help="an x-request-id or a trace id; 'last' for the latest")
    trace.add_argument("--json", action="store_true", help="the spans, one JSON object per line")
    doctor = _command(
        commands, "doctor", "doctor", "Says what is wrong with this machine or state directory."
    )
    doctor.add_argument(
        "--port", type=int, help="the edge's port to be (default 8080, or that of the mesh that runs)"
    )
    _add_development(commands)
    _command(
        commands, "bench", "", "Measures: engine, serve, accuracy, …; 'bench --help' lists them.", state=False
    )
    _command(commands, "version", "version", "Shows the versions of kvmesh and its parts.", state=False)
    return top


def _add_up(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = _command(commands, "up", "up", "Starts the mesh and shows how to use it.")
    up.add_argument(
        "--model", action="append", default=[], metavar="NAME=SOURCE", help="a model to serve (repeatable)"
    )
    up.add_argument("--port", type=int, help="the edge's port (default 8080)")
    up.add_argument("--host", help="the edge's address (default 127.0.0.1; others need --tls)")
    for role in ("router", "prefill", "decode", "encode"):
        per = "" if role == "router" else " per model"
        up.add_argument(
            f"--{role}", type=int, metavar="N", help=f"how many {role} processes{per} (default 1)"
        )
    up.add_argument("--iam", type=int, metavar="N", help="how many iam processes (default 2)")
    up.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="NAME=ROLES",
        help="a node with a KV store of its own and these workers per model, such as a=prefill,decode:2 "
        "(repeatable; without it, one node has all)",
    )
    up.add_argument(
        "--kv-memory", metavar="SIZE", help="memory for pages (default a quarter of what is free, ≤ 4G)"
    )
    up.add_argument(
        "--kv-disk", metavar="SIZE", help="keep evicted pages on disk, at most so much (default: none)"
    )
    up.add_argument(
        "--listen", choices=("unix", "tcp"), help="between services: Unix sockets, or TCP with mutual TLS"
    )
    up.add_argument(
        "--tls", action="store_const", const=True, help="TLS at the edge, with the mesh's own CA or:"
    )
    up.add_argument("--cert", type=Path, metavar="FILE", help="the edge's certificate chain (PEM)")
    up.add_argument("--key", type=Path, metavar="FILE", help="the edge's private key (PEM)")
    up.add_argument("--no-edge", dest="edge", action="store_const", const=False, help="without Envoy")
    up.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of each worker (default: all processors up to 8; reference: 1)",
    )
    up.add_argument(
        "--pin",
        action="store_const",
        const=True,
        help="hold each worker's threads to processors of their own",
    )
    up.add_argument(
        "--executor",
        choices=("reference", "cpu"),
        help="what computes: cpu (C++, quantised, the default) or reference (float32, slow; needs torch)",
    )
    up.add_argument(
        "--kv-dtype", choices=("f32", "f16", "bf16", "int8"), help="numbers in KV pages (default f16)"
    )
    for kind, what in (("tool", "write tool calls"), ("reasoning", "mark their thinking")):
        up.add_argument(
            f"--{kind}-parser", metavar="[MODEL=]NAME,…", help=f"how models {what} (default by the template)"
        )
    up.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these names")
    up.add_argument("--detach", action="store_true", help="return when ready and leave the mesh running")
    # For tests: pages per model instead of memory. And what --detach runs in the background.
    up.add_argument("--page-pool", type=int, metavar="N", help=argparse.SUPPRESS)
    up.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    up.add_argument(
        "--fault-points", action="store_const", const=True, help="for 'chaos': never where it matters"
    )


def _add_replacing(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    restart = _command(commands, "restart", "restart", "Restarts one process, all of a role, or all.")
    restart.add_argument("name", nargs="?", default="all", help="a process, a role, or all (default)")
    drain = _command(commands, "drain", "drain", "Takes a process out of service, after its work.")
    drain.add_argument("name", help="a process, or a role: router, prefill, decode or iam")
    drain.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="then a worker's requests move (default drain_s), a router's end (default 600)",
    )
    drain.add_argument("--force", action="store_true", help="also the last one that does this work")


def _add_chaos(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chaos = _command(
        commands, "chaos", "chaos", "Breaks a test mesh in every way, and counts what clients see."
    )
    chaos.add_argument("--requests", type=int, default=20, metavar="N", help="per cell (default 20)")
    chaos.add_argument(
        "--cell",
        action="append",
        default=[],
        metavar="HOW:VICTIM:PHASE",
        help="such as kill:decode:streaming; * for any (repeatable; default: all)",
    )
    chaos.add_argument("--model", help="default: the first")
    chaos.add_argument("--seed", help="the same requests and moments again, on a fresh mesh")
    chaos.add_argument("--json", action="store_true", help="for programs")


def _add_chat(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    chat = _command(commands, "chat", "chat", "Talks to a model in the terminal.")
    chat.add_argument("prompt", nargs="*", help="one question; without it, a conversation")
    chat.add_argument("--model", help="default: the only model, or the first")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--temperature", type=float, help="0 is greedy")
    chat.add_argument("--max-tokens", type=int, default=512, help="the longest answer (default 512)")


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys, group = _group(commands, "keys", "API keys: create, list, revoke.")
    keys.set_defaults(action="list", json=False, org="")
    create = _leaf(group, "keys", "create", "Makes a key and shows it once.")
    create.add_argument("--org", default="dev", help="the organisation (default dev)")
    create.add_argument("--name", default="made by hand", help="a note for yourself")
    create.add_argument("--expires", metavar="TIME", help="such as 90s, 12h or 30d (default: never)")
    create.add_argument("--model", action="append", default=[], help="only these models (repeatable)")
    create.add_argument("--json", action="store_true", help="for programs")
    listing = _leaf(group, "keys", "list", "Shows the keys; never their secrets.")
    listing.add_argument("--org", default="", help="only this organisation's")
    listing.add_argument("--json", action="store_true", help="for programs")
    revoke = _leaf(group, "keys", "revoke", "Makes a key worthless, within 5 s.")
    revoke.add_argument("id", help="the key's id, as 'keys list' shows it")


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    models, group = _group(commands, "models", "Models: list, add, remove (also while the mesh runs).")
    models.set_defaults(action="list", json=False)
    listing = _leaf(group, "models", "list", "Shows the models.")
    listing.add_argument("--json", action="store_true", help="for programs")
    add = _leaf(group, "models", "add", "Serves one more model, from now on.")
    add.add_argument(
        "model", metavar="NAME=SOURCE", help="a path, pkg:NAME, hf:OWNER/REPO, tiny:seed=N or script:"
    )
    add.add_argument("--no-grant", action="store_true", help="do not allow it to the organisation dev")
    remove = _leaf(group, "models", "remove", "Stops to serve a model.")
    remove.add_argument("name")


def _add_organisations(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    orgs, group = _group(commands, "orgs", "Organisations: list, create, suspend, resume, forget.")
    orgs.set_defaults(action="list", json=False)
    listing = _leaf(group, "orgs", "list", "Shows the organisations.")
    listing.add_argument("--json", action="store_true", help="for programs")
    for action, text in (
        ("create", "Makes an organisation. It may use nothing until it is granted."),
        ("suspend", "Refuses everything to an organisation."),
        ("resume", "Ends a suspension."),
        ("forget", "Drops the KV pages of an organisation's prompts, in memory and on disk."),
    ):
        _leaf(group, "orgs", action, text).add_argument("id")
    grants, group = _group(
        commands, "grants", "Grants: which organisation may use which model: list, allow, deny, remove."
    )
    grants.set_defaults(action="list", org=None, json=False)
    listing = _leaf(group, "grants", "list", "Shows the grants.")
    listing.add_argument("--org", help="only this organisation's")
    listing.add_argument("--json", action="store_true", help="for programs")
    for action, text in (
        ("allow", "Allows a model ('*' for all) to an organisation."),
        ("deny", "Denies a model to an organisation, whatever else allows it."),
        ("remove", "Takes back what allow or deny said."),
    ):
        leaf = _leaf(group, "grants", action, text)
        leaf.add_argument("org")
        leaf.add_argument("model")


def _add_development(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    test = _command(commands, "test", "develop", "Checks style and types, and runs the tests.", state=False)
    test.set_defaults(action="test")
    test.add_argument("--full", action="store_true", help="the slow tests as well")
    test.add_argument("pytest", nargs="*", help="instead of everything: arguments for pytest (after --)")
    lint = _command(commands, "lint", "develop", "Checks style, types and the wire contract.", state=False)
    lint.set_defaults(action="lint")
    lint.add_argument("--fix", action="store_true", help="format, and repair what can be repaired")


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    module: str,
    description: str,
    *,
    state: bool = True,
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=description, description=description, allow_abbrev=False)
    command.set_defaults(module=module)
    if state:
        _state_argument(command)
    return command


def _group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, description: str
) -> tuple[argparse.ArgumentParser, argparse._SubParsersAction[argparse.ArgumentParser]]:
    """A command that has commands of its own."""
    group = _command(commands, name, name, description)
    group.set_defaults(action=None)
    return group, group.add_subparsers(title="commands", metavar="COMMAND")


def _leaf(
    group: argparse._SubParsersAction[argparse.ArgumentParser], module: str, action: str, description: str
) -> argparse.ArgumentParser:
    leaf = group.add_parser(action, help=description, description=description, allow_abbrev=False)
    leaf.set_defaults(module=module, action=action)
    _state_argument(leaf, inherited=True)
    return leaf


def _state_argument(command: argparse.ArgumentParser, *, inherited: bool = False) -> None:
    default = os.environ.get("KVMESH_STATE", ".kvmesh")
    command.add_argument(
        "--state",
        type=Path,
        # A group has the default; a second one below it would undo what was given before.
        default=argparse.SUPPRESS if inherited else Path(default),
        metavar="DIR",
        help=f"the state directory (default {default})",
    )


if __name__ == "__main__":
    sys.exit(main())
