"""aiperf: one complete streamed run, none of whose requests fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from byte_tokenizer import byte_tokenizer

with tempfile.TemporaryDirectory() as directory:
    byte_tokenizer(f"{directory}/tokenizer")
    rows = Path(directory, "rows.jsonl")
    rows.write_text("".join(json.dumps({"text": f"hello {n}"}) + "\n" for n in range(8)), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", "script", "--ui", "none"]
    command += ["--url", os.environ["KVMESH_URL"], "--api-key", os.environ["KVMESH_KEY"], "--streaming"]
    command += ["--endpoint-type", "chat", "--input-file", str(rows), "--custom-dataset-type", "single_turn"]
    command += [
        "--tokenizer",
        f"{directory}/tokenizer",
        "--use-server-token-count",
        "--concurrency",
        "2",
        "--request-count",
        "8",
    ]
    command += ["--artifact-dir", directory, "--workers-max", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [found] = Path(directory).glob("**/profile_export_aiperf.json")
    told = json.loads(found.read_text(encoding="utf-8"))
    assert told["request_count"]["avg"] == 8, told
    assert not told.get("error_summary"), told["error_summary"]
