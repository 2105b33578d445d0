"""Run the recipes of ``examples/recipes`` one after the other, and write their figures into the docs.

    python scripts/recipes.py                    # all
    python scripts/recipes.py --only sft         # one or several; repeatable
    python scripts/recipes.py --short            # two small steps of each, in a temporary directory: shows only that they run
    python scripts/recipes.py --pages            # no runs: write the parts of docs/recipes.md and docs/results.md

Runs are in ``runs/recipes``, and those of an earlier time are replaced. A recipe of which something is missing is left out, with a
line that says what. The command fails if a run fails, or a figure is not as the recipe expects it.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path

from rlhf_host.config.recipes import about, recipes
from rlhf_host.runs.directory import RunDirectory

ROOT = Path(__file__).resolve().parent.parent
RUNS = "runs/recipes"
RESULTS, PAGE = ROOT / "docs/results.md", ROOT / "docs/recipes.md"
NOT_RUN = "not run here"
BEGIN, END = "<!-- written by scripts/recipes.py -->\n\n", "<!-- end of what scripts/recipes.py writes -->\n\n"
SIZES = ("0.5B", "7B", "70B")
SHORT = ["--train.steps", "2", "--train.batch-size", "4", "--train.threads", "1", "--checkpoint.every", "0"]
SHORT_SAMPLES = ["--rollout.n", "2", "--rollout.max-new-tokens", "8"]
PARTS = 4
"""How many means stand for a curve."""
PRESENT = {
    "make smollm2": lambda: (ROOT / "models/SmolLM2-135M-Instruct/config.json").is_file(),
    "python -m rlhf_plugin_shapes.model models/shapes --target 0.4": lambda: (ROOT / "models/shapes/config.json").is_file(),
    "python -m rlhf_plugin_shell.lines_model models/shell": lambda: (ROOT / "models/shell/commands.jsonl").is_file(),
    "python -m rlhf_plugin_shell.fixes_model models/mini_swe": lambda: (ROOT / "models/mini_swe/tasks.jsonl").is_file(),
    "make setup-mini-swe": lambda: (ROOT / "build/mini-swe/bin/python").is_file(),
    "make setup-nemo-gym": lambda: (ROOT / "build/nemo-gym/bin/python").is_file(),
    "make setup-distributed": lambda: all(map(importlib.util.find_spec, ("ray", "deepspeed", "vllm"))),
}
"""What a recipe may need, and whether it is there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The mean of a metric over some steps."""

    metric: str
    first: int
    last: int
    value: float
    tolerance: float

    @property
    def steps(self) -> str:
        return f"{self.first}-{self.last}" if self.last > self.first else str(self.first)

    def __str__(self) -> str:
        return f"{self.value:g} ± {self.tolerance:g} ({self.steps})"

    def measured(self, run: RunDirectory) -> float:
        steps, values = run.curves.get(self.metric, ([], []))
        inside = [value for step, value in zip(steps, values, strict=True) if self.first <= step <= self.last]
        return statistics.fmean(inside) if inside else math.nan

    def holds(self, run: RunDirectory) -> bool:
        return abs(self.measured(run) - self.value) <= self.tolerance


class Recipe:
    """A file of ``examples/recipes``, and the run of it."""

    def __init__(self, name: str, file: Path):
        self.name, self.file, self.head = name, file, about(file)
        self.needs = self.head["needs"][0].split(", ")

    @property
    def before(self) -> list[str]:
        """Recipes to run before it."""
        return [need.rpartition(" ")[2] for need in self.needs if need.startswith("rlhf train --config ")]

    @property
    def samples(self) -> bool:
        return "\nrollout:" in self.file.read_text(encoding="utf-8")

    @property
    def more_when_short(self) -> list[str]:
        text = self.file.read_text(encoding="utf-8")
        more = SHORT_SAMPLES if self.samples else []
        # So few answers are all wrong, and a filter would leave none.
        return [*SHORT, *more, *(["--with", "dynamic_filtering=none"] if "dynamic_filtering:" in text else [])]

    @property
    def missing(self) -> list[str]:
        """What it needs and is not there."""
        return [need for need in self.needs if need in PRESENT and not PRESENT[need]()]

    @cached_property
    def expected(self) -> list[Expected]:
        """``METRIC FIRST-LAST VALUE within TOLERANCE, ...`` of each line."""
        found = []
        for line in self.head["expected"]:
            metric, _, parts = line.partition(" ")
            for part in parts.split(", "):
                match = re.fullmatch(r"(\d+)(?:-(\d+))? (-?[\d.]+) within ([\d.]+)", part)
                if match is None:
                    raise SystemExit(f"{self.file}: cannot be read: expected: {part!r}")
                first, last, value, tolerance = match.groups()
                found.append(Expected(metric, int(first), int(last or first), float(value), float(tolerance)))
        return found

    def run(self) -> RunDirectory | None:
        """The finished run in ``runs/recipes``."""
        path = ROOT / RUNS / self.name
        run = RunDirectory(path) if (path / "run.json").is_file() else None
        return run if run is not None and run.status == "finished" else None

    def as_expected(self) -> bool:
        """Whether every figure is, or there is no run."""
        run = self.run()
        return run is None or all(each.holds(run) for each in self.expected)


def in_order() -> list[Recipe]:
    """By name, each after those that it needs."""
    known = {name: Recipe(name, file) for name, file in recipes().items()}
    ordered: dict[str, Recipe] = {}

    def place(name: str) -> None:
        for earlier in known[name].before:
            place(earlier)
        ordered.setdefault(name, known[name])

    for name in known:
        place(name)
    return list(ordered.values())


def train(recipe: Recipe, folder: Path, more: list[str]) -> int:
    """The exit code of its run in ``folder``."""
    shutil.rmtree(folder / RUNS / recipe.name, ignore_errors=True)
    command = [str(Path(sys.executable).parent / "rlhf"), "train", "--config", recipe.name, *more]
    return subprocess.run(command, cwd=folder, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False).returncode


# --- pages ----------------------------------------------------------------------------------------


def rows(recipe: Recipe) -> list[list[str]]:
    """A line of the table for each metric, with the figures that are expected of it and those of the run."""
    run = recipe.run()
    if run is None:
        return [[recipe.name, "", "", "", NOT_RUN]]
    took = f"{run.step} steps, {run.about['ended'] - run.about['started']:.0f} s"
    lines = []
    for metric, expected in groupby(recipe.expected, lambda each: each.metric):
        figures = [
            f"{each.steps}: {each.value:g} ± {each.tolerance:g}, {each.measured(run):.3g}{'' if each.holds(run) else ' **missed**'}"
            for each in expected
        ]
        lines.append([*(["", ""] if lines else [recipe.name, took]), metric, curve(run, metric), "; ".join(figures)])
    return lines


def curve(run: RunDirectory, metric: str) -> str:
    """Its means over parts of the run, or its few values."""
    values = run.curves.get(metric, ([], []))[1]
    count = min(PARTS, len(values))
    bounds = [round(part * len(values) / count) for part in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in pairwise(bounds)]
    return " → ".join(f"{mean:.3g}" for mean in means)


def results(ordered: list[Recipe]) -> str:
    """The section of ``docs/results.md``."""
    lines = [line for recipe in ordered for line in rows(recipe)]
    table = ""
    for name, took, metric, *figures in lines:
        linked = f"[`{name}`](recipes.md#{name})" if name else ""
        table += "| " + " | ".join([linked, took, metric and f"`{metric}`", *figures]) + " |\n"
    if any("**missed**" in line[-1] or line[-1] == NOT_RUN for line in lines):
        answer = f"Not all: see the lines with **missed** or *{NOT_RUN}*."
    else:
        answer = "Yes: every metric of all recipes was where its file says, within the tolerance written there."
    return f"""## Do the recipes learn? {{ #recipes }}

