"""guidellm: one complete run of streamed chat requests, none of which fails."""

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
    rows, out = Path(directory, "rows.jsonl"), Path(directory, "out.json")
    rows.write_text("".join(json.dumps({"prompt": f"hello {n}"}) + "\n" for n in range(8)), encoding="utf-8")
    where = f"target={os.environ['KVMESH_URL']},model=script,api_key={os.environ['KVMESH_KEY']}"
    where += ",validate_backend=false"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,{where}", "--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", "kind=max_requests,count=8", "--data", f"kind=json_file,path={rows}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={directory}/tokenizer"]
    command += ["--output", f"kind=json,path={out}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [run] = json.loads(out.read_text(encoding="utf-8"))["benchmarks"]
    totals = run["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (8, 0), totals
