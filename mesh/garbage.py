"""What the cycle collector does in a service: little.

Modules, models and whatever else is there once a service is ready lives as long as the process; looking
through it again and again took a tenth of a router's time. It is set aside once, and collections come
rarely enough to be a matter of leaks, not of every few requests. Knows nothing of services.
"""

import gc

YOUNG_OBJECTS = 20_000
"""Allocated and not freed since the last look; a request in work has a few hundred."""


def set_aside() -> None:
    """What is alive now is never looked through again. Call it when everything has been built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 10)