{answer}

<details markdown="1">
<summary>Commands and figures</summary>

    make recipes          # scripts/recipes.py: every file of examples/recipes, one after the other

[Recipes](recipes.md) says what each of them is. At these steps its file expects a value within a tolerance; after the comma is that
of this run. A curve has the metric's means over fourths of the run, or its values where it has few: those of `eval/` are before and
after. SmolLM2-135M, for `shapes`, `shell` and `sdpo` models of less than half a million weights; one seed. The seconds are those of
the whole run on two cores; all together take 40 minutes.

| recipe | run | metric | curve | steps: expected, here |
|---|---|---|---|---|
{table}
</details>

"""


def page(ordered: list[Recipe]) -> str:
    """The part of ``docs/recipes.md`` that the heads of the files say."""
    text = ""
    for recipe in ordered:
        head = recipe.head
        needs = ", ".join(f"`{need}`" if need != "nothing" else need for need in recipe.needs)
        text += f"### {recipe.name} {{ #{recipe.name} }}\n\n{head['about'][0]}\n\n"
        text += f"- **Needs** {needs}. **Data** {'; '.join(head['data'])}. **Reward** {'; '.join(head['reward'])}\n"
        expected = [
            f"`{metric}` {', '.join(map(str, figures))}"
            for metric, figures in groupby(recipe.expected, lambda each: each.metric)
        ]
        text += f"- **Expect** {'; '.join(expected)}\n"
        text += "".join(f"- {line}\n" for line in head.get("note", [])) + "\n"
    return text + larger(ordered)


def larger(ordered: list[Recipe]) -> str:
    """The flags for larger models that most recipes of a kind have."""
    text = "## Larger models { #larger }\n\n"
    text += "The head of each file has the flags for 0.5B, 7B and 70B. Where an installed package has the file:\n"
    text += """
