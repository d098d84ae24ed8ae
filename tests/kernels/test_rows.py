from hypothesis import given
from hypothesis import strategies as st

from kernels.reference.rows import pieces

sizes = st.sets(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]), min_size=1).map(lambda s: tuple(sorted(s)))


@given(st.integers(0, 1000), sizes)
def test_every_row_is_taken_once_in_pieces_of_the_given_sizes(rows: int, allowed: tuple[int, ...]) -> None:
    found = pieces(rows, allowed)
    assert sum(taken for taken, _ in found) == rows
    assert all(size in allowed and 0 < taken <= size for taken, size in found)


@given(st.integers(1, 1000), sizes)
def test_only_the_last_piece_is_padded(rows: int, allowed: tuple[int, ...]) -> None:
    assert all(taken == size for taken, size in pieces(rows, allowed)[:-1])


def test_a_little_padding_is_better_than_another_call() -> None:
    assert pieces(13, (4, 8, 16)) == ((13, 16),)
    assert pieces(9, (4, 8, 16)) == ((8, 8), (1, 4))
