"""Verdicts of ``math_verifier`` beside ``math-verify`` alone: false right, false wrong and unjudged, by kind.

python benchmarks/verifier.py                                        the generated answers, and those that a person judged
python benchmarks/verifier.py --shown FILE ... --unseen FILE ...     answers of these files
python benchmarks/verifier.py --gsm8k DIR                            183 solutions of GSM8K, their last number in ten decorations
python benchmarks/verifier.py --solutions FILE                       GSM8K's solutions against their answers, and against others

A line of a file is ``{"kind", "text", "label", "right"}``. What the reward judges otherwise than the row is printed, but never from
an unseen file, and from none with ``--kinds-only``. The reward is called as in a run, with its own processes. ``math-verify`` is
its ``parse`` and ``verify`` with the default extraction, in a process; a label without delimiters stands between dollars. A label
that it cannot parse, or an answer that takes longer than two minutes, is unjudged.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf_plugin_math_verifier import MathVerifier

from rlhf_host import Outcome, Segment, Task, Trajectory, Unjudged

TESTS = Path(__file__).parents[1] / "plugins/builtin_rewards/rlhf-plugin-math-verifier/tests"
TIMEOUT_S = 30
"""Seconds for ``math-verify`` to parse, and to compare: long, since it counts while other programs have the processor."""
COLUMNS = ("false right", "false wrong", "unjudged")
DECORATED = 183
DECORATIONS = {
    "as it is": "{before}{number}{after}",
    "bold": "{before}**{number}**{after}",
    "italics": "{before}*{number}*{after}",
    "code": "{before}`{number}`{after}",
    "LaTeX": "{before}${formula}${after}",
    "box": "{before}\\boxed{{{formula}\\,}}{after}",
    "quote": "{lines}> {last}",
    "list item": "{lines}- {last}",
    "JSON": '{lines}{{"answer": {plain}}}',
    "box tokens": "{before}<|begin_of_box|>{number}<|end_of_box|>{after}",
}
Row = dict[str, Any]


def verdicts(answers: list[tuple[str, Any]]) -> list[str]:
    """``right``, ``wrong`` or ``unjudged: WHY`` of the reward for each text and label."""
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


def alone(answer: tuple[str, Any]) -> str:
    """The verdict of ``math-verify`` alone; in a process, whose main thread has the signal that its time limit needs."""
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    text, label = answer[0], str(answer[1])
    gold = parse(label if re.search(r"(?<!\\)\$|\\\(|\\\[|\\boxed", label) else f"${label}$", parsing_timeout=TIMEOUT_S)
    if not gold:
        return "unjudged"
    return "right" if verify(gold, parse(text, parsing_timeout=TIMEOUT_S), timeout_seconds=TIMEOUT_S) else "wrong"


def verdicts_alone(answers: list[tuple[str, Any]]) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(1)
    try:
        for answer in answers:
            try:
                yield pool.apply_async(alone, (answer,)).get(4 * TIMEOUT_S)
            except multiprocessing.TimeoutError:
                pool.terminate()
                pool = context.Pool(1)
                yield "unjudged"
    finally:
        pool.terminate()


def error_of(row: Row, verdict: str) -> str:
    """One of ``COLUMNS``, or nothing if the verdict is the row's."""
    word = verdict.partition(":")[0]
    return word if word == "unjudged" else f"false {word}" if row["right"] != (word == "right") else ""


