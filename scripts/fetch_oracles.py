"""Fetch the published implementations that ``tests/oracles`` compares with, into ``.oracles/``.

    python scripts/fetch_oracles.py [directory]

Wheels, and two source distributions for their examples, each without its dependencies and outside the environment: the
project needs none of them. Does nothing when the directory holds just these versions; it appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ORACLES = {"openrlhf": "openrlhf==0.11.2", "trl": "trl==1.16.0", "trl-1.9.2": "trl==1.9.2", "verl": "verl==0.9.1"}
"""Folder → wheel. TRL 1.9.2 is the last with process reward models."""
PUBLISHED = (
    *("openrlhf==0.8.5", "openrlhf==0.9.3", "openrlhf==0.9.10", "openrlhf==0.10.2", "openrlhf==0.11.1"),
    *(
        "trl==0.16.1",
        "trl==0.19.1",
        "trl==0.29.1",
        "trl==1.5.1",
        "verl==0.2.0.post2",
        "verl==0.4.1",
        "verl==0.6.1",
        "verl==0.7.0",
    ),
)
"""Wheels whose scripts and configurations the tests of ``rlhf-translate`` translate, beside those of the oracles."""
SOURCES = ("axolotl==0.19.0", "llamafactory==0.9.5")
"""Source distributions with the configurations of projects that are not translated."""
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


def download(requirement: str, target: Path) -> None:
    """A source distribution, unpacked: its examples are in no wheel."""
    print(f"fetching {requirement}", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--no-build-isolation", "--no-binary=:all:", "-d", folder, requirement])
        archives = list(Path(folder).glob("*.tar.gz"))
        if done.returncode or not archives:
            print(f"{requirement}: pip could not fetch its sources; tests leave it out")
            return
        with tarfile.open(archives[0]) as archive:
            archive.extractall(target, filter="data")


def main() -> None:
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET
    wanted = "\n".join((*ORACLES.values(), *BESIDE_VERL, *PUBLISHED, *SOURCES)) + "\n"
    stamp = target / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        print(f"{target} is there")
        return
    aside = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
    try:
        for folder, oracle in ORACLES.items():
            install((oracle,), aside / folder, "--only-binary=:all:")
        install(BESIDE_VERL, aside / "beside", "--no-build-isolation")
        for wheel in PUBLISHED:
            install((wheel,), aside / "published" / wheel.replace("==", "-"), "--only-binary=:all:")
        for source in SOURCES:
            download(source, aside / "sources")
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
