"""The tests of the Python SDK itself against the edge: what fails is what is refused on purpose, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.clients.environments import python_of, source_of
from tests.clients.sdk_refused import REFUSED, STRICT_ONLY, table
from tests.e2e.harness import ROOT, Mesh

VERSION = "3.57.0"
SHA256 = "5a0a89d6a542efc85e2a8cec701ca9265b795d578c777828e10fafdf80e333b6"
FILES = (
    "chat/test_completions.py",
    "test_completions.py",
    "test_responses.py",
    "responses",
    "test_embeddings.py",
    "test_models.py",
)
# Sync and async clients, lax and strict parsing, and aiohttp.
CLIENTS = 5
PLUGIN = """
import os, sys

def pytest_sessionstart():
    sys.modules["tests.conftest"].api_key = os.environ["TEST_API_KEY"]
"""


def test_the_page_lists_what_is_refused() -> None:
    page = (ROOT / "docs" / "openai-clients.md").read_text(encoding="utf-8")
    assert table() in page


@pytest.mark.slow
@pytest.mark.mesh
def test_what_fails_is_what_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    python, source = python_of("sdk"), source_of("openai", VERSION, SHA256)
    (tmp_path / "use_key.py").write_text(PLUGIN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TEST_API_KEY": mesh.key}
    environment["TEST_API_BASE_URL"] = f"{mesh.url}/v1"
    options = ["-n0", "-p", "use_key", "-p", "no:cacheprovider", "--tb=line", "-q", "-rfE"]
    done = subprocess.run(
        [str(python), "-m", "pytest", *options, *(f"tests/api_resources/{name}" for name in FILES)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    found = Counter(
        f"{path}::{test}"
        for path, test in re.findall(
            r"^FAILED tests/api_resources/(\S+?)::\w+::(\w+)", done.stdout, re.MULTILINE
        )
    )
    expected = dict.fromkeys(REFUSED, CLIENTS) | dict.fromkeys(STRICT_ONLY, 3)
    assert dict(found) == expected, done.stdout[-3000:] + done.stderr[-2000:]
    assert re.search(r"\b151 passed", done.stdout), done.stdout[-300:]
