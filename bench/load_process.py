"""A load in a process of its own, so that its CPU time is its own: a job on stdin, its result on stdout.

Knows nothing of what a load does.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.command import BenchError
from bench.mesh import ROOT, environment


def run_load(module: str, job: Any) -> dict[str, Any]:
    """The fields of the result that `python -m module` makes of a job (a dataclass). Raises BenchError."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=False,
    )
    if done.returncode:
        raise BenchError(f"the load failed: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def serve_load(load: Callable[..., Any], job: Callable[..., Any]) -> None:
    """The other end: does the job that stands on stdin."""
    # A client has one file; the default of 1,024 is not many.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    json.dump(asdict(load(job(**json.load(sys.stdin)))), sys.stdout)
