"""Run the commands of ``docs/runs.md`` that look at runs, and write what they print in a terminal of 80 columns into the page.

    python scripts/runs_page.py

Its two runs of the quickstart task are made first, in an empty directory. It takes about two minutes.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from screen import COLUMNS, run

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/runs.md"
FIRST = re.compile(r"^```sh\n(rlhf train .*\n)(rlhf train .*\n)```$", re.M)
SHOWN = re.compile(r"^```console\n\$ (rlhf (?:runs|show|compare)\b.*)\n(?:.*\n)*?```$", re.M)


def main() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": str(COLUMNS), "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:

        def typed(command: str) -> str:
            code, lines = run(command, Path(folder), environment)
            if code:
                raise SystemExit("\n".join([f"{command} gave {code}", *lines]))
            return "\n".join(line.rstrip() for line in lines).strip()

        trained = FIRST.search(text)
        if trained is None:
            raise SystemExit(f"{PAGE} has no block with the two runs")
        for command in trained.groups():
            typed(command.strip())
        text = SHOWN.sub(lambda shown: f"```console\n$ {shown[1]}\n{typed(shown[1])}\n```", text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
