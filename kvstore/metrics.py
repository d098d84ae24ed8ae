"""The store's metrics, read from the books when somebody asks: they cost nothing otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvstore.invariants import violations
from kvstore.store import Store
from kvstore.table import PageState
from mesh.blocks import PAGE_TOKENS

# The invariants are checked for at most one part in so many of the time.
CHECK_SHARE = 50


class StoreMetrics(Collector):
    """Register it once per process."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._broken: dict[str, int] = {}
        self._check_after = 0.0

    def collect(self) -> Iterator[Metric]:
        """All families, one sample per arena (and state)."""
        pages = GaugeMetricFamily("kvmesh_kv_pages", "KV pages by state.", labels=["model", "state"])
        usage = GaugeMetricFamily(
            "kvmesh_kv_cache_usage_ratio", "Pages that are neither free nor merely cached.", labels=["model"]
        )
        leases = GaugeMetricFamily("kvmesh_kv_leases", "Leases of workers.", labels=["model"])
        evictions = CounterMetricFamily(
            "kvmesh_kv_evictions", "Blocks evicted to make room.", labels=["model"]
        )
        queries = CounterMetricFamily(
            "kvmesh_prefix_cache_queries", "Prompt tokens in blocks that were asked for.", labels=["model"]
        )
        hits = CounterMetricFamily(
            "kvmesh_prefix_cache_hits", "Prompt tokens in blocks that were cached.", labels=["model"]
        )
        moved = CounterMetricFamily(
            "kvmesh_kv_moved_blocks",
            "Blocks that came from and went to other nodes.",
            labels=["model", "way"],
        )
        for key, arena in self._store.arenas.items():
            moved.add_metric([key.model, "pulled"], arena.pulled_blocks)
            moved.add_metric([key.model, "sent"], arena.sent_blocks)
            pool = arena.pool
            counts = pool.counts()
            for state, n in counts.items():
                pages.add_metric([key.model, state.name.lower()], n)
            used = sum(counts.values()) - counts[PageState.FREE] - counts[PageState.CACHED]
            usage.add_metric([key.model], used / arena.files.pages)
            leases.add_metric([key.model], pool.leases())
            evictions.add_metric([key.model], pool.table.evicted)
            queries.add_metric([key.model], (pool.hit_blocks + pool.missed_blocks) * PAGE_TOKENS)
            hits.add_metric([key.model], pool.hit_blocks * PAGE_TOKENS)
        yield from (pages, usage, leases, evictions, queries, hits, moved, self._invariants())
        yield from self._disk()

    def _disk(self) -> Iterator[Metric]:
        """Nothing where evicted blocks are not kept."""
        disk = self._store.tiers.disk
        if disk is None:
            return
        size = GaugeMetricFamily(
            "kvmesh_kv_disk_bytes", "Evicted blocks on disk, and what they may take.", labels=["kind"]
        )
        size.add_metric(["used"], disk.books.bytes)
        size.add_metric(["limit"], disk.books.limit_bytes)
        blocks = CounterMetricFamily(
            "kvmesh_kv_disk_blocks",
            "Blocks written to disk, given back to memory, found damaged, and refused by the disk.",
            labels=["what"],
        )
        for what in ("written", "loaded", "damaged", "refused"):
            blocks.add_metric([what], getattr(disk, what))
        failing = GaugeMetricFamily("kvmesh_kv_disk_failing", "1 while the disk takes no blocks.")
        failing.add_metric([], float(bool(disk.trouble)))
        yield from (size, blocks, failing)

    def _invariants(self) -> Metric:
        """Reads every page, so it is done again only after a pause that is long beside the work."""
        began = self._clock()
        if began >= self._check_after:
            self._broken = {}
            for key, arena in self._store.arenas.items():
                self._broken[key.model] = self._broken.get(key.model, 0) + len(violations(arena.pool))
            self._check_after = began + CHECK_SHARE * (self._clock() - began)
        broken = GaugeMetricFamily(
            "kvmesh_kv_invariant_violations",
            "Rules of the page pool that do not hold: one owner per page, leased = live, states add up.",
            labels=["model"],
        )
        for model, count in self._broken.items():
            broken.add_metric([model], count)
        return broken
