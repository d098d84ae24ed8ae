"""`kvmesh models`: list, add, remove. While the mesh runs this starts and stops workers;
in any case it is written down for the next `kvmesh up`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mesh.cli.failure import Failure
from mesh.cli.running import request, status_of
from mesh.cli.style import table
from mesh.supervisor.options import DEFAULT_MODELS, OptionsError, parse_model, stored_models
from mesh.supervisor.state import StateDir, StateError, create_state, existing_state, is_held, write_private


def run(arguments: argparse.Namespace) -> int:
    try:
        if arguments.action == "add":
            return _add(arguments)
        return _remove(arguments) if arguments.action == "remove" else _list(arguments)
    except OptionsError as error:
        raise Failure(str(error), status=2) from None


def _list(arguments: argparse.Namespace) -> int:
    state = _running(arguments.state)
    if state is None:
        found: list[dict[str, Any]] = [
            {"name": n, "source": s, "workers": {}} for n, s in _stored(arguments.state).items()
        ]
    else:
        status = status_of(state)
        found = [
            {"name": name, "source": source, "workers": _workers(status, name)}
            for name, source in status["models"].items()
        ]
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    rows = [(m["name"], m["source"], _state(m["workers"]) if state else "not running") for m in found]
    print(table(rows, ("NAME", "SOURCE", "WORKERS")))
    return 0


def _add(arguments: argparse.Namespace) -> int:
    name, source = parse_model(arguments.model)
    state = _running(arguments.state)
    if state is None:
        _store(arguments.state, {**_stored(arguments.state), name: source})
        print(f"{name} will be served by the next 'kvmesh up'")
        return 0
    request(state, "model_add", _show, name=name, source=source)
    _catalogue(arguments.state, name, source, granted=not arguments.no_grant)
    _store(arguments.state, {**status_of(state)["models"], name: source})
    print(f"{name} is served")
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    state = _running(arguments.state)
    served = _stored(arguments.state) if state is None else dict(status_of(state)["models"])
    if name not in served:
        raise Failure(f"no model {name!r}; there are: {', '.join(served) or 'none'}")
    if state is not None:
        # First out of the catalogue: no new requests, then the workers end.
        _drop(arguments.state, name)
        request(state, "model_remove", name=name)
    del served[name]
    _store(arguments.state, served)
    print(f"{name} is not served any more")
    return 0


def _catalogue(root: Path, name: str, source: str, *, granted: bool) -> None:
    from kvmesh.v1 import iam_pb2, iam_pb2_grpc

    from mesh.cli.iam import CALL_TIMEOUT_S, as_operator

    async def put(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        model = iam_pb2.CatalogueModel(name=name, source=source)
        await admin.PutModel(iam_pb2.PutModelRequest(model=model), timeout=CALL_TIMEOUT_S)
        if granted:
            grant = iam_pb2.Grant(organisation="dev", model=name, effect=iam_pb2.GRANT_EFFECT_ALLOW)
            await admin.PutGrant(iam_pb2.PutGrantRequest(grant=grant), timeout=CALL_TIMEOUT_S)

    as_operator(root, put)


def _drop(root: Path, name: str) -> None:
    from kvmesh.v1 import iam_pb2, iam_pb2_grpc

    from mesh.cli.iam import CALL_TIMEOUT_S, as_operator

    async def remove(admin: iam_pb2_grpc.AdminAsyncStub) -> None:
        await admin.RemoveModel(iam_pb2.RemoveModelRequest(name=name), timeout=CALL_TIMEOUT_S)

    as_operator(root, remove)


def _running(root: Path) -> StateDir | None:
    try:
        state = existing_state(root)
    except StateError:
        return None
    return state if is_held(state) else None


def _stored(root: Path) -> dict[str, str]:
    stored = stored_models(root / "models.json")
    return dict(DEFAULT_MODELS) if stored is None else stored


def _store(root: Path, models: Mapping[str, str]) -> None:
    try:
        state = create_state(root)
    except StateError as error:
        raise Failure(str(error)) from None
    write_private(state.models, json.dumps(models, indent=1) + "\n")


def _workers(status: Mapping[str, Any], model: str) -> dict[str, bool]:
    return {p["name"]: p["ready"] for p in status["processes"] if p["model"] == model}


def _state(workers: Mapping[str, bool]) -> str:
    return ", ".join(name if ready else f"{name} (not ready)" for name, ready in workers.items())


def _show(message: Mapping[str, Any]) -> None:
    if message.get("event") == "note":
        print(f"  · {message['text']}", flush=True)
