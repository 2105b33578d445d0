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
programs. A name from this table is enough for all commands that take a run: `rlhf show usual` is `rlhf show runs/usual`.
Without a name, `show`, `report` and `view` take the newest run in `runs/`, and `compare` the newest two; they say which.
Lines of a run's files that cannot be read are left out and named.

`rlhf runs --note usual "the rate of the paper"` writes a note about a run, into `note.txt` in its directory. Tables and pages
show it.

## How did one go?
"""
COMPARE = """Plotted are the metric of `checkpoint.best` or of the evaluation, and two more; `--metric NAME` chooses others.
Below are means of the first and last five steps ([Metrics](metrics.md) explains them), the warnings of the run, and answers
of its last step: the best and the worst, if their rewards differ. `rlhf episodes runs/usual` shows whole episodes.

## What is different between two?
"""
REST = """Settings that differ, curves with the same limits, and what each run answered to the same prompts, of an evaluation where
there was one.

## In the browser

```sh
pip install --find-links dist 'rlhf-runs[report]'
rlhf report runs/usual runs/slow -o report.html
```

![Three runs of the quickstart task in the browser: a table of runs, and metrics by question](assets/report.png)

The page is one file of about 5 MB, and the command says where it is. It asks no server for anything, so it can be attached to
an email or a pull request. Its Content-Security-Policy lets the browser run the page's own scripts and no others, whatever a
model or a data set has written. It fits a phone, and follows the browser's light or dark theme.

**Metrics** begins with a summary: what was trained, how far, the most important figure with its change and its 95 % interval,
and warnings. Of several runs it is a table with the settings that differ and the notes. *Group by* gives the runs that share
a setting one colour, and draws their mean.

Below, each question has its metrics: is it learning, is it stable, is it fast, what does it say? Each has its unit and a
sentence of help, those of [Metrics](metrics.md). A metric that never changes, or repeats another, has no chart: a line says
its value. *What does it say?* also shows the answers with the highest and lowest reward.

A click on a chart chooses a step. The address then ends in `#step=40`: this link opens the charts with their values at that
step, and its answers. `#tab=Answers&step=40&run=slow` opens the answers of one run.

**Answers** has the prompts of a step, with their ends, and on a click all of a prompt and all of a long answer. The speakers of
chats and of several turns are named. Each answer has its rewards by plugin, its advantage, and the branches and events of its
episode. With `--trajectories.tokens`, which saves tokens too, pictures are at their places, and tokens are coloured by
advantage, log-probability, version, or mismatch between trainer and sampler where the trainer computes log-probabilities
before the update (`--train.old-logprobs recompute`, `--kl.coef`). Without it, speakers are found by the lines that most chat
templates write.

**Settings** shows those that differ between runs first, then those that are not at their defaults, then the others. They are
the values that were used: where the configuration leaves the learning rate to the algorithm, it is the algorithm's.

**Environment** has how the run began and ended, plugins, and exact versions of all packages.

`rlhf view runs/usual` opens the same page on a run that goes on, and follows it. Only this machine reaches it, by an address
with a token. On a machine without a browser, `rlhf view RUN --no-browser --port 8100` prints the address, and `ssh -L
8100:127.0.0.1:8100 MACHINE` brings it to yours. It needs `rlhf-runs[view]`.

Of long runs, the newest answers come first, and the page says which are left out. By default a run saves some answers of
every step, and with the preset `quickstart` of every tenth: `--trajectories.every` and `--trajectories.max-per-step` say how many.

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
