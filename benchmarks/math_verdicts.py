"""Verdicts of ``math_verifier``: false right, false wrong and unjudged, by kind, on answers that a person has judged.

python benchmarks/math_verdicts.py [FILE.jsonl ...] [--show]
python benchmarks/math_verdicts.py --solutions FILE.jsonl

A line of a file is ``{"kind", "text", "label", "right"}``; without a file: those of the package's tests. ``--solutions``: a file
in the form of GSM8K's, whose solutions are judged against their own answers, against those of others, and without their last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rlhf_plugin_math_verifier import MathVerifier

from rlhf_host import Outcome, Segment, Task, Trajectory, Unjudged

ANSWERS = Path(__file__).parents[1] / "plugins/builtin_rewards/rlhf-plugin-math-verifier/tests/answers"


def verdicts(answers: list[tuple[str, Any]]) -> list[str]:
    """``right``, ``wrong`` or ``unjudged: WHY`` for each text and label."""
    verifier = MathVerifier(MathVerifier.Options(workers=2))

    def trajectory(text: str, label: Any) -> Trajectory:
        segments = [Segment("prompt", [0]), Segment("action", [1])]
        return Trajectory("e", "g", Task("q", ground_truth=label), segments, decode=lambda ids: text if 1 in ids else "q")

    rewards = asyncio.run(verifier.score([trajectory(*answer) for answer in answers], None))  # type: ignore[arg-type]
    verifier.run_finished(Outcome("finished", 1))
    return [
        f"unjudged: {reward.reason}" if isinstance(reward, Unjudged) else "right" if reward.score else "wrong"
        for reward in rewards
    ]


def by_kind(file: Path, *, show: bool) -> None:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row, verdict in zip(rows, verdicts([(row["text"], row["label"]) for row in rows]), strict=True):
        word = verdict.partition(":")[0]
        kind = word if word == "unjudged" or row["right"] == (word == "right") else f"false {word}"
        counts[row["kind"]][kind] += 1
        counts["all"][kind] += 1
        if show and kind not in ("right", "wrong"):
            print(kind, json.dumps(row, ensure_ascii=False), verdict if word == "unjudged" else "")
    print(f"{file.name}: {len(rows)} answers, {sum(row['right'] for row in rows)} of them right")
    for kind, count in sorted(counts.items(), key=lambda item: item[0] == "all"):
        figures = ", ".join(f"{count[name]} {name}" for name in ("false right", "false wrong", "unjudged"))
        print(f"  {kind:42} {count.total():4} answers: {figures}")


def solutions(file: Path) -> None:
    whole = [json.loads(line)["answer"] for line in file.read_text(encoding="utf-8").splitlines()]
    labels = [solution.rpartition("####")[2].strip() for solution in whole]
    others = random.Random(0).sample(labels, len(labels))
    prose = [re.sub("<<[^<>]*>>", "", solution.rpartition("####")[0]).strip() for solution in whole]
    tries = {"whole solutions": (whole, labels), "answers of others": (whole, others), "without the last line": (prose, labels)}
    for name, (texts, expected) in tries.items():
        started = time.process_time()
        found = Counter(verdict.partition(":")[0] for verdict in verdicts(list(zip(texts, expected, strict=True))))
        rate = len(texts) / (time.process_time() - started)
        same = sum(a.replace(",", "") == b.replace(",", "") for a, b in zip(labels, expected, strict=True))
        print(f"{name}: {dict(found)}; {same} have the label's number; {rate:.0f} per second of processor time in the caller")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(ANSWERS.glob("*.jsonl")))
    parser.add_argument("--show", action="store_true", help="print each answer that is not judged as the person does")
    parser.add_argument("--solutions", type=Path, help="a file in the form of GSM8K's")
    options = parser.parse_args()
    if options.solutions:
        return solutions(options.solutions)
    for file in options.files:
        by_kind(file, show=options.show)


if __name__ == "__main__":
    main()
