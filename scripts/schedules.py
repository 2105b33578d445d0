"""Random schedules of rollouts, thousands of every mode: does any hang?

python scripts/schedules.py                            # 10,000 of every mode
python scripts/schedules.py --count 500 --only fixed-1 fixed-4
python scripts/schedules.py --only held-4 --first 194 --count 1    # one again

Pipeline, admission, gate, waves and the pool of engines are the host's own; engines, agents, rewards and filters are made up, and
how long each of their calls takes is drawn, as are failures, interrupts, evaluations, refills and engines that die. Nothing sleeps:
time jumps to the next timer, so a schedule takes about 20 ms of a processor, and where nothing is ready and no timer is pending, it
hangs. A schedule fails too where a draw is used twice or trained too late, weights change under an answer, or the engine still
expects somebody in the end. With ``--exact`` each is played twice, at another pace and with other interrupts, and must give the
same tokens.
The last line is a JSON object; the exit code is 1 where something failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_authoring import write_tiny_model
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.rollouts.schedules import MODES, play

PART = 100
"""Schedules that a process plays in one go."""
EXACT = ("rounds", "fixed-1", "fixed-4")
"""Modes that give the same values again."""
tokenizer: Any = None


def begin(folder: str) -> None:
    """Prepare a process."""
    global tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder)
    logging.disable(logging.CRITICAL)  # what fails is made up
    gc.collect()
    gc.freeze()  # the libraries' objects stay, and would be looked at again and again


def part(mode: str, exact: bool, seeds: range) -> tuple[Counter[str], list[str]]:
    """How schedules ended, with what they had, and what was wrong."""
    ended, wrong = Counter[str](), []
    for seed in seeds:
        try:
            schedule, how = play(mode, seed, tokenizer, exact=exact)
            if exact and (schedule.steps, how) != ((again := play(mode, seed, tokenizer, 1, exact=True))[0].steps, again[1]):
                raise AssertionError("at another pace it gives other values")
        except Exception as error:
            wrong.append(f"{mode} {seed}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            continue
        ended.update([how, *schedule.world.has])
        ended["interrupts and kills"] += schedule.lives - 1
    return ended, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODES, nargs="+")
    parser.add_argument("--count", type=int, default=10_000, help="of every mode")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(folder)
        with ProcessPoolExecutor(asked.processes, initializer=begin, initargs=(folder,)) as pool:
            for mode in asked.only or (EXACT if asked.exact else MODES):
                started, ended, wrong = time.monotonic(), Counter[str](), list[str]()
                seeds = range(asked.first, asked.first + asked.count)
                parts = [seeds[first : first + PART] for first in range(0, asked.count, PART)]
                for counts, failures in pool.map(partial(part, mode, asked.exact), parts):
                    ended += counts
                    wrong += failures
                print(*wrong[:10], sep="\n", end="\n" if wrong else "")
                seconds = time.monotonic() - started
                had = ", ".join(f"{name} {count:,}" for name, count in ended.most_common())
                print(f"{mode}: {asked.count:,} schedules, {len(wrong)} wrong, {seconds:.0f} s; {had}", flush=True)
                result[mode] = {"schedules": asked.count, "wrong": len(wrong)}
    print(json.dumps(result))
    sys.exit(any(row["wrong"] for row in result.values()))


if __name__ == "__main__":
    main()
