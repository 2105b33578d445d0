"""Two sums in one conversation on the model of ``half_trained.py``: how often the second is right, while a run trains on both.

python benchmarks/two_turns.py --algo rloo --steps 400

The model has seen one sum a row, so it is first shown some conversations of two (``--shown`` rows, one pass of sft).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import half_trained

import rlhf_host
from rlhf_host import Action, Episode, Needs, Step, hookimpl


class TwoSums:
    """Asks the task's sum, then another one, whatever the answer was. Each right answer is worth one half."""

    @hookimpl
    def needs(self) -> Needs:
        return Needs(rewards=False)

    @hookimpl
    async def agent_reset(self, episode: Episode) -> Step:
        rng = random.Random(f"{episode.seed}")  # the same second sum for the whole group
        episode.state = [(episode.task.prompt, episode.task.ground_truth)]
        first, second = rng.randint(10, 99), rng.randint(10, 99)
        episode.state.append((f"{first}+{second}=", str(first + second)))
        return Step()

    @hookimpl
    async def agent_step(self, episode: Episode, action: Action) -> Step:
        right = action.text.strip() == episode.state[episode.turn][1]
        name = ("two/first", "two/second")[episode.turn]
        step = Step(reward=right / 2, metrics={name: float(right)}, done=episode.turn == 1)
        if not step.done:
            step.observation = episode.state[1][0]
        return step


def conversations(count: int) -> Iterator[dict[str, str]]:
    """First sums, and second ones behind a right answer, in turn."""
    rng = random.Random(1)
    for number in range(count):
        a, b, c, d = (rng.randint(10, 99) for _ in range(4))
        before = f"{a}+{b}={a + b}<eos>" if number % 2 else ""
        yield {"prompt": f"{before}{c}+{d}=", "completion": str(c + d)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", default="rloo")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shown", type=int, default=80000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        shown = Path(directory) / "shown.jsonl"
        shown.write_text("".join(json.dumps(row) + "\n" for row in conversations(asked.shown)))
        no_checkpoints = {"every": 0, "best": None}
        sft = {"batch_size": 256, "threads": 1, "autocast": "off"}
        rlhf_host.train(
            algo="sft",
            model=str(half_trained.directory()),
            data=str(shown),
            run_dir=f"{directory}/shown",
            actor={"lr": 1e-3},
            train=sft,
            checkpoint=no_checkpoints,
        )
        rlhf_host.train(
            algo=asked.algo,
            agent=TwoSums(),
            config=half_trained.SETTINGS,
            model=f"{directory}/shown/model",
            run_dir=f"{directory}/run",
            seed=asked.seed,
            actor={"lr": asked.lr},
            train={"steps": asked.steps},
            eval={"every": 25},
            checkpoint=no_checkpoints,
        )
        rows = [json.loads(line) for line in Path(f"{directory}/run/metrics.jsonl").read_text().splitlines()]
    print(f"{asked.algo}: step, first and second answer right, of 1500 held-out first sums")
    for row in rows:
        if "eval/two/second" in row:
            print(f"{row['step']:5d}  {row['eval/two/first']:.3f}  {row['eval/two/second']:.3f}")


if __name__ == "__main__":
    main()
