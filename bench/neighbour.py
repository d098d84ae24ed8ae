"""One worker of `bench neighbours`: `python -m bench.neighbour WORDS`, WORDS a JSON object.

Loads a model, says `ready`, reads the moment to begin from standard input, works for some seconds as a decode
worker (steps of one token for 8 sequences) or a prefill worker (chunks of 64 tokens), and says what it did.
"""

import json
import mmap
import os
import sys
import time
from typing import Any

CHUNK = 64
SEQUENCES = 8
CONTEXT = 512


def main(words: dict[str, Any]) -> None:
    os.sched_setaffinity(0, words["cpus"])
    os.nice(words["nice"])
    import engine
    from engine import Slice

    model = engine.load(words["model"], threads=words["threads"], kv_dtype=words["kv_dtype"], executor="cpu")
    layout = model.info.layout
    each = layout.pages_for(CONTEXT)
    arena = mmap.mmap(-1, SEQUENCES * each * layout.page_bytes)
    model.bind(arena, SEQUENCES * each, layout.page_bytes)
    tables = [range(i * each, (i + 1) * each) for i in range(SEQUENCES)]

    def step(number: int) -> int:
        if words["role"] == "prefill":
            start = number * CHUNK % CONTEXT
            model.step([Slice([7] * CHUNK, start, tables[0], 0)])
            return CHUNK
        at = number % CONTEXT
        model.step([Slice([7], at, table, 1) for table in tables])
        return SEQUENCES

    step(0)
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    time.sleep(max(0.0, begin - time.time()))
    tokens, number = 0, 0
    cpu, wall = time.process_time(), time.perf_counter()
    while time.perf_counter() - wall < words["seconds"]:
        tokens += step(number)
        number += 1
    cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
    row = {"tok_s": tokens / wall_s, "cpu_s": cpu_s, "wall_s": wall_s, "tok_cpu_s": tokens / cpu_s}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
