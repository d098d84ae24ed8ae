"""`kvmesh chat`: one question, or a conversation, with a model of the running mesh.

Streams. Ctrl-C cancels the answer that is being given and keeps the conversation;
Ctrl-D or an empty Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from mesh.cli.failure import NOT_RUNNING, Failure
from mesh.cli.running import running_state, status_of
from mesh.cli.style import paint
from mesh.supervisor.state import StateDir

_HELP = "/new begins anew, /model NAME changes the model, /exit or Ctrl-D ends; Ctrl-C cancels an answer"
# A model may think long about its first token; a connection that cannot be made is told at once.
_TIMEOUT = httpx.Timeout(None, connect=10.0)


def run(arguments: argparse.Namespace) -> int:
    state = running_state(arguments.state)
    status = status_of(state)
    if not status["edge_url"]:
        raise Failure("this mesh runs with --no-edge: there is nothing to talk to", status=NOT_RUNNING)
    headers = {"authorization": f"Bearer {state.dev_key.read_text(encoding='ascii').strip()}"}
    model = arguments.model or next(iter(status["models"]), "")
    with httpx.Client(
        base_url=status["edge_url"], headers=headers, timeout=_TIMEOUT, verify=trust(state)
    ) as client:
        conversation = Conversation(client, model, arguments)
        if arguments.prompt:
            return conversation.once(" ".join(arguments.prompt))
        if not sys.stdin.isatty():
            return conversation.once(sys.stdin.read())
        return conversation.interactive()


class Conversation:
    """What was said so far, and with whom."""

    def __init__(self, client: httpx.Client, model: str, arguments: argparse.Namespace) -> None:
        self._client = client
        self._model = model
        self._sampling = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
        self._opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
        self._messages: list[dict[str, str]] = list(self._opening)

    def once(self, prompt: str) -> int:
        """One question; the exit code."""
        self._say(prompt)
        return 0

    def interactive(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing and history for input())
        print(paint(f"{self._model}   {_HELP}", "dim"))
        while True:
            try:
                line = input(paint("\n> ", "cyan")).strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line in ("/exit", "/quit"):
                return 0
            if line:
                self._command_or_question(line)

    def _command_or_question(self, line: str) -> None:
        if line == "/new":
            self._messages = list(self._opening)
        elif line.startswith("/model "):
            self._model = line.removeprefix("/model ").strip()
        elif line in ("/help", "/?"):
            print(paint(_HELP, "dim"))
        else:
            try:
                self._say(line)
            except Failure as failure:
                print(paint(str(failure), "red"))

    def _say(self, text: str) -> None:
        """Asks and shows the answer; a cancelled one is kept as far as it came."""
        self._messages.append({"role": "user", "content": text})
        answer = ""
        try:
            for piece in self._stream():
                answer += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            print(paint(" [cancelled]", "yellow"), end="")
        except Failure:
            self._messages.pop()
            raise
        print()
        self._messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> Iterator[str]:
        body: dict[str, Any] = {"model": self._model, "messages": self._messages, "stream": True}
        body.update({name: value for name, value in self._sampling.items() if value is not None})
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise Failure(_reason(response))
                for line in response.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield _delta(json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            raise Failure(f"the connection to the mesh broke: {error}") from None


def _delta(event: Mapping[str, Any]) -> str:
    if "error" in event:
        raise Failure(str(event["error"].get("message")))
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")


def _reason(response: httpx.Response) -> str:
    try:
        return f"{response.json()['error']['message']} (HTTP {response.status_code})"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {response.status_code}"


def trust(state: StateDir) -> ssl.SSLContext:
    """The usual authorities and the mesh's own."""
    context = ssl.create_default_context()
    ca = state.ca / "ca.pem"
    if ca.exists():
        context.load_verify_locations(ca)
    return context
