"""What a loaded model says of itself, from its program: the same for every executor that runs programs.

Knows nothing of executors.
"""

from engine.executor import EngineInfo
from engine.paging import PageGeometry
from engine.program import Program
from engine.weights.source import ModelSource


def describe(
    model: ModelSource,
    program: Program,
    layout: PageGeometry,
    *,
    kv_dtype: str,
    context_length: int,
    numerics_id: str,
    weights_digest: bytes,
    weights_bytes: int,
) -> EngineInfo:
    """`context_length` in tokens; `weights_bytes` are those that the executor holds."""
    return EngineInfo(
        name=model.name,
        architecture=model.architecture,
        vocab_size=program.vocab_size,
        context_length=context_length,
        hidden_size=program.hidden_size,
        layers=len(program.caches),
        layout=layout,
        kv_dtype=kv_dtype,
        rope=program.rope,
        weights_digest=weights_digest,
        numerics_id=numerics_id,
        weights_bytes=weights_bytes,
    )
