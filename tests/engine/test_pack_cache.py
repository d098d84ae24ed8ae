"""Packed weights that are kept: the same bits with and without, and nothing that was damaged is ever used."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import engine
from engine import Executor
from engine.cpu import CpuExecutor, PackCache
from engine.executor import Logits
from engine.tiny import TinySpec, tiny_model
from engine.weights.gguf import open_model
from engine.weights.known_digests import KnownDigests
from tests.engine.pools import bind, run
from tests.engine.test_load import arrays, tiny_metadata, write_gguf
from text.gguf import GgmlType

TOKENS = list(range(97, 130))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """With matrices of several forms, stacked and paired."""
    values = arrays(tiny_model(TinySpec(seed=5)))
    stored = {name: GgmlType.Q8_0 for name in values if "ffn" in name and "norm" not in name}
    stored["blk.0.attn_output.weight"] = GgmlType.F16
    path = write_gguf(tmp_path / "m.gguf", values, tiny_metadata(), stored=stored)
    age(path)
    return path


def age(path: str | Path) -> None:
    """The file was written long ago, as far as its times can be set."""
    os.utime(path, (1e9, 1e9))


def answer(executor: Executor) -> Logits:
    bind(executor, 4)
    return run(executor, TOKENS, range(4), [len(TOKENS)])


@pytest.fixture
def wanted(model: str) -> Logits:
    return answer(engine.load(model))


def load(model: str, cache: Path, **options: bool) -> Executor:
    return engine.load(model, cache=cache, **options)  # type: ignore[arg-type]


def executor(model: str, kept: PackCache) -> CpuExecutor:
    return CpuExecutor(open_model(Path(model)), threads=1, page_tokens=16, kv_dtype="f16", packs=kept)


def packs(cache: Path) -> list[Path]:
    return sorted((cache / "packs").glob("*.pack"))


def test_the_same_bits_with_and_without(model: str, tmp_path: Path, wanted: Logits) -> None:
    cache = tmp_path / "cache"
    first, second, plain = load(model, cache), load(model, cache), engine.load(model)
    assert first.info == second.info == plain.info
    assert answer(first).tobytes() == answer(second).tobytes() == wanted.tobytes()
    (pack,) = packs(cache)
    assert pack.stat().st_mode & 0o777 == 0o600


def test_the_second_start_packs_nothing_and_does_not_read_the_weights(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, tmp_path)

    def never(*_: object) -> None:
        raise AssertionError("weights are read")

    for name in ("load", "codes"):
        monkeypatch.setattr(f"engine.weights.gguf.GgufWeights.{name}", never)
    # Without logits too: both kinds of workers share one pack.
    load(model, tmp_path)
    load(model, tmp_path, logits=False)


def test_progress_is_told_while_packing_only(model: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    engine.load(model, cache=tmp_path, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    told.clear()
    engine.load(model, cache=tmp_path, progress=lambda done, total: told.append((done, total)))
    assert not told


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def flip(at: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at(path.stat().st_size))
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 0x10]))

    return damage


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "cut short": cut,
    "empty": cut_to_nothing,
    "longer": longer,
    "magic": flip(lambda size: 3),
    "version": flip(lambda size: 16),
    "key": flip(lambda size: 30),
    "size of the data": flip(lambda size: 56),
    "digest of the index": flip(lambda size: 85),
    "first byte of the data": flip(lambda size: 2 << 20),
    "some byte of the data": flip(lambda size: (2 << 20) + 40_000),
    "index": flip(lambda size: size - 200),
    "last byte": flip(lambda size: size - 1),
    "others may write": open_to_all,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_was_damaged_is_made_anew(
    model: str,
    tmp_path: Path,
    wanted: Logits,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    load(model, tmp_path)
    (pack,) = packs(tmp_path)
    whole = pack.read_bytes()
    damage(pack)
    with caplog.at_level(logging.WARNING):
        assert answer(load(model, tmp_path)).tobytes() == wanted.tobytes()
    assert "is not used" in caplog.text
    (again,) = packs(tmp_path)
    assert again.read_bytes() == whole
    assert again.stat().st_mode & 0o777 == 0o600


def test_a_link_is_not_followed(model: str, tmp_path: Path, wanted: Logits) -> None:
    load(model, tmp_path)
    (pack,) = packs(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    pack.rename(elsewhere)
    pack.symlink_to(elsewhere)
    assert answer(load(model, tmp_path)).tobytes() == wanted.tobytes()
    assert not packs(tmp_path)[0].is_symlink()


def test_a_file_under_another_models_name_is_not_used(model: str, tmp_path: Path, wanted: Logits) -> None:
    load(model, tmp_path)
    (pack,) = packs(tmp_path)
    other = write_gguf(tmp_path / "o.gguf", arrays(tiny_model(TinySpec(seed=6))), tiny_metadata())
    load(other, tmp_path)
    (stranger,) = (path for path in packs(tmp_path) if path != pack)
    stranger.replace(pack)
    assert answer(load(model, tmp_path)).tobytes() == wanted.tobytes()


def test_another_revision_of_the_code_makes_another_pack_and_the_old_one_goes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model, tmp_path)
    (old,) = packs(tmp_path)
    monkeypatch.setattr("engine.cpu.packed.code_revision", lambda: b"another revision")
    load(model, tmp_path)
    (new,) = packs(tmp_path)
    assert new != old


def test_changed_weights_are_never_taken_for_the_old_ones(model: str, tmp_path: Path) -> None:
    before = load(model, tmp_path)
    status = os.stat(model)
    flip(lambda size: size - 5000)(Path(model))
    # Not even where somebody sets the times back.
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = load(model, tmp_path)
    assert after.info.weights_digest != before.info.weights_digest
    assert after.info.weights_digest == open_model(Path(model)).weights.digest()


def test_a_file_that_changed_just_now_is_read_whole_each_time(model: str, tmp_path: Path) -> None:
    """Two changes within one tick of the file system's clock look the same."""
    weights = open_model(Path(model)).weights
    now_s = os.stat(model).st_ctime
    early, late = (KnownDigests(tmp_path / "notes", clock=lambda t=t: now_s + t) for t in (1.0, 10.0))  # type: ignore[misc]
    assert early.digest(weights) == weights.digest()  # type: ignore[arg-type]
    assert not (tmp_path / "notes").exists()
    assert late.digest(weights) == weights.digest()  # type: ignore[arg-type]
    (note,) = (tmp_path / "notes").iterdir()
    note.write_bytes(bytes(32))
    assert late.digest(weights) == weights.digest()  # type: ignore[arg-type]


