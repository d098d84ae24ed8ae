"""The state directory: private, versioned, one mesh at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh.supervisor.state import (
    SOCKET_PATH_LIMIT_BYTES,
    StateError,
    create_state,
    existing_state,
    held,
    is_held,
)
from mesh.supervisor.sweep import record, start_time, sweep


def test_it_is_private_and_says_its_version(tmp_path: Path) -> None:
    state = create_state(tmp_path / "deep" / "state")
    assert state.root.stat().st_mode & 0o777 == 0o700
    assert state.run.stat().st_mode & 0o777 == 0o700
    assert state.version_file.read_text().strip() == "1"
    assert existing_state(state.root) == state


def test_a_directory_of_others_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(StateError, match="not a state directory"):
        create_state(tmp_path)


def test_another_version_is_refused(tmp_path: Path) -> None:
    create_state(tmp_path)
    (tmp_path / "version").write_text("99\n")
    for opener in (create_state, existing_state):
        with pytest.raises(StateError, match="version '99'"):
            opener(tmp_path)


def test_a_long_path_gets_a_short_directory_for_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    state = create_state(tmp_path / ("long" * 25))
    longest = state.run / ("prefill-" + "x" * 34 + "-0.openai.sock")
    try:
        assert len(os.fsencode(longest)) <= SOCKET_PATH_LIMIT_BYTES
        assert state.run.stat().st_mode & 0o777 == 0o700
        assert existing_state(state.root).run == state.run
    finally:
        sweep(state.root, state.run)
    assert not state.run.exists()


def test_two_meshes_on_one_directory_are_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    state = create_state(tmp_path)
    with held(state):
        assert is_held(state)
        with pytest.raises(StateError, match=f"already running.*{os.getpid()}"), held(state):
            pass
    assert not is_held(state)
    with held(state):
        pass


def test_sweeping_kills_what_was_recorded_and_nothing_that_got_its_pid(tmp_path: Path) -> None:
    state = create_state(tmp_path)
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        record(state.pids, [left.pid])
        with state.pids.open("a") as file:
            file.write(f"{other.pid} 12345\n")
        assert sweep(state.root, state.run) == [f"process {left.pid}"]
        assert left.wait(5) == -9
        assert start_time(other.pid) is not None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()
