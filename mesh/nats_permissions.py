"""What each role may publish and subscribe to: data that the NATS configuration is made from.

Every service has a NATS user of its own, so that a worker can speak only for
itself. Nothing is allowed that is not listed. Inboxes are per user: with the
common `_INBOX.>` everyone could read everyone's answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MEMBERS = "mesh.members"
MEMBERS_QUERY = "mesh.members_query"
LOAD = "mesh.load"
SUSPECT = "mesh.suspect"
KV_EVENTS = "kv.events"
POLICY = "iam.policy"
USAGE = "usage.records"
USAGE_STREAM = "USAGE"
USAGE_CONSUMER = "iam"
USAGE_DELIVER = "usage.deliver"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects, with NATS wildcards. An empty list allows nothing."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def inbox_prefix(name: str) -> str:
    """The first tokens of the subjects that answers to `name` arrive at."""
    return f"_INBOX_{name}"


_OWN_MEMBER = "mesh.members.{name}"
_INBOX = "_INBOX_{name}.>"
_WATCHER = Permissions(publish=(MEMBERS_QUERY,), subscribe=("mesh.members.>", "mesh.load.>"))
_WORKER = Permissions(publish=(_OWN_MEMBER, "mesh.load.{name}"), subscribe=(MEMBERS_QUERY,))

# `{name}` is the service's name and `{node}` its node.
TABLE: Mapping[str, Permissions] = {
    "prefill": _WORKER,
    "decode": _WORKER,
    "encode": _WORKER,
    "kvstore": Permissions(
        publish=(_OWN_MEMBER, "mesh.load.{name}", "kv.events.{node}"),
        subscribe=(MEMBERS_QUERY,),
    ),
    "responses": Permissions(publish=(_OWN_MEMBER,), subscribe=(MEMBERS_QUERY,)),
    "router": Permissions(
        publish=(_OWN_MEMBER, "mesh.load.{name}", "mesh.suspect.>", MEMBERS_QUERY, USAGE),
        subscribe=(MEMBERS_QUERY, "mesh.members.>", "mesh.load.>", "kv.events.>", POLICY, _INBOX),
    ),
    "iam": Permissions(
        publish=(
            _OWN_MEMBER,
            POLICY,
            f"$JS.API.STREAM.CREATE.{USAGE_STREAM}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{USAGE_STREAM}.{USAGE_CONSUMER}",
            f"$JS.ACK.{USAGE_STREAM}.{USAGE_CONSUMER}.>",
        ),
        subscribe=(MEMBERS_QUERY, POLICY, USAGE_DELIVER, _INBOX),
    ),
    "supervisor": Permissions(
        publish=_WATCHER.publish,
        subscribe=(*_WATCHER.subscribe, "mesh.suspect.>"),
    ),
    "operator": _WATCHER,
}


def permissions(role: str, *, name: str, node: str) -> Permissions:
    """The rules for one service. Raises KeyError for a role without any."""
    rules = TABLE[role]

    def fill(subjects: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(subject.replace("{name}", name).replace("{node}", node) for subject in subjects)

    return Permissions(fill(rules.publish), fill(rules.subscribe))
