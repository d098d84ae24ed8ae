"""Runs a program that dies with its parent: `python -I -S child.py PARENT NICE PROGRAM ARG...`

Asks the kernel to kill this process when the supervisor dies (Linux), sets the
priority, and becomes the program. A file of its own that imports next to nothing,
because it runs before every process of the mesh. Where the kernel has no such
request (a Mac), the guardian does it.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    parent, nice, program, *arguments = argv
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request was made.
    if os.getppid() != int(parent):
        sys.exit(0)
    os.nice(int(nice))
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
