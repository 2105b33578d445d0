"""A model directory as a GGUF file, by llama.cpp's converter, which knows the families of models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rlhf_host import RunError, UserError
from rlhf_runs.export import dtype_of

SCRIPT = "convert_hf_to_gguf.py"
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
SHOWN = 5
"""Maximum lines of the converter's output in a message."""


def find_converter(path: Path | None) -> list[str]:
    """Returns the command that converts: ``path``, or the one on the PATH.

    Raises:
        UserError: there is none.
    """
    found = path or shutil.which(SCRIPT)
    if found is None:
        raise UserError(
            f"GGUF files are written by llama.cpp's {SCRIPT}, which is not on the PATH: git clone"
            f" https://github.com/ggml-org/llama.cpp, and give --converter llama.cpp/{SCRIPT}"
        )
    if not Path(found).is_file():
        raise UserError(f"--converter {found}: no such file; it is {SCRIPT} in a clone of llama.cpp")
    script = Path(found).resolve()  # it imports what lies beside it
    return [sys.executable, str(script)] if script.suffix == ".py" else [str(script)]


def convert(converter: list[str], directory: Path, output: Path) -> None:
    """Writes ``output``, completely or not at all, with weights of the directory's type.

    Raises:
        RunError: the converter fails, for example for model families that llama.cpp does not have.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.stem}.partial.gguf")
    command = [*converter, str(directory), "--outfile", str(aside), "--outtype", TYPES[dtype_of(directory)]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        if done.returncode or not aside.is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()][-SHOWN:]
            raise RunError("\n".join([f"{output} is not written: {converter[-1]} ended with code {done.returncode}:", *said]))
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.rename(output)
    finally:
        aside.unlink(missing_ok=True)
