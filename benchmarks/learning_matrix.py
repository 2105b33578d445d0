"""Does everything learn? Trains every installed online algorithm that needs rewards alone, and GRPO with every policy loss, on
two-digit sums (``half_trained.py``): same budget, same seeds, by the real command line. Leaves with 1 unless the
median of every row ends at 0.85 or more and no run ends below its start.

    python benchmarks/learning_matrix.py                             # everything: some 40 runs of a minute or two
    python benchmarks/learning_matrix.py --only rloo --only grpo:gspo
    python benchmarks/learning_matrix.py --steps 4 --seeds 0 --only ppo -- --eval.data.max-samples 100

``results.json`` in ``--out`` grows run by run, so that the same command goes on where it was stopped; ``table.md`` is the table.
Remove ``--out`` to begin anew, after a change to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import typing
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import half_trained

from rlhf_host import Needs
from rlhf_host.functional import PolicyLossOptions
from rlhf_host.plugins.discovery import discover
from rlhf_host.plugins.selection import build

GOAL = 0.85
PASS = "eval/pass@1"
OWN = "own"
EVERY_LOSS = "grpo"
"""The algorithm that is trained with every policy loss."""

EXTRA = {
    "ppo": ["--critic.lr", "1e-3", "--critic.schedule", "linear", "--critic.warmup-steps", "10"],
    "remax": ["--agent", "remax"],
}
"""Algorithm → further flags: what it has beyond an actor must be set for this task too."""

QUIET = ["--checkpoint.every", "0", "--checkpoint.final", "false", "--trajectories.every", "0", "--trajectories.show", "0"]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table."""

    algorithm: str
    loss: str = "clip"
    """Policy loss; ``own``: the algorithm has a loss of its own."""

    def __str__(self) -> str:
        return f"{self.algorithm}:{self.loss}"

    @property
    def flags(self) -> list[str]:
        return ["--algo", self.algorithm, *([] if self.loss == OWN else ["--algo.loss", self.loss])]


@dataclass(frozen=True, slots=True)
class Run:
    """One training run of a row."""

    row: Row
    seed: int
    steps: int
    flags: tuple[str, ...]
    """All that decides its result."""

    def __str__(self) -> str:
        return f"{self.row}:{self.seed}"


def rows() -> list[Row]:
    """Every installed algorithm that learns from rewards of sampled answers, then GRPO with the other losses."""
    found = {info.name: build(info, {}) for info in discover() if info.kind == "algo" and info.status == "ok"}
    algorithms = [Row(name, _loss(found[name])) for name in sorted(found) if _from_rewards(found[name].needs())]
    losses = typing.get_args(PolicyLossOptions.model_fields["loss"].annotation)
    others = [Row(EVERY_LOSS, loss) for loss in losses if loss != "clip" and EVERY_LOSS in found]
    return [*algorithms, *others]


def _from_rewards(needs: Needs) -> bool:
    """Returns True unless it needs a model beside actor and critic, such as a teacher or a reference."""
    return needs.data == "prompts" and needs.rewards and {role.name for role in needs.roles} <= {"actor", "critic"}


def _loss(plugin: Any) -> str:
    field = plugin.Options.model_fields.get("loss")
    return "clip" if field is not None and "clip" in typing.get_args(field.annotation) else OWN


def chosen(wanted: Sequence[str]) -> list[Row]:
    """The rows that ``--only`` names, as ``algorithm`` or ``algorithm:loss``; all without it."""
    known = rows()
    unknown = [name for name in wanted if name not in {text for row in known for text in (row.algorithm, str(row))}]
    if unknown:
        sys.exit(f"no such row: {', '.join(unknown)}; there are {', '.join(map(str, known))}")
    return [row for row in known if not wanted or row.algorithm in wanted or str(row) in wanted]


def planned(rows: Iterable[Row], seeds: Sequence[int], steps: int, more: Sequence[str]) -> list[Run]:
    runs = []
    for row in rows:
        flags = [*half_trained.flags(), *row.flags, "--reward", "math_verifier"]
        flags += ["--train.steps", str(steps), "--train.threads", "1", *QUIET, *EXTRA.get(row.algorithm, []), *more]
        runs += [Run(row, seed, steps, (*flags, "--seed", str(seed))) for seed in seeds]
    return runs


