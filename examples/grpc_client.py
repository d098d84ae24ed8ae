"""Streams one generation over gRPC through the edge of a running mesh.

    .venv/bin/python examples/grpc_client.py [PROMPT]

Reads the development key from .kvmesh/dev-key. The edge is 127.0.0.1:8080;
KVMESH_EDGE=HOST:PORT names another one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import grpc
from kvmesh.v1 import inference_pb2 as pb
from kvmesh.v1 import inference_pb2_grpc


def main() -> None:
    prompt = sys.argv[1] if len(sys.argv) > 1 else "The capital of France is"
    key = Path(".kvmesh/dev-key").read_text().strip()
    edge = os.environ.get("KVMESH_EDGE", "127.0.0.1:8080")
    with grpc.insecure_channel(edge) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(model="smollm2", text=prompt)
        request.stop.max_tokens = 16
        for message in stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),)):
            print(message.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
