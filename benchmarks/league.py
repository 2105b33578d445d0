"""Does a league teach more than one fixed opponent? Nim by the quickstart's model, by the real command line: RLOO against what the
policy begins with, against the policy of the step before (``latest``), and against a league (``pfsp``).

    python benchmarks/league.py                       # three ways, three seeds each: ten minutes
    python benchmarks/league.py --only pfsp --seeds 0 --steps 10

Nothing is estimated from games: the probabilities of all moves in all piles are computed by transformers, and from them by
recursion the probability to win, as mean over the piles that games begin with and over both seats. Prints as mean ± standard error
over the seeds how often a final policy wins against the initial one, against the final ones of the other ways with the same seed,
and against a player who makes no mistakes; how often it makes the right move where there is one; and, of the run's own metrics, its
win rate against its opponents in the last ten steps. Runs that are in ``--out`` already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_host import import_file

NIM = Path(__file__).parents[1] / "examples/nim.py"
PILES = import_file(str(NIM), "nim").PILES
WAYS = {
    "fixed": (),
    **{
        way: ("--with", "league", "--league.draw", way, "--league.every", every)
        for way, every in (("latest", "1"), ("pfsp", "5"))
    },
}
COMMON = ("--algo", "rloo", "--model", "quickstart", "--n", "8", "--batch-size", "16", "--lr", "1e-3", "--max-new-tokens", "1")
QUIET = ("--checkpoint.every", "0", "--trajectories.every", "0", "--trajectories.show", "0", "--train.threads", "1")

Player = list[list[float]]
"""``[pile][digit]``: the probability of each digit, of 0 for what is no legal move."""


def train(way: str, seed: int, steps: int, out: Path) -> Path:
    """Returns the directory of a run."""
    run = out / f"{way}-{steps}-{seed}"
    if not (run / "model").is_dir():
        game = ("--agent", f"{NIM}:Nim", "--data", f"{NIM}:piles")
        flags = [*COMMON, *game, *WAYS[way], *QUIET, "--seed", str(seed), "--steps", str(steps), "--run-dir", str(run)]
        command = [sys.executable, "-m", "rlhf_host.cli.main", "train", *flags]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr or done.stdout)
    return run


@torch.no_grad()
def player_of(model: Path) -> Player:
    """Returns how a model moves at temperature 1."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    digits = tokenizer.convert_tokens_to_ids([str(digit) for digit in range(10)])
    player = [[1.0] + [0.0] * 9]
    for pile in range(1, max(PILES) + 1):
        ids = torch.tensor([tokenizer.encode(f"{pile}=", add_special_tokens=False)])
        shares = policy(ids).logits[0, -1].double().softmax(-1)[digits].tolist()
        moves = [0.0] + [share if digit <= pile else 0.0 for digit, share in enumerate(shares) if digit]
        player.append([1 - sum(moves), *moves[1:]])
    return player


def right_player() -> Player:
    """Returns who takes the last digit, or one where that is none."""
    return [[1.0] + [0.0] * 9] + [[float(move == (pile % 10 or 1)) for move in range(10)] for pile in range(1, max(PILES) + 1)]


def wins(one: Player, other: Player) -> float:
    """Returns the probability that ``one`` wins, over all first piles and both seats."""
    mine, theirs = [0.0], [1.0]
    for pile in range(1, max(PILES) + 1):
        moves = range(1, min(pile, 9) + 1)
        now = sum(one[pile][move] * (theirs[pile - move] if pile > move else 1.0) for move in moves)
        then = other[pile][0] + sum(other[pile][move] * (mine[pile - move] if pile > move else 0.0) for move in moves)
        mine.append(now)
        theirs.append(then)
    return statistics.fmean((mine[pile] + theirs[pile]) / 2 for pile in PILES)


def right_moves(player: Player) -> float:
    """Returns the mean probability of the right move, over piles that have one."""
    return statistics.fmean(player[pile][pile % 10] for pile in range(1, max(PILES) + 1) if pile % 10)


def against_pool(run: Path) -> float:
    """Returns the win rate of the last ten steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.fmean(row.get("league/win_rate", row["reward/mean"]) for row in rows[-10:])


def shown(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", action="append", choices=list(WAYS), help="repeatable")
    parser.add_argument("--out", type=Path, default=Path("runs/league"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    ways = options.only or list(WAYS)
    runs = {(way, seed): train(way, seed, options.steps, options.out) for seed in options.seeds for way in ways}
    players = {each: player_of(run / "model") for each, run in runs.items()}
    first, best = player_of(Path(str(files("rlhf_host") / "models/quickstart"))), right_player()
    print("| opponent | wins: the initial policy | the other ways | no mistakes | right moves | own opponents |")
    print("|---|---|---|---|---|---|")
    print(f"| (before) | {wins(first, first):.3f} | | {wins(first, best):.3f} | {right_moves(first):.3f} | |")
    good = True
    for way in ways:
        own = [players[way, seed] for seed in options.seeds]
        others = [
            statistics.fmean([wins(players[way, seed], players[other, seed]) for other in ways if other != way] or [0.5])
            for seed in options.seeds
        ]
        initial = [wins(player, first) for player in own]
        good &= min(initial) > wins(first, first)
        columns = (
            initial,
            others,
            [wins(player, best) for player in own],
            [right_moves(player) for player in own],
            [against_pool(runs[way, seed]) for seed in options.seeds],
        )
        print(f"| {way} | {' | '.join(map(shown, columns))} |", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