def train(run: Run, out: Path) -> dict[str, Any]:
    """One run in a process of its own, in ``out``; its result, or what went wrong."""
    run_dir = out / str(run).replace(":", "-")
    shutil.rmtree(run_dir, ignore_errors=True)
    command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *run.flags, "--run-dir", str(run_dir)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}, capture_output=True, text=True, check=False
    )
    result: dict[str, Any] = {"algorithm": run.row.algorithm, "loss": run.row.loss, "seed": run.seed, "flags": list(run.flags)}
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        return {**result, "error": lines[-1] if lines else f"exit code {done.returncode}"}
    metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [[row["step"], row[PASS]] for row in metrics if PASS in row]
    if not curve or curve[-1][0] != run.steps:
        return {**result, "error": f"not evaluated after step {run.steps}"}
    return {
        **result,
        "before": curve[0][1],
        "after": curve[-1][1],
        "curve": curve,
        "seconds_per_step": statistics.median(row["time/step"] for row in metrics if "time/step" in row),
        "memory_gb": max(row["memory/rss_gb"] for row in metrics if "memory/rss_gb" in row),
    }


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    aside = path.with_name(f".{path.name}.partial")
    aside.write_text(text)
    aside.replace(path)


def table(runs: Sequence[Run], results: dict[str, dict[str, Any]]) -> tuple[str, bool]:
    """The table in Markdown, and whether all of it is there and good."""
    lines = [
        "| algorithm | loss | seeds | pass@1 before | median after | min | s/step | peak memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = True
    for row in dict.fromkeys(run.row for run in runs):
        done = [results[str(run)] for run in runs if run.row == row and str(run) in results]
        ended = [result for result in done if "error" not in result]
        wanted = sum(run.row == row for run in runs)
        good &= len(ended) == wanted
        name = f"| `{row.algorithm}` | `{row.loss}` | {len(ended)}/{wanted} |"
        if not ended:
            lines.append(f"{name} | | | | |")
            continue
        after = [result["after"] for result in ended]
        good &= statistics.median(after) >= GOAL and all(result["after"] >= result["before"] for result in ended)
        before, pace = (statistics.median(result[key] for result in ended) for key in ("before", "seconds_per_step"))
        memory = max(result["memory_gb"] for result in ended)
        lines.append(
            f"{name} {before:.3f} | {statistics.median(after):.3f} | {min(after):.3f} | {pace:.2f} | {memory:.2f} GB |"
        )
    return "\n".join(lines) + "\n", good


def main() -> int:
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        cut = arguments.index("--")
        arguments, more = arguments[:cut], arguments[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], epilog="What follows -- goes to every run.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--only", action="append", default=[], metavar="ALGORITHM[:LOSS]", help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/learning-matrix"))
    options = parser.parse_args(arguments)

    runs = planned(chosen(options.only), options.seeds, options.steps, more)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "results.json"
    results: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    # What another budget gave, or what failed, is done again.
    kept = {str(run) for run in runs if results.get(str(run), {}).get("flags") == list(run.flags)}
    kept = {name for name in kept if "error" not in results[name]}
    for run in runs:
        if str(run) not in kept:
            results.pop(str(run), None)
    left = [run for run in runs if str(run) not in kept]
    print(f"{len(runs)} runs, {len(kept)} of them done before; results in {options.out}", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        running = {pool.submit(train, run, options.out): run for run in left}
        try:
            for future in as_completed(running):
                run, result = running[future], future.result()
                results[str(run)] = result
                write(file, json.dumps(results, indent=1) + "\n")
                write(options.out / "table.md", table(runs, results)[0])
                told = result.get("error") or f"{result['before']:.3f} to {result['after']:.3f}"
                print(f"{run}  {told}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    text, good = table(runs, results)
    write(options.out / "table.md", text)
    print(f"\n{text}\n{'good' if good else f'not good: every median must reach {GOAL}, and no run end below its start'}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
