"""Write ``docs/runs.md``: two short runs of the quickstart task, looked at in a terminal of 80 columns.

    python scripts/runs_page.py

The commands are really run, in an empty directory. It takes about two minutes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from screen import COLUMNS, run

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/runs.md"
TRAIN = "rlhf train --algo rloo --reward math_verifier --train.steps 80"

HEAD = """# Looking at runs

`rlhf runs`, `rlhf show` and `rlhf compare` read run directories in the terminal. `rlhf report` writes a page for the
browser, `rlhf view` opens one that follows a run. They are commands of the package `rlhf-runs` (`pip install --find-links
dist rlhf-runs`; `make setup` installs it). All work on runs that are under way, finished or killed, and need neither the
model nor a GPU. `python scripts/runs_page.py` ran the commands on this page in a terminal of 80 columns, after two short
runs of the quickstart task:

```sh
{train} --run-dir runs/usual
{train} --run-dir runs/slow --actor.lr 1e-4
```

## Which runs are there?
"""
SHOW = """`failed` and `interrupted` runs are told from `killed` ones, which could write nothing at their end. `--json` is for
programs.

## How did one go?
"""
COMPARE = """Plotted are the metric of `checkpoint.best` or of the evaluation, and two more; `--metric NAME` chooses others.
Below are means of the first and last five steps, the warnings of the run, and answers of its last step. `rlhf episodes runs/usual`
shows whole episodes.

## What is different between two?
"""
REST = """Settings that differ, curves with the same limits, and what each run answered to the same prompts, of an evaluation where
there was one.

## In the browser

```sh
pip install --find-links dist 'rlhf-runs[report]'
rlhf report runs/usual runs/slow -o report.html
```

![Three runs of the quickstart task in the browser: a table of runs, and curves above each other](assets/report.png)

The page is one file of about 5 MB. It asks no server for anything, so it can be attached to an email or a pull request. It
has

- **curves** of every metric, over steps or minutes, smoothed if you like, the runs above each other;
- **answers** by group: the prompt, each answer with its rewards by plugin, its advantage and the turns, branches and events
  of its episode. With `--trajectories.tokens`, which saves tokens too, tokens are coloured by advantage, log-probability,
  version, or mismatch between trainer and sampler where the trainer computes log-probabilities before the update
  (`--train.old-logprobs recompute`, `--kl.coef`);
- **settings** that are not at their defaults, those that differ in bold;
- **environment**: how the run began and ended, plugins, and exact versions of all packages.

`rlhf view runs/usual` opens the same page on a run that goes on, and follows it. Only this machine reaches it, by an address
with a token. On a machine without a browser, `rlhf view RUN --no-browser --port 8100` prints the address, and `ssh -L
8100:127.0.0.1:8100 MACHINE` brings it to yours. It needs `rlhf-runs[view]`.

Of long runs, the newest answers come first, and the page says which are left out. By default a run saves some answers of
every step: `--trajectories.every` and `--trajectories.max-per-step` say how many.

What to do with the model of a run: [After the run](after-the-run.md).

## From Python

```python
import rlhf_host

run = rlhf_host.load_run("runs/usual")
print(run.outcome.status, run.files.headline)
steps, rewards = run.files.curve("reward/mean")
print(run.generate(["12+34="], n=2))
```

`load_run` gives the object that `rlhf_host.train` gives. `run.files` has what the directory has: `settings`, `metrics`,
`curves`, `trajectories`, `checkpoints`, `draws`. Both are part of the host and need no other package.
"""


def main() -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "COLUMNS": str(COLUMNS), "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:

        def typed(command: str, head: int = 200) -> str:
            code, lines = run(command, Path(folder), environment)
            if code:
                raise SystemExit("\n".join([f"{command} gave {code}", *lines]))
            lines = "\n".join(line.rstrip() for line in lines).strip().splitlines()
            shown = lines if len(lines) <= head else [*lines[:head], f"... ({len(lines) - head} lines)"]
            return "\n".join(["```console", f"$ {command}", *shown, "```", "", ""])

        typed(f"{TRAIN} --run-dir runs/usual")
        typed(f"{TRAIN} --run-dir runs/slow --actor.lr 1e-4")
        parts = [HEAD.format(train=TRAIN), "\n", typed("rlhf runs"), SHOW, "\n", typed("rlhf show runs/usual")]
        parts += [COMPARE, "\n", typed("rlhf compare runs/usual runs/slow"), REST]
    PAGE.write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
