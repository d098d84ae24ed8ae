"""Public clients that nobody here wrote, each by one small real program against a running mesh."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import HERE, PROGRAMS, node_modules, python_of
from tests.e2e.harness import Mesh

pytestmark = [pytest.mark.slow, pytest.mark.mesh]
LIMIT_S = 600

# Programs and the environments that they run in.
PYTHON = [
    ("pydantic_ai_program.py", "agents"),
    ("instructor_program.py", "agents"),
    ("llm_program.py", "agents"),
    ("litellm_program.py", "litellm"),
    ("lm_eval_program.py", "lmeval"),
    ("aiperf_program.py", "aiperf"),
]

# Of LangChain's tests those that need a model with more sense than 135M parameters have: to call a tool without
# being made to, or to come to an end in a string that is free. `docs/openai-clients.md` says which of it each is.
BEYOND_THE_MODEL = {
    "test_agent_loop",
    "test_json_mode",
    "test_structured_output",
    "test_structured_output_async",
    "test_structured_output_optional_param",
    "test_structured_output_pydantic_2_v1",
    "test_tool_calling_with_no_arguments",
    "test_unicode_tool_call_integration",
}


def run(mesh: Mesh, command: list[str], at: Path = PROGRAMS) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVMESH_URL": mesh.url, "KVMESH_KEY": mesh.key}
    # The project's own modules are not the client's.
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.mark.parametrize(("program", "environment"), PYTHON)
def test_python(mesh: Mesh, program: str, environment: str) -> None:
    done = run(mesh, [str(python_of(environment)), program])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("program", ["openai_program.mjs", "ai_sdk_program.mjs"])
def test_node(mesh: Mesh, program: str) -> None:
    installed = node_modules()
    # Node looks for modules beside the file.
    (installed / program).write_text((HERE / "node" / program).read_text(encoding="utf-8"), encoding="utf-8")
    done = run(mesh, ["node", program], installed)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_langchain(mesh: Mesh) -> None:
    options = ["--noconftest", "--rootdir", ".", "-c", os.devnull, "-q", "-p", "no:cacheprovider", "-rf"]
    options += ["--tb=line", "-o", "asyncio_mode=auto"]
    for scope in ("test", "fixture"):
        # Its HTTP client is one for all tests, and so must their event loop be.
        options += ["-o", f"asyncio_default_{scope}_loop_scope=session"]
    done = run(mesh, [str(python_of("langchain")), "-m", "pytest", *options, "langchain_suite.py"])
    failed = set(re.findall(r"^FAILED \S+::(\w+)", done.stdout, re.MULTILINE))
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-3000:] + done.stderr[-3000:]
    assert failed <= BEYOND_THE_MODEL, done.stdout[-6000:]


def test_schemathesis(mesh: Mesh) -> None:
    checks = "not_a_server_error,response_schema_conformance,content_type_conformance"
    command = [str(python_of("schemathesis").with_name("schemathesis")), "run", f"{mesh.url}/openapi.json"]
    command += ["--header", f"Authorization: Bearer {mesh.key}", "--max-examples", "15", "--checks", checks]
    command += ["--phases", "examples,fuzzing", "--request-timeout", "60", "--suppress-health-check", "all"]
    done = run(mesh, command)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Tested: 15" in done.stdout
