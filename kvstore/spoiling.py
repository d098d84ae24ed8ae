"""What fault points do to pages on their way out. Only tests ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvstore.exports import Sending
from mesh.faults import Action, FaultPoints

POINT = "page_sent"


def spoilt(batch: Sequence[Sending], faults: FaultPoints) -> list[Sending]:
    """The batch as the rules of the process want it to travel."""
    out: list[Sending] = []
    for number, page in enumerate(batch):
        fault = faults.at(POINT)
        match None if fault is None else fault.action:
            case None:
                out.append(page)
            case Action.DUPLICATE:
                out += [page, page]
            case Action.CORRUPT:
                data = bytearray(page.data)
                data[page.index * 37 % len(data)] ^= 1 << page.index % 8
                out.append(replace(page, data=memoryview(data)))
            case Action.TRUNCATE:
                out.append(replace(page, data=page.data[: len(page.data) // 2]))
            case Action.FOREIGN:
                # Of itself, where it travels alone: its bytes under the seal of nobody.
                other = batch[number - 1]
                seal = other.seal if other is not page else ~page.seal & 0xFFFFFFFFFFFFFFFF
                out.append(replace(page, data=other.data, seal=seal))
            case Action.STALE:
                out.append(replace(page, data=memoryview(bytes(reversed(page.data)))))
            case _:
                pass
    return out
