"""Cutting a number of rows into pieces of verified sizes.

A matrix product may take another path for another number of rows, and so round differently. Only sizes that
were seen to give the same bits as `BASE_ROWS` are used; what is left over is padded.
"""

from functools import lru_cache

BASE_ROWS = 16
"""The size that every model can use and that defines the bits."""
CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128)


@lru_cache(maxsize=4096)
def pieces(rows: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """(rows taken, size of the piece) until all `rows` are taken; a larger piece is padded.

    `sizes` ascend. Padding by up to a third beats another call.
    """
    found: list[tuple[int, int]] = []
    while rows > 0:
        above = next((size for size in sizes if size >= rows), None)
        below = next((size for size in reversed(sizes) if size <= rows), None)
        if above is not None and (below is None or 3 * above <= 4 * rows):
            found.append((rows, above))
            break
        assert below is not None
        found.append((below, below))
        rows -= below
    return tuple(found)
