"""Write ``docs/first-hour.md``: a new user's first hour in a fresh clone, in a terminal of 80 columns.

    python scripts/first_hour.py

The commands are really run, in a copy of the last commit with an empty home. It takes as long as the page says.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from screen import COLUMNS, run

ROOT = Path(__file__).resolve().parent.parent
PAGE, CURVE = ROOT / "docs/first-hour.md", ROOT / "docs/assets/learning-curve.svg"
PLUGIN = "rlhf-plugin-close/src/rlhf_plugin_close/__init__.py"
JUDGE = """
    def judge(self, text: str, label: Any) -> Reward | None:
        \"\"\"1 for the label, less for numbers further away, 0 for other texts.\"\"\"
        if not re.fullmatch("[0-9]{1,4}", str(label)):
            return None
        if not re.fullmatch("[0-9]{1,4}", text):
            return Reward(0.0, score=0.0)
        distance = abs(int(text) - int(label))
        return Reward(1 / (1 + distance), score=float(distance == 0))
"""

ABOUT = """# The first hour

A new user's first hour: the quickstart, then a reward of their own, trained, interrupted and resumed.
`python scripts/first_hour.py` ran these commands, one after the other, in a fresh clone with an empty home directory and a
terminal of {columns} columns, and wrote this page. It left out lines where it says so, pip's warnings about the machine's package
index, and what a progress bar overwrote. The last line of each block is the time of the command, on a machine with
{machine}.
"""


@dataclass
class Hour:
    """A person at a terminal."""

    clone: Path
    environment: dict[str, str]
    page: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.page += [text.strip(), ""]

    def type(self, command: str, head: int = 60, tail: int = 0, interrupt_at: str | None = None) -> None:
        """Run a command and show the first and last lines that it leaves. Raises when it fails."""
        begin = time.perf_counter()
        code, lines = run(command, self.clone, self.environment, interrupt_at)
        seconds = time.perf_counter() - begin
        print(f"{seconds:7.1f} s  {command}", flush=True)
        lines = [line.replace(str(self.clone.parent), "~") for line in lines if not line.startswith("WARNING: Location ")]
        while lines and not lines[-1]:
            lines.pop()
        if code != (130 if interrupt_at else 0):
            raise SystemExit("\n".join([f"{command} gave {code}", *lines]))
        if (left_out := len(lines) - head - tail) > 1:
            lines = [*lines[:head], f"... ({left_out} lines)", *lines[len(lines) - tail :]]
        self.page += ["```console", f"$ {command}", *lines, f"# {seconds:.0f} s", "```", ""]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "rlhf-host"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
        kept = ("LANG", "LC_ALL", "SSL_CERT_FILE", "PIP_CONFIG_FILE")
        environment = {name: os.environ[name] for name in kept if name in os.environ}
        environment |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "OMP_"))}
        if (settings := Path.home() / ".config/pip/pip.conf").exists():
            environment.setdefault("PIP_CONFIG_FILE", str(settings))
        paths = [path for path in os.environ["PATH"].split(os.pathsep) if not Path(path, "rlhf").exists()]
        environment |= {"HOME": folder, "PATH": os.pathsep.join(paths), "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
        hour = Hour(clone, environment)
        play(hour)
        PAGE.write_text("\n".join(hour.page).strip() + "\n", encoding="utf-8")
        (metrics,) = clone.glob("runs/*-rloo-math_verifier/metrics.jsonl")
        CURVE.write_text(curve([json.loads(line) for line in metrics.read_text().splitlines()]), encoding="utf-8")


def play(hour: Hour) -> None:
    cores = f"{os.cpu_count()} CPU cores, Python {platform.python_version()}"
    hour.say(ABOUT.format(columns=COLUMNS, machine=cores))
    hour.say("## The quickstart")
    hour.type("make quickstart", head=40, tail=22)
    hour.say("`make` has put everything into `.venv`. From here on the shell finds `rlhf`:")
    hour.page += ["```sh", ". .venv/bin/activate", "```", ""]
    venv = hour.clone / ".venv"
    hour.environment |= {"PATH": f"{venv}/bin{os.pathsep}{hour.environment['PATH']}", "VIRTUAL_ENV": str(venv)}
    hour.type("rlhf plugins --kind reward")
    hour.type("rlhf plugins --kind algo")
    hour.say("## A reward of your own")
    hour.type("rlhf plugins new reward close --description 'Partial credit for numbers that are close'")
    hour.say(f"In `{PLUGIN}`, the method `judge` becomes:")
    path = hour.clone / PLUGIN
    text = path.read_text()
    path.write_text(text[: text.index("    def judge(")] + JUDGE.lstrip("\n"))
    hour.page += ["```python", *(line.removeprefix("    ") for line in JUDGE.strip("\n").splitlines()), "```", ""]
    hour.type("pip install --quiet --disable-pip-version-check -e ./rlhf-plugin-close")
    hour.type("rlhf plugins check close", tail=8)
    hour.say("## Train with it, interrupt, resume")
    hour.say("Ctrl-C is typed after the twelfth step.")
    train = "rlhf train --algo rloo --reward close --steps 30 --run-dir runs/close"
    hour.type(train, head=70, interrupt_at="step 12/30")
    hour.type("rlhf train --resume runs/close", head=14, tail=12)
    hour.say("## Score the same answers with another reward")
    hour.say("The run's own files are enough: `rlhf replay` needs no model for this.")
    hour.type("rlhf replay runs/close --reward math_verifier --rows 3", head=30)


def curve(rows: list[dict[str, float]]) -> str:
    """Reward of every step and held-out pass@1 of a run, as a picture for dark and light pages."""
    width, height, left, bottom = 640, 300, 52, 40
    right, last = width - 16, max(row["step"] for row in rows)

    def place(step: float, value: float) -> tuple[float, float]:
        return round(left + step / last * (right - left), 1), round(12 + (1 - value) * (height - bottom - 12), 1)

    def text(x: float, y: float, words: object, anchor: str = "middle", fill: str = "#888") -> str:
        return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}">{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">']
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = place(0, value)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="#888" stroke-opacity=".3"/>')
        parts.append(text(x - 8, y + 4, f"{value:g}", "end"))
    parts += [text(place(step, 0)[0], height - bottom + 18, step) for step in range(0, int(last) + 1, 50)]
    rewards = " ".join("{},{}".format(*place(row["step"], row["reward/mean"])) for row in rows if "reward/mean" in row)
    parts.append(f'<polyline points="{rewards}" fill="none" stroke="#4f7fe0" stroke-width="1.5"/>')
    tested = [place(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row]
    parts += [f'<circle cx="{x}" cy="{y}" r="5" fill="#e8710a"/>' for x, y in tested]
    parts.append(text(right, height - bottom - 32, "reward of the training samples", "end", "#4f7fe0"))
    parts.append(text(right, height - bottom - 14, "pass@1 on held-out problems", "end", "#e8710a"))
    parts.append(text((left + right) / 2, height - 4, "training steps"))
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    if re.search(
        r"\S", subprocess.run(["git", "status", "--short"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ):
        print("Uncommitted changes are not part of the clone.", file=sys.stderr)
    main()
