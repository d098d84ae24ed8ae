"""text/ is light: services that only handle text must not pay for the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_no_torch_grpc_or_numpy() -> None:
    code = (
        "import sys, text, text.gguf; print({'torch', 'grpc', 'numpy', 'engine', 'mesh'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "set()"