def test_workers_that_start_at_once_make_one_pack(model: str, tmp_path: Path, wanted: Logits) -> None:
    with ThreadPoolExecutor(4) as pool:
        executors = list(pool.map(lambda _: load(model, tmp_path), range(4)))
    assert {answer(executor).tobytes() for executor in executors} == {wanted.tobytes()}
    assert len(packs(tmp_path)) == 1


def test_whoever_waits_for_long_goes_on_alone(model: str, tmp_path: Path, wanted: Logits) -> None:
    (tmp_path / "packs").mkdir()
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, sys\n"
            "file = open(sys.argv[1], 'w')\n"
            "fcntl.flock(file, fcntl.LOCK_EX)\n"
            "print('held', flush=True)\n"
            "sys.stdin.read()",
            str(tmp_path / "packs" / "lock"),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        alone = executor(model, PackCache(tmp_path / "packs", wait_s=0.2))
        assert answer(alone).tobytes() == wanted.tobytes()
        assert not packs(tmp_path)
    finally:
        holder.communicate()


def test_a_directory_that_cannot_be_written(
    model: str, tmp_path: Path, wanted: Logits, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with caplog.at_level(logging.WARNING):
        assert answer(load(model, blocked)).tobytes() == wanted.tobytes()
    assert "cannot be kept" in caplog.text


def test_a_disk_that_is_full(
    model: str,
    tmp_path: Path,
    wanted: Logits,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.cpu.pack_file.os.pwrite", full)
    with caplog.at_level(logging.WARNING):
        assert answer(load(model, tmp_path)).tobytes() == wanted.tobytes()
    assert "No space left" in caplog.text
    assert [path.name for path in (tmp_path / "packs").iterdir()] == ["lock"]


def test_what_is_too_large_is_not_kept_and_the_oldest_goes_first(model: str, tmp_path: Path) -> None:
    others = [
        write_gguf(tmp_path / f"{seed}.gguf", arrays(tiny_model(TinySpec(seed=seed))), tiny_metadata())
        for seed in (7, 8)
    ]
    load(others[0], tmp_path)
    (oldest,) = packs(tmp_path)
    age(oldest)
    load(model, tmp_path)
    limit = sum(path.stat().st_size for path in packs(tmp_path))
    executor(others[1], PackCache(tmp_path / "packs", limit_bytes=limit))
    assert oldest not in packs(tmp_path)
    kept = packs(tmp_path)
    assert len(kept) == 2
    executor(others[0], PackCache(tmp_path / "packs", limit_bytes=1000))
    assert packs(tmp_path) == kept


def test_what_a_process_that_died_left_behind_goes(model: str, tmp_path: Path) -> None:
    (tmp_path / "packs").mkdir()
    (tmp_path / "packs" / "x.pack.12345678.new").write_bytes(b"half")
    load(model, tmp_path)
    assert sorted(path.suffix for path in (tmp_path / "packs").iterdir()) == ["", ".pack"]
