"""Runs in the peers' environment: a GGUF file as a Hugging Face directory in bfloat16.

`python to_safetensors.py FILE.gguf DIRECTORY`
"""

import json
import sys
from pathlib import Path
from typing import Any


def main(file: Path, directory: Path) -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]
    import transformers  # type: ignore[import-not-found,unused-ignore]

    kind: Any = transformers
    model = kind.AutoModelForCausalLM.from_pretrained(
        str(file.parent),
        gguf_file=file.name,
        quantization_config=kind.GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(directory)
    kind.AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name).save_pretrained(directory)
    # It keeps an empty entry for the quantisation that was undone, and others stumble over it.
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
