"""lm-eval: a local task of each kind, by log-probabilities of the prompt and by generated texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from byte_tokenizer import byte_tokenizer

URL = os.environ["KVMESH_URL"] + "/v1"
ROWS = [{"question": f"{n} and {n} is", "answer": str(2 * n), "wrong": str(2 * n + 1)} for n in range(4)]
CHOICES = """
task: kvmesh_choices
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{[answer, wrong]}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
SAID = """
task: kvmesh_said
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{question}}"
generation_kwargs: {until: ["STOP"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""


def run(directory: str, model: str, task: str, arguments: str, *extra: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        model,
        "--tasks",
        task,
        "--include_path",
        directory,
    ]
    command += ["--model_args", arguments, "--output_path", f"{directory}/out-{task}", *extra]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    [found] = Path(directory).glob(f"out-{task}/**/results*.json")
    results: dict[str, float] = json.loads(found.read_text(encoding="utf-8"))["results"][task]
    return results


os.environ["OPENAI_API_KEY"] = os.environ["KVMESH_KEY"]
os.environ["HF_HUB_OFFLINE"] = "1"
with tempfile.TemporaryDirectory() as directory:
    rows = Path(directory, "rows.jsonl")
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    for name, text in (("choices", CHOICES), ("said", SAID)):
        Path(directory, f"{name}.yaml").write_text(text.replace("ROWS", str(rows)), encoding="utf-8")
    # The client counts what of a prompt's scores it wants.
    byte_tokenizer(f"{directory}/tokenizer")
    where = f"base_url={URL}/completions,max_length=2048,tokenized_requests=False"
    where += f",tokenizer_backend=huggingface,tokenizer={directory}/tokenizer"
    scored = run(directory, "local-completions", "kvmesh_choices", f"model=tiny,{where}")
    assert 0 <= scored["acc,none"] <= 1
    # The scripted model says what it is asked.
    chat = f"model=script,base_url={URL}/chat/completions"
    said = run(directory, "local-chat-completions", "kvmesh_said", chat, "--apply_chat_template")
    assert said["exact_match,none"] == 1, said
