"""llm: the command-line tool with a model of its `extra-openai-models.yaml`, whole and streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as home:
    Path(home, "extra-openai-models.yaml").write_text(
        f"- model_id: mesh\n  model_name: script\n  api_base: {os.environ['KVMESH_URL']}/v1\n  api_key_name: mesh\n",
        encoding="utf-8",
    )
    Path(home, "keys.json").write_text(json.dumps({"mesh": os.environ["KVMESH_KEY"]}), encoding="utf-8")
    environment = {**os.environ, "LLM_USER_PATH": home}
    for extra in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "mesh", "hello there", "--no-log", *extra]
        said = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        assert said.returncode == 0, said.stderr
        assert said.stdout.strip() == "hello there", said.stdout
