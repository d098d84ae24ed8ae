"""What `kvmesh up` shows: a line per process, then how to use the mesh."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from mesh.cli.style import paint, readable
from mesh.supervisor.options import MeshOptions


class Progress:
    """Prints events. `stays`: the mesh runs in this terminal until Ctrl-C."""

    def __init__(self, options: MeshOptions, *, stays: bool = False) -> None:
        self._options = options
        self._stays = stays
        self._began = time.monotonic()
        self._serving = False
        self.failed = False

    def __call__(self, event: Mapping[str, Any]) -> None:
        show = getattr(self, f"_{event['event']}", None)
        if show is None:
            return
        try:
            show(event)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read this has seen enough; the mesh goes on.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _note(self, event: Mapping[str, Any]) -> None:
        print(f"  {paint('·', 'dim')} {event['text']}")

    def _process(self, event: Mapping[str, Any]) -> None:
        name, state = event["name"], event["state"]
        if state == "ready":
            print(f"  {paint('✓', 'green')} {name:<28} ready  {event['seconds']:5.1f} s")
        elif state == "backoff":
            print(f"  {paint('✗', 'red')} {name:<28} {event['reason']}; starting it again")

    def _ready(self, event: Mapping[str, Any]) -> None:
        print(f"\n{paint('kvmesh is ready', 'bold')} after {time.monotonic() - self._began:.1f} s")
        print(usage(self._options))
        self._serving = True
        if self._stays:
            print(paint("\nCtrl-C drains and stops it.", "dim"))

    def _failed(self, event: Mapping[str, Any]) -> None:
        self.failed = True
        sys.stdout.flush()
        if event.get("log"):
            print(f"\nThe last lines of {event['process']}:", file=sys.stderr)
            for line in event["log"]:
                print(f"  | {readable(line)}", file=sys.stderr)
        print(f"kvmesh: {event['reason']}", file=sys.stderr)

    def _stopping(self, event: Mapping[str, Any]) -> None:
        if self._serving:
            print("\nDraining; Ctrl-C again stops at once.")

    def _stopped(self, event: Mapping[str, Any]) -> None:
        if self._serving:
            print("Stopped.")


def usage(options: MeshOptions) -> str:
    """Where the mesh is, its key, and two first requests that can be pasted."""
    state = options.state.absolute()
    key_file = state / "dev-key"
    if not options.edge:
        return f"  no edge was asked for; 'kvmesh status' shows the routers' addresses\n  key    {key_file}"
    key = key_file.read_text(encoding="ascii").strip() if key_file.exists() else "(no key was made)"
    model = next(iter(options.models))
    ca = state / "ca" / "ca.pem"
    own_ca = options.tls and options.cert is None
    curl_ca = f" --cacert {ca}" if own_ca else ""
    python_ca = f', http_client=httpx.Client(verify="{ca}")' if own_ca else ""
    imports = "import httpx\n" if own_ca else ""
    return f"""
  edge   {options.url}/v1
  key    {key}    (in {key_file})

{paint("# curl", "dim")}
curl{curl_ca} {options.url}/v1/chat/completions \\
  -H "Authorization: Bearer $(cat {key_file})" -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "temperature": 0,
       "messages": [{{"role": "user", "content": "Name the capital of France."}}]}}'

{paint("# Python (pip install openai)", "dim")}
{imports}from openai import OpenAI
client = OpenAI(base_url="{options.url}/v1", api_key=open("{key_file}").read().strip(){python_ca})
for chunk in client.chat.completions.create(model="{model}", temperature=0, stream=True,
        messages=[{{"role": "user", "content": "Name the capital of France."}}]):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)"""
