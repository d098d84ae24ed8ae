"""The state directory: where everything that a mesh keeps lies, and in which version.

The sockets lie in a runtime directory. That is `<state>/run`, unless a socket's path
would then be too long for the kernel; then it is a short-named private directory
elsewhere, whose path is recorded in the state directory. Does not know what the
files contain.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mesh.supervisor.sweep import start_time

STATE_VERSION = 1
DEFAULT_STATE = Path(".kvmesh")
# sizeof(sockaddr_un.sun_path) - 1
SOCKET_PATH_LIMIT_BYTES = 107
# The longest file name below the runtime directory: a process name and ".openai.sock".
NAME_LIMIT = 44
_LONGEST_FILE_BYTES = NAME_LIMIT + len(".openai.sock")


class StateError(Exception):
    """The state directory cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StateDir:
    """`root` holds what stays; `run` holds sockets and what only this run needs."""

    root: Path
    run: Path

    @property
    def version_file(self) -> Path:
        return self.root / "version"

    @property
    def lock_file(self) -> Path:
        return self.root / "lock"

    @property
    def dev_key(self) -> Path:
        return self.root / "dev-key"

    @property
    def metrics_token(self) -> Path:
        return self.root / "metrics-token"

    @property
    def ca(self) -> Path:
        return self.root / "ca"

    @property
    def identities(self) -> Path:
        return self.root / "identities"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def traces(self) -> Path:
        return self.root / "traces"

    @property
    def models(self) -> Path:
        """Which models `up` serves when it is not told: JSON, name to source."""
        return self.root / "models.json"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def pids(self) -> Path:
        """Every process of this run, one `pid start-time` a line, for whoever cleans up."""
        return self.root / "pids"

    @property
    def control_socket(self) -> Path:
        return self.run / "supervisor.sock"


def create_state(root: Path) -> StateDir:
    """Opens `root` for a mesh to run in; makes it, or refuses it with a StateError."""
    root = root.absolute()
    _private_directory(root)
    version = root / "version"
    if version.exists():
        _check_version(root)
    else:
        strange = [p.name for p in root.iterdir() if p.name not in {"lock", "models.json"}]
        if strange:
            raise StateError(
                f"{root} is not empty and not a state directory: it has no file 'version', but {strange[0]}"
            )
        version.write_text(f"{STATE_VERSION}\n")
    run = _runtime_directory(root)
    _private_directory(run)
    recorded = root / "run.path"
    recorded.write_text(f"{run}\n")
    state = StateDir(root, run)
    for path in (state.identities, state.logs, state.traces, state.cache):
        _private_directory(path)
    return state


def existing_state(root: Path) -> StateDir:
    """The state directory at `root`; StateError when there is none."""
    root = root.absolute()
    if not (root / "version").exists():
        raise StateError(
            f"{root} is not a state directory of kvmesh (is --state right? has 'kvmesh up' run?)"
        )
    _check_version(root)
    recorded = root / "run.path"
    run = Path(recorded.read_text().strip()) if recorded.exists() else root / "run"
    return StateDir(root, run)


@contextlib.contextmanager
def held(state: StateDir, *, patience_s: float = 10.0) -> Iterator[None]:
    """Holds the directory for one supervisor; StateError names the one that has it.

    Where the holder is only cleaning up after a dead supervisor, waits `patience_s` for it.
    """
    handle = os.open(state.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end = time.monotonic() + patience_s
        while not _locked(handle):
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            if time.monotonic() > end or (owner.isdigit() and start_time(int(owner)) is not None):
                raise StateError(
                    f"a mesh is already running on {state.root} (supervisor pid {owner or '?'}); "
                    f"stop it with 'kvmesh down --state {state.root}' or give another --state"
                )
            time.sleep(0.05)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_held(state: StateDir) -> bool:
    """True while a supervisor lives on the directory."""
    try:
        handle = os.open(state.lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def write_private(path: Path, text: str) -> None:
    """Replaces `path` by a file that only the owner can read."""
    scratch = path.with_name(path.name + ".new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    scratch.replace(path)


def _check_version(root: Path) -> None:
    text = (root / "version").read_text().strip()
    if text != str(STATE_VERSION):
        raise StateError(
            f"{root} has state version {text!r}; this kvmesh reads version {STATE_VERSION}. "
            "Use the kvmesh that wrote it, or give another --state"
        )


def _private_directory(path: Path) -> None:
    """Makes `path` with mode 0700, or makes sure that it is ours and private."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise StateError(f"{path} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) and not path.is_dir():
        raise StateError(f"{path} is not a directory")
    if found.st_uid != os.geteuid():
        raise StateError(f"{path} belongs to uid {found.st_uid}, not to you (uid {os.geteuid()})")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)


def _runtime_directory(root: Path) -> Path:
    usual = root / "run"
    if _fits(usual):
        return usual
    digest = hashlib.blake2b(os.fsencode(root), digest_size=6).hexdigest()
    candidates = [Path(f"/tmp/kvmesh-{os.geteuid()}-{digest}")]
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        candidates.insert(0, Path(runtime) / f"kvmesh-{digest}")
    for path in candidates:
        if _fits(path):
            return path
    raise StateError(f"no directory for sockets is short enough; tried {', '.join(map(str, candidates))}")


def _fits(run: Path) -> bool:
    return len(os.fsencode(run)) + 1 + _LONGEST_FILE_BYTES <= SOCKET_PATH_LIMIT_BYTES
