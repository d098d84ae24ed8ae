"""A worker as a process of its own: attaches, holds things, says so, and waits to be killed.

`python -m tests.kvstore.worker_process ADDRESS KEY CERT CA NAME CAPABILITY`
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from mesh.config import IdentityFiles
from mesh.identity import ServiceIdentity
from mesh.kv.client import KvClient
from mesh.rpc import open_channel
from tests.kvstore.node import FINGERPRINT, LAYOUT, MODEL, items, prompt


async def main(address: str, files: IdentityFiles, name: str, capability: str) -> None:
    channel = open_channel(address, ServiceIdentity.load(files), callee_role="kvstore", tls=False)
    kv = await KvClient.attach(channel, worker=name, model=MODEL, fingerprint=FINGERPRINT, layout=LAYOUT)
    root, ids = prompt(4)
    await kv.reserve("r/0", capability, ids, root, 1)
    drawn = await kv.draw("r/0", 1, capability)
    committed = await kv.commit("r/0", items(root, ids, drawn.writable[:2]), 1)
    await kv.grow(2)
    print(json.dumps({"epoch": kv.epoch, "pages": [p.index for p in committed]}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    where, key, cert, ca, who, token = sys.argv[1:]
    asyncio.run(main(where, IdentityFiles(Path(key), Path(cert), Path(ca)), who, token))
