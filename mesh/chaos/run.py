"""One cell after another: load, faults while it runs, then the same load undisturbed, and the difference."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from mesh.chaos.asks import Ask, Outcome, draw, put
from mesh.chaos.cells import Cell
from mesh.chaos.view import View
from mesh.telemetry.samples import total

CLIENTS = 16
BACK_WITHIN_S = 60.0
# The KV of the dead must be gone by then.
CLEAN_WITHIN_S = 5.0
PAUSE_S = 4.0
# At which passing of a point to strike, at the latest: every row passes one, a request the others once.
_LATEST = {"streaming": 40}
_LATEST_OF_REQUESTS = 3
_LOOK_S = 0.05


@dataclass(slots=True)
class Result:
    """What clients and stores saw of one cell.

    `silence_s` is the longest time for which a client heard nothing, `stall_s` what that is
    beyond the longest of the undisturbed load. `clean_s` is how long after the load pages were held.
    """

    cell: str
    requests: int
    deaths: int = 0
    failed: int = 0
    broken_streams: int = 0
    different: int = 0
    silence_s: float = 0.0
    stall_s: float = 0.0
    resumed: int = 0
    recomputed_mean: float = 0.0
    leaked_pages: int = 0
    clean_s: float = 0.0
    details: list[str] = field(default_factory=list)

    @property
    def identical(self) -> int:
        return self.requests - self.failed - self.broken_streams - self.different


class Chaos:
    """Runs cells on a mesh. `connect` makes a client of its edge."""

    def __init__(self, view: View, connect: Callable[[], httpx.AsyncClient], model: str, run: str) -> None:
        self._view = view
        self._connect = connect
        self._model = model
        self._run = run
        self._turn = 0
        self._usual_silence_s = 0.0

    async def cell(self, cell: Cell, requests: int) -> Result:
        """Raises AssertionError only for a mesh that does not come back."""
        self._turn += 1
        await self._whole(cell)
        result = Result(cell.name, requests)
        asks = draw(f"{self._run} {cell.name}", requests, self._model)
        before = await self._recomputed()
        disturbed, result.deaths = await self._disturbed(cell, asks)
        await self._whole(cell)
        result.leaked_pages, result.clean_s = await self._view.clean(CLEAN_WITHIN_S)
        after = await self._recomputed()
        result.resumed = max(0, round(after[0] - before[0]))
        result.recomputed_mean = (after[1] - before[1]) / result.resumed if result.resumed else 0.0
        self._compare(cell, result, asks, disturbed, await self._load(asks))
        result.silence_s = max((o.longest_silence_s for o in disturbed if o.kind == "answered"), default=0.0)
        if not cell.strikes:
            self._usual_silence_s = result.silence_s
        result.stall_s = max(0.0, result.silence_s - self._usual_silence_s)
        return result

    async def _whole(self, cell: Cell) -> None:
        if not await self._view.whole(BACK_WITHIN_S):
            raise AssertionError(f"{cell.name}: a process did not come back within {BACK_WITHIN_S:g} s")

    async def _load(self, asks: Sequence[Ask]) -> list[Outcome]:
        outcomes: list[Outcome | None] = [None] * len(asks)
        waiting = iter(enumerate(asks))

        async def client() -> None:
            async with self._connect() as http:
                for place, ask in waiting:
                    outcomes[place] = await put(http, ask)

        await asyncio.gather(*(client() for _ in range(min(CLIENTS, len(asks)))))
        return [outcome for outcome in outcomes if outcome is not None]

    async def _disturbed(self, cell: Cell, asks: Sequence[Ask]) -> tuple[list[Outcome], int]:
        """The load, and how often somebody was struck in it."""
        if not cell.strikes:
            return await self._load(asks), 0
        dice = random.Random(f"{self._run} {cell.name}")  # noqa: S311
        victim = await self._view.one(cell.victim, self._turn)
        # Before the load begins, so that even a small one has its first blow.
        armed = await self._arm(cell, victim, dice)
        load = asyncio.create_task(self._load(asks))
        try:
            deaths = await self._break(cell, load, victim, armed, dice)
        finally:
            outcomes = await load
        return outcomes, deaths

    async def _break(
        self,
        cell: Cell,
        load: asyncio.Task[list[Outcome]],
        victim: dict[str, Any],
        armed: list[dict[str, Any]],
        dice: random.Random,
    ) -> int:
        """Strikes at the phase, again and again as soon as the victim is back, while the load runs."""
        deaths = 0
        while not load.done():
            while not self._fired(armed) and not load.done():  # noqa: ASYNC110 (another process)
                await asyncio.sleep(_LOOK_S)
            deaths += self._fired(armed)
            for router in armed:
                self._view.arm(router, [])
                self._view.forget(router)
            back = None
            while back is None and not load.done():
                await asyncio.sleep(_LOOK_S)
                back = await self._view.replaced(victim["name"], victim["pid"])
            victim = back or victim
            # What was struck recovers before the next blow: how long that takes is what is measured.
            await asyncio.wait({load}, timeout=PAUSE_S)
            if not load.done():
                armed = await self._arm(cell, victim, dice)
        for process in await self._view.processes():
            if process["role"] == "router" and process["ready"]:
                self._view.arm(process, [])
        return deaths

    async def _arm(self, cell: Cell, victim: dict[str, Any], dice: random.Random) -> list[dict[str, Any]]:
        """Gives a rule to those in whom the point lies: a router strikes itself, else any router the victim.

        Which of them passes it first does not matter; one blow at one process is what there is.
        """
        routers = [p for p in await self._view.processes() if p["role"] == "router" and p["ready"]]
        if cell.victim == "router":
            routers = [p for p in routers if p["name"] == victim["name"]]
        nth = dice.randint(1, _LATEST.get(cell.phase, _LATEST_OF_REQUESTS))
        pid = 0 if cell.victim == "router" else victim["pid"]
        for router in routers:
            self._view.arm(router, [{"point": cell.phase, "action": cell.how, "nth": nth, "pid": pid}])
        return routers

    def _fired(self, armed: Sequence[dict[str, Any]]) -> bool:
        return any(self._view.fired(router) for router in armed)

    async def _recomputed(self) -> tuple[float, float]:
        """How often a choice went on after its worker was lost, and the tokens computed again."""
        samples = await self._view.samples("router")
        return (
            total(samples, "kvmesh_recomputed_tokens_count", why="lost"),
            total(samples, "kvmesh_recomputed_tokens_sum", why="lost"),
        )

    @staticmethod
    def _compare(
        cell: Cell,
        result: Result,
        asks: Sequence[Ask],
        disturbed: Sequence[Outcome],
        undisturbed: Sequence[Outcome],
    ) -> None:
        for number, (ask, was, should) in enumerate(zip(asks, disturbed, undisturbed, strict=True)):
            if should.kind != "answered":
                result.failed += 1
                result.details.append(f"{number}: undisturbed, and {should.kind}: {should.detail}")
            elif was.kind == "broken" and cell.may_break_streams and ask.stream:
                result.broken_streams += 1
            elif was.kind != "answered":
                result.failed += 1
                result.details.append(f"{number}: {was.kind}: {was.detail}")
            elif was.said != should.said:
                result.different += 1
                result.details.append(f"{number}: another answer")
