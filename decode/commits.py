"""Gives full blocks their ids at the store, off the step's path.

At most one commit per request is in flight; blocks that become full meanwhile
wait for it. Answers are applied by the loop between steps, because they change
page tables. While the store is away blocks wait and the pages stay in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode.choice import FullBlock
from decode.request import Request
from mesh.errors import MeshError, Unavailable
from mesh.kv.client import KvClient
from mesh.kv.page import CommitItem, Page

RETRY_S = 0.5

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Answer:
    blocks: Sequence[FullBlock]
    winners: Sequence[Page]


class Commits:
    """`wake` is called whenever there is something for the loop to do."""

    def __init__(self, kv: KvClient, wake: Callable[[], None]) -> None:
        self._kv = kv
        self._wake = wake
        self._waiting: dict[Request, list[FullBlock]] = {}
        self._flying: dict[Request, asyncio.Task[None]] = {}
        self._answers: dict[Request, list[_Answer]] = {}
        self._retry: asyncio.TimerHandle | None = None

    def queue(self, request: Request, blocks: Sequence[FullBlock]) -> None:
        if not blocks or request.opening.prompt_logprobs is not None:
            # The ids of a scored prompt are its own: nobody could find its blocks.
            return
        waiting = self._waiting.setdefault(request, [])
        # Choices of one request share the page of a prompt's last whole block.
        known = {block.page for block in waiting}
        waiting.extend(block for block in blocks if block.page not in known)

    def start(self) -> None:
        """Sends what waits, unless the store was away a moment ago."""
        if self._retry is None:
            for request in list(self._waiting):
                self._send(request)

    def apply(self) -> None:
        """Between steps: puts the store's pages into the tables."""
        for request in list(self._answers):
            self._settle(request)

    async def finish(self, request: Request, *, keep: bool) -> None:
        """Ends the commits of a request that is in no step any more.

        With `keep`, its full blocks are offered to the store once more, so that a
        later request finds them.
        """
        if not keep:
            self._waiting.pop(request, None)
        # Once for a commit that is in flight already, once for what waited behind it.
        for _ in range(2):
            if self._kv.connected:
                self._send(request)
            flying = self._flying.get(request)
            if flying is not None:
                await asyncio.wait({flying})
        self._waiting.pop(request, None)
        self._settle(request)

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._flying:
            await asyncio.wait(list(self._flying.values()))

    def _send(self, request: Request) -> None:
        if request in self._waiting and request not in self._flying:
            blocks = self._waiting.pop(request)
            self._flying[request] = asyncio.create_task(self._commit(request, blocks))

    async def _commit(self, request: Request, blocks: list[FullBlock]) -> None:
        items = [CommitItem(block.page, block.block_id, block.parent_id) for block in blocks]
        try:
            # Drawn pages belong to an attempt; pages of this worker's own do not.
            winners = await self._kv.commit(request.handoff_id, items, attempt=request.drawn_attempt)
        except Unavailable as error:
            log.info("commit of %s waits: %s", request.handoff_id, error)
            self._waiting[request] = blocks + self._waiting.get(request, [])
            self._retry_later()
        except MeshError as error:
            # The pages stay in use, only nobody else will find them.
            log.warning("commit of %s refused: %s", request.handoff_id, error)
        else:
            self._answers.setdefault(request, []).append(_Answer(blocks, winners))
        finally:
            del self._flying[request]
            self._wake()

    def _retry_later(self) -> None:
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._retry_now)

    def _retry_now(self) -> None:
        self._retry = None
        self.start()

    def _settle(self, request: Request) -> None:
        for answer in self._answers.pop(request, []):
            self._kv.give(request.settle(answer.blocks, answer.winners))
