"""Fetch the published implementations that ``tests/oracles`` compares with, into ``.oracles/``.

    python scripts/fetch_oracles.py [directory]

Wheels only, each without its dependencies and outside the environment: the project needs none of them. Does nothing when the
directory holds just these versions; it appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ORACLES = {"openrlhf": "openrlhf==0.11.2", "trl": "trl==1.16.0", "trl-1.9.2": "trl==1.9.2", "verl": "verl==0.9.1"}
"""Folder → wheel. TRL 1.9.2 is the last with process reward models."""
# What verl imports on the way to its formulas. Newer antlr runtimes cannot read the grammars omegaconf was built with.
BESIDE_VERL = (
    "antlr4-python3-runtime==4.9.3",
    "cloudpickle==3.1.2",
    "codetiming==1.4.0",
    "hydra-core==1.3.2",
    "omegaconf==2.3.0",
    "orjson==3.13.0",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
)
TARGET = Path(__file__).resolve().parent.parent / ".oracles"
STAMP = "fetched.txt"


def install(requirements: tuple[str, ...], target: Path, *options: str) -> None:
    """``pip install --target``, without dependencies."""
    print(f"fetching {' '.join(requirements)}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]
    if subprocess.run([*command, *options, "--target", str(target), *requirements]).returncode:
        sys.exit("Error: pip could not fetch the oracles: is there a package index to reach?")


def main() -> None:
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET
    wanted = "\n".join((*ORACLES.values(), *BESIDE_VERL)) + "\n"
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{target} is there")
        return
    aside = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        for folder, oracle in ORACLES.items():
            install((oracle,), aside / folder, "--only-binary=:all:")
        install(BESIDE_VERL, aside / "beside", "--no-build-isolation")
        (aside / STAMP).write_text(wanted)
        if target.exists():
            shutil.rmtree(target)
        os.chmod(aside, 0o755)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
