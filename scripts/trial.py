"""Write ``docs/trial.md``: from nothing to a trained plugin as a person does it, every command with its time.

    python scripts/trial.py [--output FILE] [--steps N]

The commands run in a virtual environment of their own, over the packages of the one this runs in, with an empty home.
"""

from __future__ import annotations

import argparse
import difflib
import os
import platform
import re
import site
import subprocess
import sys
import tempfile
import time
import venv
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "gentle"
MODULE = f"src/rlhf_plugin_{NAME}/__init__.py"
TESTS = "tests/test_behaviour.py"

EDITS = {
    MODULE: [
        (
            '    normalize: bool = Field(False, description="divide by the standard deviation of the group, as GRPO does")\n',
            '    normalize: bool = Field(False, description="divide by the standard deviation of the group, as GRPO does")\n'
            '    blame: float = Field(0.5, ge=0, description="factor on advantages below 0")\n',
        ),
        (
            "        return Advantages(F.on_actions(relative, mask))\n",
            "        relative = relative.clamp(min=0) + self.options.blame * relative.clamp(max=0)\n"
            "        return Advantages(F.on_actions(relative, mask))\n",
        ),
    ],
    TESTS: [
        (
            "[(False, [0.75, -0.25, -0.25, -0.25]), (True, [1.5, -0.5, -0.5, -0.5])]",
            "[(False, [0.75, -0.05, -0.05, -0.05]), (True, [1.5, -0.1, -0.1, -0.1])]",
        ),
        (".Options(normalize=normalize)", ".Options(normalize=normalize, blame=0.2)"),
    ],
}
"""File → what is replaced by what, as in an editor: what a sample did wrong counts for less than what it did right."""

ABOUT = """# A trial

This page goes from nothing to a trained plugin. `rlhf plugins new` writes an algorithm. It is tested, edited and trained on the
quickstart model. The page shows every command, its output and its time, in an environment with `rlhf-host` and the plugins of the
project. {machine}, shared with other work. `python scripts/trial.py` runs everything again and writes this page.
"""


@dataclass
class Trial:
    """A person at a terminal."""

    home: Path
    environment: dict[str, str]
    folder: Path
    page: list[str] = field(default_factory=list)
    spent_s: float = 0.0

    def say(self, text: str) -> None:
        self.page += [text, ""]

    def type(self, *commands: str, head: int = 40, tail: int = 0) -> str:
        """Run shell commands and show them with the first and last lines they print. Raises when one fails."""
        said = ""
        self.page.append("```console")
        for command in commands:
            begin = time.perf_counter()
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self.environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            seconds = time.perf_counter() - begin
            self.spent_s += seconds
            print(f"{seconds:7.1f} s  {command}", flush=True)
            said = self.clean(done.stdout)
            if done.returncode:
                raise SystemExit(f"{command} gave {done.returncode}:\n{said}")
            lines = said.splitlines()
            left_out = len(lines) - head - tail
            shown = [*lines[:head], f"... ({left_out} lines)", *lines[len(lines) - tail :]] if left_out > 1 else lines
            self.page += [f"$ {command}", *shown, f"# {seconds:.1f} s"]
        self.page += ["```", ""]
        return said

    def edit(self, file: str, changes: list[tuple[str, str]]) -> None:
        """Change a file and show the difference. Raises when it does not hold what is to be changed."""
        path = self.folder / file
        before = after = path.read_text()
        for old, new in changes:
            if after.count(old) != 1:
                raise SystemExit(f"{file} does not contain {old!r} once: change scripts/trial.py with the template")
            after = after.replace(old, new)
        path.write_text(after)
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), file, file, lineterm="", n=1)
        self.page += ["```diff", *lines, "```", ""]

    def clean(self, text: str) -> str:
        """Without colours, overwritten lines and the place of this trial."""
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        text = "\n".join(line.rpartition("\r")[2].rstrip() for line in text.rstrip().replace("\r\n", "\n").split("\n"))
        return text.replace(str(self.home), "~").replace(str(ROOT), "~/rlhf-host")


def begin(home: Path) -> Trial:
    """A clean environment, into which a plugin can be installed without leaving anything in this one."""
    venv.create(home / "venv", with_pip=False, symlinks=True)
    (own,) = (home / "venv").glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (own / "packages.pth").write_text("".join(lines))
    # These commands are packages of the environment beneath, to be run by this one's Python.
    for command, module in {"pip": "pip", "pytest": "pytest", "rlhf": "rlhf_host.cli.main"}.items():
        script = home / "venv/bin" / command
        script.write_text(f'#!/bin/sh\nexec "{home}/venv/bin/python" -m {module} "$@"\n')
        script.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "RLHF_"))}
    path = f"{home}/venv/bin{os.pathsep}{os.environ['PATH']}"
    own_values = {
        "HOME": str(home),
        "PATH": path,
        "COLUMNS": "140",
        "HF_HUB_OFFLINE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    cache = {"RLHF_CACHE": str(home / "cache"), "PIP_NO_INDEX": "1"}
    (home / "plugins").mkdir()
    return Trial(home, {**kept, **own_values, **cache}, home / "plugins")


def run(trial: Trial, steps: int) -> None:
    """Everything a person does, in order."""
    trial.say("## A plugin that works")
    about = "Policy gradient in which mistakes count for less"
    trial.type(f"rlhf plugins new algo {NAME} --description '{about}'")
    trial.folder = trial.folder / f"rlhf-plugin-{NAME}"
    trial.say(
        "Change into the folder with `cd`. `--no-build-isolation` uses the installed build tool. Without it, pip downloads one."
    )
    trial.type("pip install --quiet --no-build-isolation -e . 'rlhf-host[testing]'", "rlhf plugins --kind algo", "pytest -q")
    trial.type(f"rlhf train --algo {NAME} --reward math_verifier --dry-run")
    trial.say("## Changing it")
    trial.say("The change is an option, a line, and the numbers of the test. With `-e`, nothing has to be built.")
    trial.edit(MODULE, EDITS[MODULE])
    trial.edit(TESTS, EDITS[TESTS])
    trial.type("pytest -q", f"rlhf plugins show {NAME}", head=8, tail=9)
    trial.say("## Training with it")
    trial.say(
        "The model of the quickstart comes with the host: a small transformer that has learnt sums and mostly forgets to carry."
    )
    flags = (
        f"--algo {NAME} --algo.blame 0.2 --reward math_verifier --train.steps {steps} --eval.every {steps // 2} --run-dir run"
    )
    trial.type(f"rlhf train {flags}", head=12, tail=18)
    trial.say("## Installing it as others will")
    trial.type(
        "pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .",
        "ls dist",
        f"pip uninstall --quiet --yes rlhf-plugin-{NAME}",
        "pip install --quiet --no-deps dist/*.whl",
        "pytest -q",
    )
    trial.say(f"All commands together: {trial.spent_s / 60:.1f} minutes.")


def machine() -> str:
    """Processors and versions, for the page's first lines."""
    import torch

    return f"The machine: {os.cpu_count()} CPU cores, Python {platform.python_version()}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs/trial.md", help="the page (default docs/trial.md)")
    parser.add_argument("--steps", type=int, default=200, help="steps of the training run (default 200)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        trial = begin(Path(folder).resolve())
        run(trial, arguments.steps)
    page = "\n".join([ABOUT.format(machine=machine()), *trial.page]).rstrip() + "\n"
    arguments.output.write_text(page)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    sys.exit(main())
