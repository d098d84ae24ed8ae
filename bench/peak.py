"""What the machine can do at most: measured in the same run as what is compared with it.

Knows nothing of models.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from kernels.cpu import Core

ROUNDS = 400_000
REPEATS = 7


def int8_gop_s(core: Core, isa: str, threads: int) -> float | None:
    """10⁹ integer operations per second in registers, all threads together; None if nothing measures it."""
    if core.run_peak_int8(isa, 1000) == 0:
        return None
    operations = core.run_peak_int8(isa, ROUNDS) * threads
    return operations / _best(threads, lambda _: core.run_peak_int8(isa, ROUNDS)) / 1e9


def read_gb_s(core: Core, nbytes: int, threads: int) -> float:
    """10⁹ bytes per second when `nbytes` are read again and again, each thread its own part of them."""
    part = max(nbytes // threads, 1 << 16)
    memory = [np.ones(part, np.uint8) for _ in range(threads)]
    # Small sets several times over: a reading must last longer than starting it.
    turns = max(1, (1 << 24) // part)

    def read(thread: int) -> None:
        for _ in range(turns):
            core.read_all(memory[thread])

    return part * turns * threads / _best(threads, read) / 1e9


def _best(threads: int, job: Callable[[int], object]) -> float:
    """Seconds of the best of some runs, in which all threads do the job once."""
    found = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(REPEATS):
            start = time.perf_counter()
            list(pool.map(job, range(threads)))
            found.append(time.perf_counter() - start)
    return min(found)
