"""What IAM says and hears on NATS: policy hints both ways, usage records in.

The truth is in the database; without NATS everything still holds, only later:
another IAM process then sees a change when its next credential comes in.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from iam_authz.directory import Directory
from iam_authz.metrics import IamMetrics
from iam_authz.service.wire import usage_record
from iam_authz.usage import UsageLedger

log = logging.getLogger(__name__)

POLICY_SUBJECT = "iam.policy"


class News(Protocol):
    """The part of `mesh.news.News` that IAM uses."""

    async def publish(self, subject: str, data: bytes) -> bool: ...

    async def subscribe(
        self, subject: str, on_message: Callable[[str, bytes], Awaitable[None] | None]
    ) -> None: ...

    async def consume_usage(self, on_record: Callable[[bytes], Awaitable[None]]) -> None: ...

    def on_connected(self, hook: Callable[[], Awaitable[None]]) -> None: ...


class PolicyHints:
    """`announce` after a change of ours; `listen` for those of others."""

    def __init__(self, news: News | None) -> None:
        self._news = news

    async def announce(self, version: int) -> None:
        """Tells that the policy has a new version (decimal digits)."""
        if self._news is not None:
            await self._news.publish(POLICY_SUBJECT, b"%d" % version)

    async def listen(self, directory: Directory) -> None:
        """Refreshes `directory` when someone else announces, and after every connect."""
        if self._news is None:
            return

        async def heard(subject: str, data: bytes) -> None:
            if data != b"%d" % directory.snapshot.version:
                await directory.refresh()

        await self._news.subscribe(POLICY_SUBJECT, heard)
        # Hints are not repeated: what was missed is looked up.
        self._news.on_connected(directory.refresh)


async def consume_usage(news: News, ledger: UsageLedger, metrics: IamMetrics) -> None:
    """Stores usage records from now on. One that cannot be read is counted and dropped."""

    async def store(data: bytes) -> None:
        try:
            record = usage_record(data)
        except ValueError as error:
            # Redelivery would not make it better.
            metrics.used("refused")
            log.warning("usage record refused: %s", error)
            return
        await ledger.add(record)
        metrics.used("stored")

    await news.consume_usage(store)
