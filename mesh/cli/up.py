"""`kvmesh up`: in the foreground until Ctrl-C, or with `--detach` in the background."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mesh.cli.failure import Failure
from mesh.cli.progress import Progress
from mesh.supervisor.options import MeshOptions, OptionsError, merged, parse_size, read_file, stored_models
from mesh.supervisor.state import DEFAULT_STATE

_FLAGS = (
    "port",
    "host",
    "iam",
    "router",
    "prefill",
    "decode",
    "encode",
    "listen",
    "tls",
    "cert",
    "key",
    "edge",
    "threads",
    "pin",
    "executor",
    "kv_dtype",
    "tool_parser",
    "reasoning_parser",
    "page_pool",
    "fault_points",
)


def run(arguments: argparse.Namespace) -> int:
    """The exit code: 0 after a clean stop, or when a detached mesh is ready."""
    try:
        options = options_of(arguments)
    except OptionsError as error:
        raise Failure(str(error), status=2) from None
    if options.executor == "reference" and find_spec("torch") is None:
        raise Failure(
            "--executor reference needs torch, which is not installed:"
            f" {sys.executable} -m pip install -c constraints.txt torch",
            status=2,
        )
    if arguments.detach:
        return _detached(options, [word for word in arguments.argv if word != "--detach"])
    # Only now: this imports what a supervisor needs.
    from mesh.supervisor.run import run_mesh

    if arguments.report_fd is not None:
        return run_mesh(options, [_Pipe(arguments.report_fd)])
    return run_mesh(options, [Progress(options, stays=True)])


def options_of(arguments: argparse.Namespace) -> MeshOptions:
    """Flags over file over what `kvmesh models` stored. Raises OptionsError."""
    values = read_file(arguments.config) if arguments.config is not None else {}
    flags: dict[str, Any] = {name: getattr(arguments, name) for name in _FLAGS}
    if arguments.kv_memory is not None:
        flags["kv_bytes"] = parse_size(arguments.kv_memory)
    if arguments.kv_disk is not None:
        flags["kv_disk_bytes"] = parse_size(arguments.kv_disk)
    if "state" not in values or arguments.state != DEFAULT_STATE:
        values["state"] = arguments.state
    if "models" not in values and (stored := stored_models(values["state"] / "models.json")) is not None:
        values["models"] = stored
    return merged(values, flags, arguments.model, arguments.node)


def _detached(options: MeshOptions, argv: list[str]) -> int:
    """Starts the same command in a session of its own and shows what it reports until it is ready."""
    receive, send = os.pipe()
    command = [sys.executable, "-m", "mesh.cli.main", *argv, "--report-fd", str(send)]
    progress = Progress(options)
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            pass_fds=[send],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        os.close(send)
        try:
            with os.fdopen(receive, encoding="utf-8") as reports:
                for line in reports:
                    event = json.loads(line)
                    progress(event)
                    if event["event"] == "ready":
                        return 0
        except KeyboardInterrupt:
            # Not ready, and nobody waits any more: it must not stay.
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            raise
        status = child.wait()
        if not progress.failed:
            output.seek(0)
            told = output.read().decode(errors="replace").strip()
            raise Failure(f"the supervisor ended with status {status} before the mesh was ready\n{told}")
    return 1


class _Pipe:
    """Reports to the process that started this one, as long as it listens."""

    def __init__(self, handle: int) -> None:
        self._handle: int | None = handle
        os.set_inheritable(handle, False)

    def __call__(self, event: Mapping[str, Any]) -> None:
        if self._handle is None:
            return
        try:
            os.write(self._handle, json.dumps(event, default=str).encode() + b"\n")
        except OSError:
            self._close()
        if event["event"] == "ready":
            self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
