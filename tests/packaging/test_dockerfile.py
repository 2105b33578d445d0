"""The commands of the Dockerfile, run in a new environment with the versions for CPUs, from the files that the image would get."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from fnmatch import fnmatch
from pathlib import Path

import pytest

from .test_constraints import pins

ROOT = Path(__file__).resolve().parents[2]
HOME = "/opt/rlhf"


def instructions(name: str) -> list[str]:
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [" ".join(line.split()[1:]) for line in text.splitlines() if line.startswith(f"{name} ")]


def sent(to: Path) -> None:
    """Copies what ``COPY . .`` would: files under version control that ``.dockerignore`` does not name."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    left_out = (ROOT / ".dockerignore").read_text().split()
    for name in filter(None, listed):
        if not any(fnmatch(name, pattern) or name.startswith(f"{pattern}/") for pattern in left_out):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


@pytest.mark.timeout(1500)
def test_its_commands_install_a_host_that_works(tmp_path, third_party):
    system, make, install = instructions("RUN")
    assert system.startswith("apt-get update && apt-get install -y --no-install-recommends "), (
        "not run here: it changes the system"
    )
    assert make == f"python3 -m venv {HOME}"
    assert f"PATH={HOME}/bin:$PATH" in instructions("ENV")[0]
    home, source = tmp_path / "venv", tmp_path / "source"
    sent(source)
    venv.create(home, with_pip=True, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "third-party.pth").write_text(f"{third_party}\n")  # torch and all need not be installed once more
    (source / "constraints/cuda.txt").write_text("".join(f"{name}=={version}\n" for name, version in pins().items()))
    # What only GPUs have, and Ray's dashboard, which this environment lacks.
    command = install.replace(",cluster,", ",ray,").replace(",vllm,", ",")
    assert command != install
    environment = {**os.environ, "PATH": f"{home}/bin{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    environment["PIP_NO_BUILD_ISOLATION"] = "0"  # pip's way to say true: what builds is there already
    done = subprocess.run(["bash", "-c", command], cwd=source, env=environment, capture_output=True, text=True, check=False)
    if (
        "Could not find a version that satisfies the requirement hatchling" in done.stderr
        or "Failed to establish" in done.stderr
    ):
        pytest.skip("no package index answers")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Successfully installed" in done.stdout
    listed = subprocess.run(
        [home / "bin/rlhf", "plugins", "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    ).stdout
    for name in ("grpo", "math_verifier", "deepspeed", "vllm", "ray", "doctor", "serve"):
        assert f'"{name}"' in listed
