"""Generates answers whose truth follows from how they are built: numbers in many forms, places and languages, and formulas.

python generate_answers.py [--seed 49]        writes shown.jsonl and unseen.jsonl beside this file

A kind is a way to write. Half of the kinds, by chance, are shown; the others are for measuring alone. ``forms.toml`` has the
kinds of text around a number, ``written_values.py`` those of the value itself. A row is ``{"kind", "text", "label", "right"}``.
Wrong rows are near misses: another number of the same text, a factor, a sign, a part.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from written_values import KINDS

SEED = 49
HERE = Path(__file__).parent
FORMS = tomllib.loads((HERE / "forms.toml").read_text(encoding="utf-8"))
Row = dict[str, Any]

NOUNS = ["apples", "pencils", "marbles", "pages", "tickets", "students", "coins", "stickers", "eggs", "chairs"]
LEADS = [
    "",
    "",
    "Substituting back into the first equation confirms this. ",
    "Setting the derivative to zero and checking the endpoints leaves one candidate.\n\n",
    "Let me work through this carefully.\n\nWe expand, collect like terms, and compare coefficients on both sides. ",
    "**Solution.** By symmetry it is enough to look at one case; the others follow in the same way.\n\n",
    "1. Write down what is given.\n2. Eliminate one unknown.\n3. Solve for the other.\n\n",
    "Okay, so the two conditions together determine the value. ",
    "We use the identity from part (a) and simplify.\n\n",
    "### Step 1: Set up\nTranslate the statement into an equation.\n\n### Step 2: Solve\nIsolate the unknown.\n\n"
    "### Step 3: Conclude\n",
    "This is a standard computation. Combining the terms over a common denominator and cancelling, we obtain the result. ",
]
PLACES = [
    "\\boxed{@}",
    "The answer is $@$.",
    "Thus $\\boxed{@}$.",
    "**Answer:** $@$",
    "<answer>$@$</answer>",
    "\\[\\boxed{@}\\]",
    "Final Answer: The final answer is $@$. I hope it is correct.",
    "So the final answer is:\n\n$$\\boxed{@}$$",
    "Therefore, the answer is \\(@\\).",
    "#### $@$",
]
TEXT_PLACES = [
    "The answer is @.",
    "**Answer:** @",
    "#### @",
    "<answer>@</answer>",
    "\\boxed{\\text{@}}",
    "Final answer: **@**",
    "So the answer is **@**.",
]


def numbers(chance: random.Random) -> dict[str, Any]:
    """Returns the numbers of a story: @v, and others that differ from it and from each other."""
    while True:
        a, b, c, n = chance.randint(4, 19), chance.randint(6, 48), chance.randint(3, 29), chance.randint(2, 9)
        plus = chance.random() < 0.6
        v = a * b + c if plus else a * b - c
        near = [v + chance.choice([-10, -1, 1, 2, 10]), a * b, v * 10, a + b + c, v + 100]
        found = {"a": a, "b": b, "c": c, "n": n, "p": a * b, "v": v, "w": chance.choice(near)}
        if v > 12 and len({*found.values()}) == len(found):
            return found | {"plus": plus}


def text_rows(kind: dict[str, Any], chance: random.Random) -> Iterator[Row]:
    labels, plain = kind.get("label", ["@v"]), kind.get("plain", False)
    forms = [(form, True) for form in kind.get("stated", [])] + [(form, False) for form in kind.get("denied", [])]
    for place, (form, stated) in enumerate(forms):
        label = labels[place % len(labels)]
        for right in [True, False] if stated else [False]:
            values = numbers(chance) | {"noun": chance.choice(NOUNS)}
            text = _fill(form, values, chance, group=not plain and chance.random() < 0.3)
            if "@story" not in form and not (plain or kind.get("alone")) and chance.random() < 0.6:
                between = chance.choice([" ", "\n", "\n\n"]) if text[0].isalpha() else "\n\n"
                text = _story(values, chance) + between + text
            if "digits" in kind and chance.random() < 0.6:
                text = re.sub("[0-9]", lambda digit: kind["digits"][int(digit[0])], text)
            if right or not stated:
                expected: Any = values["v"]
            elif "@w" in form or "@n" in form:
                expected = values["w" if "@w" in form else "n"]
            else:
                v = values["v"]
                misses = [v + 1, v - 1, v * 10, -v, values["p"], v // 10]
                expected = chance.choice(misses if "label" in kind else [*misses, f"{v}.5", f"{v}/{values['n']}"])
            yield {"text": text, "label": label.replace("@v", str(expected)), "right": right}


def _fill(form: str, values: dict[str, Any], chance: random.Random, *, group: bool) -> str:
    def put(name: re.Match[str]) -> str:
        if name[1] == "story":
            return _story(values, chance)
        value = values[name[1]]
        return f"{value:,}" if group and isinstance(value, int) else str(value)

    return re.sub("@(story|noun|[abcnpvw])", put, form)


def _story(values: dict[str, Any], chance: random.Random) -> str:
    return _fill(chance.choice(FORMS["stories"]["plus" if values["plus"] else "minus"]), values, chance, group=False)


def value_rows(kind: str, chance: random.Random) -> Iterator[Row]:
    seen: set[tuple[str, str]] = set()
    for _ in range(4):
        for label, same, other in KINDS[kind](chance):
            pairs = [(each, True) for each in chance.sample(same, min(2, len(same)))]
            pairs += [(each, False) for each in chance.sample(other, min(2, len(other)))]
            for written, right in pairs:
                if (label, written) not in seen:
                    seen.add((label, written))
                    lead = "" if written.startswith("=") else chance.choice(LEADS)
                    yield {"text": lead + _placed(written, chance), "label": label, "right": right}


def _placed(written: str, chance: random.Random) -> str:
    """Returns a text that ends in the answer; after ``=``, what is written is all of it."""
    if written.startswith("="):
        return written[1:]
    if re.search(r"\\(?![$%])|[_^{}<>=]", written):
        return chance.choice(PLACES).replace("@", written)
    place = chance.choice(TEXT_PLACES if chance.random() < 0.6 else PLACES[:1])
    return place.replace("@.", "@" if written.endswith(".") else "@.").replace("@", written)


def generate(seed: int = SEED) -> dict[str, list[Row]]:
    """Returns the rows of ``shown`` and of ``unseen``."""
    forms = {kind["name"]: kind for kind in FORMS["kind"]}
    halves: dict[str, list[Row]] = {"shown": [], "unseen": []}
    for group in (list(forms), list(KINDS)):
        by_chance = sorted(group, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).hexdigest())
        for place, name in enumerate(by_chance):
            chance = random.Random(f"{seed} {name}")
            rows = text_rows(forms[name], chance) if name in forms else value_rows(name, chance)
            halves["unseen" if place % 2 else "shown"] += [{"kind": name, **row} for row in rows]
    return halves


def write(rows: list[Row], file: Path) -> None:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED, help="another seed gives other numbers and another half of kinds")
    parser.add_argument("--shown", type=Path, default=HERE / "shown.jsonl", help="file to write")
    parser.add_argument("--unseen", type=Path, default=HERE / "unseen.jsonl", help="file to write")
    options = parser.parse_args()
    for name, rows in generate(options.seed).items():
        file = getattr(options, name)
        write(rows, file)
        print(
            f"{file}: {len({row['kind'] for row in rows})} kinds, {len(rows)} rows, {sum(row['right'] for row in rows)} right"
        )


if __name__ == "__main__":
    main()