```sh
python -c 'from rlhf_host.config.recipes import recipe_file; print(recipe_file("lora"))'
```

These are the flags that most recipes have:

| model | recipes that sample | recipes on data sets |
|---|---|---|
"""
    for size in SIZES:
        cells = [
            majority([recipe.head[size][0] for recipe in ordered if recipe.samples is samples]) for samples in (True, False)
        ]
        text += f"| {size} | {' | '.join(f'`{cell}`' for cell in cells)} |\n"
    return text + "\n"


def majority(flags: list[str]) -> str:
    """Those that more than half of the lines have, in the order of the first."""
    lines = [re.findall(r"--\S+ (?:'[^']*'|\S+)", line) for line in flags]
    known = dict.fromkeys(flag for line in lines for flag in line)
    return " ".join(flag for flag in known if 2 * sum(flag in line for line in lines) > len(lines))


def write_pages(ordered: list[Recipe]) -> None:
    for file, text in ((PAGE, page(ordered)), (RESULTS, results(ordered))):
        before, mark, rest = file.read_text(encoding="utf-8").partition(BEGIN)
        if not mark:
            raise SystemExit(f"{file} has no line {BEGIN.strip()}")
        file.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", choices=recipes(), help="this recipe; repeatable")
    parser.add_argument("--short", action="store_true", help="two small steps of each")
    parser.add_argument("--pages", action="store_true", help="only write the pages")
    options = parser.parse_args()
    ordered = in_order()
    chosen = [recipe for recipe in ordered if not options.only or recipe.name in options.only]
    if options.pages:
        return write_pages(ordered)
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if options.short else ROOT
        if options.short:
            for part in ("models", "build"):
                (folder / part).symlink_to(ROOT / part)
        for recipe in chosen:
            print(f"\n=== {recipe.name}", flush=True)
            if recipe.missing:
                print(f"Left out: it needs {', '.join(recipe.missing)}", flush=True)
            elif train(recipe, folder, recipe.more_when_short if options.short else []):
                failed.append(recipe.name)
    if not options.short:
        lines = [row for recipe in chosen for row in rows(recipe)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        print("\n" + "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines))
        failed += [recipe.name for recipe in chosen if not recipe.as_expected()]
        if not options.only:
            write_pages(ordered)
    if failed:
        raise SystemExit(f"Failed, or not as expected: {', '.join(dict.fromkeys(failed))}")


if __name__ == "__main__":
    main()
