"""Generates the Python code of the wire contract, beside the .proto files.

`python protos/generate.py [OUT]` writes `*_pb2.py`, `*_pb2_grpc.py` and their `.pyi`
under OUT (default: this folder). The result is committed; a test runs this into an
empty folder and compares.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent


def generate(out: Path) -> None:
    """Writes the generated modules below `out`; raises RuntimeError if protoc fails."""
    sources = sorted(str(p.relative_to(HERE)) for p in HERE.rglob("*.proto"))
    well_known = resources.files("grpc_tools") / "_proto"
    bin_dir = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={HERE}",
            f"--proto_path={well_known}",
            f"--plugin=protoc-gen-mypy={bin_dir / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={bin_dir / 'protoc-gen-mypy_grpc'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE)
