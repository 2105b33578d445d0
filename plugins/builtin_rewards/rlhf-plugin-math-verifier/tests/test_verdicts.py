"""Verdicts on answers that a person has judged, by kind; and on the same answers by both ways of judging.

``reported``: answers on which earlier versions were wrong. ``own`` and ``fresh``: more of the same kinds, judged by a person
before the verifier judged them. ``benchmarks/verifier.py`` prints the figures.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from rlhf_plugin_math_verifier.candidates import find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.claims import NONE, Claim
from rlhf_plugin_math_verifier.judging import NeedsAlgebra, NoAlgebra, judge
from rlhf_plugin_math_verifier.labels import read_label

from rlhf_host import Unjudged

FILES = sorted((Path(__file__).parent / "answers").glob("*.jsonl"))


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_no_answer_is_judged_otherwise_than_by_a_person(file, verifier, trajectory):
    answers = rows(file)
    rewards = asyncio.run(verifier().score([trajectory(row["text"], row["label"]) for row in answers], None))
    verdicts = [None if isinstance(reward, Unjudged) else reward.score == 1.0 for reward in rewards]
    assert [
        row for row, verdict in zip(answers, verdicts, strict=True) if verdict is not None and verdict != row["right"]
    ] == []
    unjudged = Counter(row["right"] for row, verdict in zip(answers, verdicts, strict=True) if verdict is None)
    answered = Counter(row["right"] for row in answers)
    assert unjudged[True] <= 0.01 * answered[True]
    assert unjudged[False] <= 0.2 * answered[False]


def test_a_worker_judges_what_plain_comparison_judges_and_says_the_same():
    from rlhf_plugin_math_verifier.algebra import SYMPY

    compared = 0
    for row in (row for file in FILES for row in rows(file)):
        label = read_label(row["label"])
        found = find(fold(row["text"]), prose=label.prose, parts=label.parts)
        claim = found.claim if found else NONE
        try:
            verdict = judge(label.text, claim, 6, NoAlgebra())
        except NeedsAlgebra:
            continue
        compared += 1
        assert judge(label.text, claim, 6, SYMPY) == verdict, row
    assert compared > 100


NUMBERS = [
    "0",
    "1e-20",
    "2e-20",
    r"\frac{1}{10^{20}}",
    "0.0000001",
    "0.0000002",
    "0.333333",
    r"\frac13",
    "0.3333",
    "1.2e-6",
    "1e-6",
    "7",
]


@pytest.mark.parametrize("other", NUMBERS)
@pytest.mark.parametrize("label", NUMBERS)
def test_numbers_are_as_close_in_a_worker_as_here(label, other):
    """Here fractions are compared, there expressions: the same numbers, written so that only algebra reads them."""
    from rlhf_plugin_math_verifier.algebra import SYMPY

    here = judge(label, Claim(other), 6, SYMPY)
    assert judge(rf"{label}+\sqrt{{4}}-2", Claim(rf"{other}+\ln 1"), 6, SYMPY) == here


@pytest.mark.parametrize(
    ("label", "right", "wrong"),
    [(r"\sqrt{2}\cdot10^{-9}", "1.41421356e-9", "1.42e-9"), ("x/10^{12}", "10^{-12}x", "2x/10^{12}")],
)
def test_small_numbers_must_agree_in_their_first_places(label, right, wrong):
    from rlhf_plugin_math_verifier.algebra import SYMPY

    assert [judge(label, Claim(answer), 6, SYMPY) for answer in (right, wrong)] == ["right", "wrong"]


FORMS = r"""
\sin^2(x) | 1-\cos^2 x
\log_2(8) | 3
\log_{2}(8) | \log_3 27
\tan^{-1}\left(\frac{1}{2}\right) | \arctan\frac12
x^2(x+1) | x^3+x^2
2^{3}(4) | 32
(2)(3) | 6
2(3)(4) | 24
5!(3) | 360
\frac{-1 \pm \sqrt{5}}{2} | \frac{\sqrt5-1}{2}, -\frac{1+\sqrt{5}}{2}
\left( \frac{3}{2}, -13 \right) | (1.5,-13)
\begin{pmatrix} 1/50 & 7/50 \\ 7/50 & 49/50 \end{pmatrix} | \begin{bmatrix}0.02&0.14\\0.14&0.98\end{bmatrix}
2-i\sqrt{3} | 2-\sqrt{3}i
\frac{e^x-e^{-x}}{2} | \sinh x
\frac{(2n)!}{n!} | (2n)!/n!
\cos^2\theta - \sin^2\theta | \cos(2\theta)
a_n = 2n-1 | a_{n}=2n-1
y = -\frac{1}{2}x + 5 | 2y+x=10
\frac{x^2}{4}+\frac{y^2}{9}=1 | 9x^2+4y^2=36
0 < a \le 3 | (0,3]
x^2<4 | (-2,2)
\$18.90 | 18.9
36\pi \text{ square inches} | 36\pi
1-\left(\frac{5}{6}\right)^{4} | \frac{671}{1296}
2 \cdot 3^{5} | 486
-(x+1) | -x-1
\frac{\frac{1}{2}}{3} | \frac16
\sum_{i=1}^{10} i | 55
\lfloor \sqrt{10} \rfloor | 3
\gamma+1 | 1+\gamma
|x-1| | |1-x|
\frac{\pi}{2}+k\pi | k\pi+\frac{\pi}{2}
3:4 | 6:8
f(x)+g(x) | g(x)+f(x)
\sum_{k=1}^n \frac{1}{k^k} | \sum_{j=1}^{n} j^{-j}
"""


@pytest.mark.parametrize("pair", FORMS.strip().splitlines())
def test_two_ways_to_write_the_same(pair):
    from rlhf_plugin_math_verifier.algebra import SYMPY

    one, other = pair.split(" | ")
    assert [judge(one, Claim(other), 6, SYMPY), judge(other, Claim(one), 6, SYMPY)] == ["right", "right"]
    assert judge(one, Claim(rf"{other}+1"), 6, SYMPY) != "right"
