"""Who is in the mesh, as far as the news tell.

A member repeats its announcement every 5 s and on every change. Whoever watches
asks all members once to announce themselves, so that a fresh watcher (or one that
has a NATS server back) knows everyone within milliseconds. No server keeps a copy:
a NATS restart loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from mesh.nats_permissions import MEMBERS

HEARTBEAT_S = 5.0
STALE_AFTER_S = 15.0
# A member that said nothing for so long is forgotten.
FORGOTTEN_AFTER_S = 300.0


@dataclass(frozen=True, slots=True)
class Member:
    """One service as it describes itself. `stale` is the watcher's own mark: not heard of lately."""

    name: str
    role: str
    node: str
    address: str
    model: str = ""
    fingerprint: str = ""
    capacity: int = 0
    ready: bool = False
    draining: bool = False
    metrics_url: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)
    # Differs between two processes that had the same name one after the other.
    incarnation: str = ""
    stale: bool = False


class Announcement(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What travels: the member, or its leave."""

    member: Member
    left: bool = False


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Announcement).decode


def encode_announcement(member: Member, *, left: bool = False) -> bytes:
    return _encode(Announcement(member, left))


def decode_announcement(subject: str, data: bytes) -> Announcement | None:
    """None for what is malformed or speaks for another than its subject names."""
    try:
        announcement = _decode(data)
    except msgspec.DecodeError:
        return None
    if subject != f"{MEMBERS}.{announcement.member.name}":
        return None
    return announcement


class Roster:
    """The members a watcher knows. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._heard: dict[str, float] = {}

    def members(self) -> dict[str, Member]:
        """A copy, by name."""
        return dict(self._members)

    def hear(self, announcement: Announcement, now: float) -> bool:
        """Takes one announcement in; True if the picture changed."""
        member = replace(announcement.member, stale=False)
        known = self._members.get(member.name)
        if announcement.left:
            # A late goodbye of a predecessor says nothing about its successor.
            if known is None or known.incarnation != member.incarnation:
                return False
            del self._members[member.name], self._heard[member.name]
            return True
        self._heard[member.name] = now
        if known == member:
            return False
        self._members[member.name] = member
        return True

    def excuse(self, now: float) -> None:
        """The silence until now had another reason (no server): it does not count."""
        self._heard = dict.fromkeys(self._heard, now)

    def age(self, now: float) -> bool:
        """Marks who has been silent too long, forgets the long gone; True if the picture changed."""
        changed = False
        for name, heard in list(self._heard.items()):
            silent_s = now - heard
            if silent_s >= FORGOTTEN_AFTER_S:
                del self._members[name], self._heard[name]
                changed = True
            elif silent_s >= STALE_AFTER_S and not self._members[name].stale:
                self._members[name] = replace(self._members[name], stale=True)
                changed = True
        return changed

    def next_age(self) -> float | None:
        """When `age` can next change something; None if never."""
        times = [
            heard + (FORGOTTEN_AFTER_S if self._members[name].stale else STALE_AFTER_S)
            for name, heard in self._heard.items()
        ]
        return min(times, default=None)
