"""The first start: an organisation, a development key in a file, the catalogue.

Run at every start and changing only what is missing: an operator's later decisions
(a removed grant, a suspended organisation) are left alone.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import logging
import os
import time
from pathlib import Path

from iam_authz.api_key import parse_key
from iam_authz.directory import Directory
from iam_authz.names import ANY_MODEL
from iam_authz.options import Bootstrap
from iam_authz.pepper import Pepper
from iam_authz.records import CatalogueModel, Effect, Grant
from iam_authz.registry import Registry
from mesh.files import write_atomically

log = logging.getLogger(__name__)

ACTOR = "bootstrap"
KEY_NAME = "development"


async def bootstrap(
    wanted: Bootstrap, registry: Registry, directory: Directory, pepper: Pepper, lock_file: Path
) -> None:
    """Makes what `wanted` names. Raises MeshError for names that cannot be, OSError for the files."""
    handle = os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        # Two IAM processes may start at once; one of them does it.
        await asyncio.to_thread(fcntl.flock, handle, fcntl.LOCK_EX)
        await directory.refresh()
        await _organisation(wanted, registry, directory)
        known = {model.name: model for model in directory.snapshot.models}
        for model in wanted.models:
            if model.name not in known or known[model.name].source != model.source:
                await registry.put_model(CatalogueModel(model.name, model.source, 0, ""), actor=ACTOR)
        await _key(wanted, registry, directory, pepper)
    finally:
        os.close(handle)


async def _organisation(wanted: Bootstrap, registry: Registry, directory: Directory) -> None:
    if directory.organisation(wanted.organisation) is None:
        await registry.put_organisation(wanted.organisation, suspended=False, actor=ACTOR)
        await registry.put_grant(Grant(wanted.organisation, ANY_MODEL, Effect.ALLOW), actor=ACTOR)


async def _key(wanted: Bootstrap, registry: Registry, directory: Directory, pepper: Pepper) -> None:
    path = wanted.dev_key_file
    text = await asyncio.to_thread(_read, path)
    if _valid(text, wanted.organisation, directory, pepper):
        return
    key, secret = await registry.create_key(
        wanted.organisation, KEY_NAME, expires_in_s=None, models=[], actor=ACTOR
    )
    await asyncio.to_thread(write_atomically, path, secret.text.encode("ascii") + b"\n")
    log.info("development key written", extra={"key": key.id, "file": str(path)})


def _read(path: Path) -> str:
    try:
        path.chmod(0o600)
        return path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return ""


def _valid(text: str, organisation: str, directory: Directory, pepper: Pepper) -> bool:
    parsed = parse_key(text)
    key = None if parsed is None else directory.key(parsed.id)
    return (
        key is not None
        and key.organisation == organisation
        and key.active(time.time())
        and hmac.compare_digest(key.digest, pepper.key_digest(text.encode("ascii")))
    )
