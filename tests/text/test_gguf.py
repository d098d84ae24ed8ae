"""The GGUF reader: what a file holds, and that no file can do worse than be refused."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.text import gguf_builder as build
from text.gguf import GgmlType, GgufError, GgufFile

Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(raw: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(raw)
        return path

    return write


def sample() -> bytes:
    return build.file(
        [
            build.pair("general.architecture", build.STRING, "llama"),
            build.pair("llama.block_count", build.U32, 2),
            build.pair("negative", 11, -5),
            build.pair("half", 12, 0.5),
            build.pair("yes", build.BOOL, True),
            build.pair("tokens", build.ARRAY, (build.STRING, ["a", "ü", ""])),
            build.pair("flags", build.ARRAY, (build.BOOL, [True, False])),
            build.pair("scores", build.ARRAY, (build.F32, [1.0, -2.0])),
        ],
        [build.tensor("a.weight", [4, 3], GgmlType.F32, 0), build.tensor("b", [32, 2], GgmlType.Q8_0, 64)],
        bytes(range(48)) + bytes(16) + b"\x07" * 68,
    )


@pytest.mark.parametrize("version", [2, 3])
def test_reads_metadata_and_tensors(write: Write, version: int) -> None:
    raw = bytearray(sample())
    raw[4] = version
    with GgufFile.open(write(bytes(raw))) as file:
        assert file.version == version
        assert dict(file.metadata) == {
            "general.architecture": "llama",
            "llama.block_count": 2,
            "negative": -5,
            "half": 0.5,
            "yes": True,
            "tokens": ["a", "ü", ""],
            "flags": [True, False],
            "scores": [1.0, -2.0],
        }
        assert list(file.tensors) == ["a.weight", "b"]
        weight = file.tensors["a.weight"]
        assert (weight.shape, weight.type, weight.nbytes, weight.elements) == ((3, 4), GgmlType.F32, 48, 12)
        assert weight.offset == file.data_offset
        assert weight.offset % 32 == 0
        assert bytes(file.data("a.weight")) == bytes(range(48))
        assert file.tensors["b"].nbytes == 2 * 34
        assert bytes(file.data("b")) == b"\x07" * 68
        assert file.data("b").readonly
        with pytest.raises(GgufError, match="'c'"):
            file.data("c")


def test_views_outlive_the_file(write: Write) -> None:
    file = GgufFile.open(write(sample()))
    view = file.data("b")
    file.close()
    assert view[0] == 7
    with pytest.raises(GgufError, match="closed"):
        file.data("b")


def test_other_alignment(write: Write) -> None:
    raw = build.file(
        [build.pair("general.alignment", build.U32, 128)],
        [build.tensor("t", [2], GgmlType.F16, 128)],
        bytes(128) + b"abcd",
        alignment=128,
    )
    with GgufFile.open(write(raw)) as file:
        assert bytes(file.data("t")) == b"abcd"


@pytest.mark.parametrize("kind", list(GgmlType))
def test_every_type_has_its_size(write: Write, kind: GgmlType) -> None:
    raw = build.file([], [build.tensor("t", [256, 3], kind, 0)], bytes(256 * 3 * 8))
    with GgufFile.open(write(raw)) as file:
        assert len(file.data("t")) == 256 * 3 // kind.block_size * kind.type_size


def test_block_sizes_agree_with_known_rows() -> None:
    # Bytes per 256 weights, from the published bits per weight.
    known = {"Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0, "Q8_0": 8.5, "Q2_K": 2.625, "Q3_K": 3.4375,
             "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "IQ2_XXS": 2.0625,
             "IQ2_XS": 2.3125, "IQ2_S": 2.5625, "IQ3_XXS": 3.0625, "IQ3_S": 3.4375, "IQ1_S": 1.5625,
             "IQ1_M": 1.75, "TQ1_0": 1.6875, "TQ2_0": 2.0625, "MXFP4": 4.25}  # fmt: skip
    for name, bits in known.items():
        kind = GgmlType[name]
        assert 8 * kind.type_size / kind.block_size == bits, name


PAIR = build.pair("k", build.U32, 1)
F32 = GgmlType.F32
HOSTILE = {
    "magic": (build.header(0, 0, magic=b"GGML"), "magic"),
    "version-1": (build.header(0, 0, version=1), "version 1"),
    "version-9": (build.header(0, 0, version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "no-counts": (b"GGUF" + struct.pack("<I", 3), "ends here"),
    "keys-do-not-fit": (build.header(0, 1000) + PAIR, "1000 metadata keys do not fit"),
    "many-keys": (build.header(0, 1 << 63) + PAIR, "metadata keys"),
    "many-tensors": (build.header(1 << 63, 0) + PAIR, "tensors"),
    "long-key": (build.header(0, 1) + struct.pack("<Q", 1 << 62) + bytes(64), "metadata key 0"),
    "cut-key": (build.header(0, 1) + struct.pack("<Q", 60) + bytes(20), "metadata key 0"),
    "empty-key": (build.file([build.pair("", build.U32, 1)]), "empty"),
    "twice": (build.file([PAIR, PAIR]), "'k'.*twice"),
    "key-not-utf8": (
        build.header(0, 1) + build.string(b"\xff\xfe") + struct.pack("<II", 4, 1) + bytes(9),
        "UTF-8",
    ),
    "value-type": (build.file([build.string("k") + struct.pack("<II", 13, 0)]), "'k'.*type 13"),
    "item-type": (build.file([build.string("k") + struct.pack("<IIQ", 9, 99, 0)]), "'k'.*item type 99"),
    "nested-array": (build.file([build.string("k") + struct.pack("<IIQ", 9, 9, 1)]), "arrays of arrays"),
    "bool-2": (build.file([build.string("k") + struct.pack("<IB", 7, 2)]), "truth value"),
    "long-array": (
        build.file([build.string("k") + struct.pack("<IIQ", 9, 4, 1 << 60) + bytes(64)]),
        "'k'.*array items",
    ),
    "array-does-not-fit": (
        build.file([build.string("k") + struct.pack("<IIQ", 9, 12, 100) + bytes(64)]),
        "do not fit",
    ),
    "string-in-array": (
        build.file([build.string("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 40) + bytes(64)]),
        "'k'.*string 0",
    ),
    "string-in-array-not-utf8": (
        build.file([build.pair("k", build.ARRAY, (build.STRING, ["ok", b"\x80"]))]),
        "'k'.*string 1",
    ),
    "alignment-0": (build.file([build.pair("general.alignment", build.U32, 0)]), "general.alignment"),
    "alignment-48": (build.file([build.pair("general.alignment", build.U32, 48)]), "general.alignment"),
    "alignment-huge": (
        build.file([build.pair("general.alignment", build.U32, 1 << 31)]),
        "general.alignment",
    ),
    "alignment-text": (build.file([build.pair("general.alignment", build.STRING, "x")]), "general.alignment"),
    "no-dims": (build.file([], [build.tensor("t", [], F32, 0)], bytes(64)), "'t'.*0 dimensions"),
    "five-dims": (build.file([], [build.tensor("t", [1] * 5, F32, 0)], bytes(64)), "'t'.*5 dimensions"),
    "dim-0": (build.file([], [build.tensor("t", [4, 0], F32, 0)], bytes(64)), "'t'.*shape"),
    "overflow": (build.file([], [build.tensor("t", [1 << 62, 1 << 62], F32, 0)], bytes(64)), "'t'.*shape"),
    "removed-type": (build.file([], [build.tensor("t", [32], 4, 0)], bytes(64)), "'t'.*type 4"),
    "part-of-a-block": (build.file([], [build.tensor("t", [33], GgmlType.Q8_0, 0)], bytes(64)), "'t'.*Q8_0"),
    "misaligned": (build.file([], [build.tensor("t", [4], F32, 8)], bytes(64)), "'t'.*alignment"),
    "past-the-end": (build.file([], [build.tensor("t", [17], F32, 0)], bytes(64)), "'t'.*past the end"),
    "offset-huge": (build.file([], [build.tensor("t", [4], F32, (1 << 64) - 32)], bytes(64)), "past the end"),
    "same-name": (
        build.file([], [build.tensor("t", [4], F32, 0), build.tensor("t", [4], F32, 32)], bytes(64)),
        "'t'.*twice",
    ),
    "overlap": (
        build.file([], [build.tensor("t", [16], F32, 0), build.tensor("u", [4], F32, 32)], bytes(64)),
        "'u'.*overlap.*'t'",
    ),
    "tensor-name-long": (build.file([], [build.tensor("t" * 300, [4], F32, 0)], bytes(64)), "300"),
    "tensor-name-empty": (build.file([], [build.tensor("", [4], F32, 0)], bytes(64)), "empty"),
}


@pytest.mark.parametrize("strings", [True, False])
@pytest.mark.parametrize("case", HOSTILE)
def test_bad_files_are_refused_with_the_place(write: Write, case: str, strings: bool) -> None:
    if case == "string-in-array-not-utf8" and not strings:
        pytest.skip("strings that nobody wants are not decoded")
    raw, message = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(GgufError, match=message) as raised:
            GgufFile.open(write(raw), strings=strings)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "model.gguf" in str(raised.value)
    assert peak_bytes < 1 << 20  # nothing was allocated because a count said so


def test_what_is_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, message in [
        (tmp_path / "missing", "No such file"),
        (tmp_path, "not a regular file"),
        (empty, "empty"),
        (pipe, "not a regular file"),
    ]:
        with pytest.raises(GgufError, match=message):
            GgufFile.open(path)


def test_every_truncation_is_refused(write: Write) -> None:
    raw = sample()
    for size in range(1, len(raw)):
        for strings in (True, False):
            with pytest.raises(GgufError):
                GgufFile.open(write(raw[:size]), strings=strings)


def test_without_strings_all_else_is_there(write: Write) -> None:
    path = write(sample())
    whole, part = GgufFile.open(path), GgufFile.open(path, strings=False)
    lists = {
        key
        for key, value in whole.metadata.items()
        if isinstance(value, list) and any(isinstance(item, str) for item in value)
    }
    assert lists
    assert dict(part.metadata) == {key: value for key, value in whole.metadata.items() if key not in lists}
    assert part.tensors == whole.tensors


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, len(sample()) - 1),
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x80"]),
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_damaged_files_are_read_or_refused(write: Write, edits: list[tuple[int, bytes]]) -> None:
    raw = bytearray(sample())
    for at, patch in edits:
        raw[at : at + len(patch)] = patch
    try:
        file = GgufFile.open(write(bytes(raw)))
    except GgufError:
        return
    with file:
        for name, info in file.tensors.items():
            assert len(file.data(name)) == info.nbytes
