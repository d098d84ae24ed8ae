"""Colours where a terminal shows them, tables, and log lines for people."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import IO

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "cyan": "36"}


def coloured(stream: IO[str] = sys.stdout) -> bool:
    """Whether `stream` shows colours (and the user wants them: NO_COLOR)."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str, stream: IO[str] = sys.stdout) -> str:
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if coloured(stream) else text


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Left-aligned columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return "\n".join([paint(line(header), "dim"), *(line(row) for row in rows)])


def readable(line: str) -> str:
    """A JSON log line as `time level message`; any other line as it is."""
    try:
        entry = json.loads(line)
        # A line with an exception has details that matter: it stays whole.
        whole = "exception" in entry
        return line.rstrip() if whole else f"{entry['time']} {entry['level']}: {entry['message']}"
    except (ValueError, KeyError, TypeError):
        return line.rstrip()


def duration(value_s: float) -> str:
    """`42s`, `3m10s`, `2h05m`, `3d02h`."""
    whole = int(value_s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
