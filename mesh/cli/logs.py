"""`kvmesh logs`: the last lines of one process's log or of all, and what is added."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh.cli.failure import Failure
from mesh.cli.running import state_of

_LOOK_S = 0.25
# Our services, Envoy and NATS write a date each in their own way, near the line's beginning.
_MOMENT = re.compile(r"(\d{4})[-/](\d\d)[-/](\d\d)[T ]([\d:]{8}(?:\.\d+)?)")
_MOMENT_WITHIN = 60


def run(arguments: argparse.Namespace) -> int:
    """Shows lines as the processes wrote them, with the name in front when there are several."""
    files = chosen(state_of(arguments.state).logs, arguments.name)
    width = max(len(path.stem) for path in files) if len(files) > 1 else 0
    for path, line in merged({path: _last(path, arguments.lines) for path in files}):
        _show(path, line, width)
    if arguments.follow:
        _follow(files, width)
    return 0


def chosen(directory: Path, name: str | None) -> list[Path]:
    """The log files of a process or a role; Failure when there are none."""
    files = sorted(directory.glob("*.log"))
    if name is not None:
        files = [f for f in files if f.stem == name] or [f for f in files if f.stem.split("-")[0] == name]
    if not files:
        names = ", ".join(f.stem for f in sorted(directory.glob("*.log"))) or "none yet"
        raise Failure(f"no log of {name or 'any process'}; there are: {names}")
    return files


def merged(lines: Mapping[Path, Sequence[str]]) -> list[tuple[Path, str]]:
    """All lines by their time; one that names none (a traceback) stays behind the one before it."""
    timed: list[tuple[str, Path, str]] = []
    for path, of_one in lines.items():
        moment = ""
        for line in of_one:
            found = _MOMENT.search(line, 0, _MOMENT_WITHIN)
            moment = "".join(found.groups()) if found else moment
            timed.append((moment, path, line))
    return [(path, line) for _, path, line in sorted(timed, key=lambda entry: entry[0])]


def _last(path: Path, lines: int) -> list[str]:
    """The last lines, from the file before the rotation too if need be."""
    found: deque[str] = deque(maxlen=max(lines, 0))
    for part in (path.with_name(path.name + ".1"), path):
        if part.exists():
            with part.open(encoding="utf-8", errors="replace") as file:
                found.extend(file)
    return list(found)


def _follow(files: list[Path], width: int) -> None:
    ends = {path: (path.stat().st_ino, path.stat().st_size) for path in files}
    while True:
        time.sleep(_LOOK_S)
        for path in files:
            ends[path] = _show_new(path, *ends[path], width)
        sys.stdout.flush()


def _show_new(path: Path, inode: int, offset: int, width: int) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        # Being rotated at this moment.
        return inode, offset
    if status.st_ino != inode:
        rotated = path.with_name(path.name + ".1")
        if rotated.exists() and rotated.stat().st_ino == inode:
            _show_from(rotated, offset, width)
        offset = 0
    return status.st_ino, _show_from(path, offset, width)


def _show_from(path: Path, offset: int, width: int) -> int:
    """Shows whole lines from `offset` on; where the next one begins."""
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            _show(path, line.decode(errors="replace"), width)
    return offset


def _show(path: Path, line: str, width: int) -> None:
    name = path.name.split(".log")[0]
    sys.stdout.write(f"{name:<{width}}  {line}" if width else line)
