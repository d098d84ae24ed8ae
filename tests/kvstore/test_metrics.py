"""The store's metrics say what its books say."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvstore.metrics import StoreMetrics
from tests.kvstore.node import Node, compute, prompt


async def test_states_usage_and_prefix_hits(node: Node) -> None:
    registry = CollectorRegistry()
    registry.register(StoreMetrics(node.store))
    kv = await node.worker("d0")
    root, ids = prompt(4)
    await kv.reserve("a", node.capability("a", ids), ids, root, 4)
    await compute(node, kv, "a", root, ids)
    await kv.release("a")
    await kv.reserve("b", node.capability("b", ids), ids, root, 0)
    text = generate_latest(registry).decode()
    for line in (
        'kvmesh_kv_pages{model="tiny",state="leased"} 4.0',
        'kvmesh_kv_pages{model="tiny",state="granted"} 4.0',
        'kvmesh_kv_pages{model="tiny",state="free"} 24.0',
        'kvmesh_kv_cache_usage_ratio{model="tiny"} 0.25',
        'kvmesh_prefix_cache_queries_total{model="tiny"} 128.0',
        'kvmesh_prefix_cache_hits_total{model="tiny"} 64.0',
        'kvmesh_kv_evictions_total{model="tiny"} 0.0',
        'kvmesh_kv_leases{model="tiny"} 1.0',
    ):
        assert line in text.splitlines(), text