def table(name: str, rows: list[Row], *, texts: bool) -> None:
    answers = [(row["text"], row["label"]) for row in rows]
    counts: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for subject, judged in (("math_verifier", verdicts(answers)), ("math-verify", verdicts_alone(answers))):
        for row, verdict in zip(rows, judged, strict=True):
            error = error_of(row, verdict)
            for kind in (row["kind"], "all"):
                counts[kind][subject, error] += 1
            if texts and error and subject == "math_verifier":
                print(error, json.dumps(row, ensure_ascii=False), verdict if error == "unjudged" else "")
    print(f"\n{name}: {len(rows)} answers of {len(counts) - 1} kinds, {sum(row['right'] for row in rows)} of them right\n")
    subjects = ("math_verifier", "math-verify")
    print(f"{'':46}{'':11}{subjects[0]:^30}  {subjects[1]:^30}")
    print(f"{'kind':46}{'right':>5}{'wrong':>6}" + f"{'f. right':>10}{'f. wrong':>10}{'unjudged':>10}  " * 2)
    for kind, count in sorted(counts.items(), key=lambda item: item[0] == "all"):
        right = sum(row["right"] for row in rows if kind in (row["kind"], "all"))
        wrong = sum(not row["right"] for row in rows if kind in (row["kind"], "all"))
        figures = ("".join(f"{count[subject, column]:10}" for column in COLUMNS) for subject in subjects)
        print(f"{kind[:45]:46}{right:5}{wrong:6}" + "  ".join(figures))
    shares = []
    for subject in subjects:
        of = (wrong, right, len(rows))
        parts = (
            f"{100 * counts['all'][subject, column] / max(1, all_):9.1f}%" for column, all_ in zip(COLUMNS, of, strict=True)
        )
        shares.append("".join(parts))
    print(f"{'per cent of the wrong, of the right, of all':57}" + "  ".join(shares), flush=True)


def read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def prose(solution: str) -> str:
    return re.sub("<<[^<>]*>>", "", solution.rpartition("####")[0]).strip()


def decorated(directory: Path) -> Iterator[Row]:
    """The first solutions whose last number is their answer, without their line of ####, in ten decorations."""
    found = 0
    for solution in (row["answer"] for row in read(directory / "gsm8k_test.jsonl")):
        label, text = solution.rpartition("####")[2].strip(), prose(solution)
        split = re.fullmatch(r"(.*?)(\$?)(\d[\d,]*(?:\.\d+)?)(\D*)", text, re.DOTALL)
        if split is None or split[3].replace(",", "") != label.replace(",", ""):
            continue
        parts = {
            "before": split[1],
            "number": split[2] + split[3],
            "formula": split[2].replace("$", "\\$") + split[3],
            "after": split[4],
        }
        parts |= {
            "plain": split[3].replace(",", ""),
            "lines": text[: text.rfind("\n") + 1],
            "last": text[text.rfind("\n") + 1 :],
        }
        for name, form in DECORATIONS.items():
            yield {"kind": f"GSM8K, {name}", "text": form.format(**parts), "label": label, "right": True}
        found += 1
        if found == DECORATED:
            return


def solutions(file: Path) -> None:
    whole = [row["answer"] for row in read(file)]
    labels = [solution.rpartition("####")[2].strip() for solution in whole]
    others = random.Random(0).sample(labels, len(labels))
    tries = {
        "whole solutions": (whole, labels),
        "answers of others": (whole, others),
        "without the last line": ([prose(solution) for solution in whole], labels),
    }
    for name, (texts, expected) in tries.items():
        started = time.process_time()
        found = Counter(verdict.partition(":")[0] for verdict in verdicts(list(zip(texts, expected, strict=True))))
        rate = len(texts) / (time.process_time() - started)
        same = sum(a.replace(",", "") == b.replace(",", "") for a, b in zip(labels, expected, strict=True))
        print(f"{name}: {dict(found)}; {same} have the label's number; {rate:.0f} per second of processor time in the caller")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shown", nargs="+", type=Path, default=[], help="files of answers")
    parser.add_argument("--unseen", nargs="+", type=Path, default=[], help="files whose texts are never printed")
    parser.add_argument("--kinds-only", action="store_true", help="print no text of any file")
    parser.add_argument("--gsm8k", type=Path, metavar="DIR", help="the folder of gsm8k_test.jsonl")
    parser.add_argument("--solutions", type=Path, metavar="FILE", help="a file in the form of GSM8K's")
    options = parser.parse_args()
    if not (options.shown or options.unseen or options.gsm8k or options.solutions):
        options.shown = [*sorted((TESTS / "answers").glob("*.jsonl")), TESTS / "generated/shown.jsonl"]
        options.unseen = [file for file in [TESTS / "generated/unseen.jsonl"] if file.exists()]
    for file in options.shown:
        table(file.name, read(file), texts=not options.kinds_only)
    for file in options.unseen:
        table(file.name, read(file), texts=False)
    if options.gsm8k:
        table("GSM8K", list(decorated(options.gsm8k)), texts=not options.kinds_only)
    if options.solutions:
        solutions(options.solutions)


if __name__ == "__main__":
    main()
