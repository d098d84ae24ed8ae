"""A listening Unix socket takes the place of its predecessor's without a gap.

It is bound under a name of its own and then renamed onto the one that is dialled, so
that there is a listener at every moment: a connection goes to the predecessor or to
us, never to nobody. And a predecessor that removes its socket's file when it ends
(gRPC does) does not remove ours. Does not know who listens.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

_numbers = itertools.count()


class SocketPlace:
    """`path` is what others dial; listen at `own`, then `take`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Short: the kernel takes 107 bytes of a path, and `path` may have them all.
        self.own = path.with_name(f".{os.getpid()}.{next(_numbers)}")
        self._inode: int | None = None
        self.own.unlink(missing_ok=True)

    def take(self) -> None:
        """From now on whoever dials `path` reaches us."""
        os.chmod(self.own, 0o600)
        self._inode = self.own.stat().st_ino
        self.own.replace(self.path)

    def leave(self) -> None:
        """Removes what is ours; a successor's socket stays."""
        self.own.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if self._inode is not None and self.path.stat().st_ino == self._inode:
                self.path.unlink()
