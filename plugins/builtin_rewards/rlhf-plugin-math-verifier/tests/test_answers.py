"""Answers that are right, and their labels."""

from __future__ import annotations

import asyncio
import datetime
import json
import re
from decimal import Decimal
from pathlib import Path

import pytest

GSM8K = Path(__file__).parents[5] / "shared" / "data" / "gsm8k_train.jsonl"

RIGHT = [
    # plain numbers
    ("72", "72"),
    ("They sold 72.", 72),
    ("So it is 72.00", 72.0),
    ("it costs $72.", "72"),
    (r"it costs \$1,234.50", "1234.5"),
    ("They paid 72 dollars.", "$72"),
    ("that leaves -5", "-5"),
    ("that leaves −5", -5),
    ("10-3=7", "7"),
    (".5", "0.5"),
    ("that is 1 1/2", "1.5"),
    ("costs $5, so it is $6", "6"),
    ("hence $x = 4$", "4"),
    (r"thus x = \frac{3}{4}", "3/4"),
    # after ####
    ("#### 72", "72"),
    ("16 + 2 = 18\n#### 18\n", "It is <<16+2=18>>18.\n#### 18"),
    ("#### 72 apples\n\nQuestion: how many in 3 days?", "72"),
    ("#### Step 3: add them\nso it is 72", "72"),
    # after "answer is"
    ("The answer is 72. I had 3 of them.", "72"),
    ("The answer is: **72**", "72"),
    ("**Final Answer:** 72 km/h", "72"),
    ("Answer:\n\\[ 72 \\]\nin 2 hours", "72"),
    ("The answer is x^2+1.", "1+x^2"),
    (r"The answer is $\frac{3}{4}$ of it", "3/4"),
    ("The answer to the question is 3 + 2 = 5 apples, not 9", "5"),
    ("The answer is 5. No wait, the answer is 7", "7"),
    ("The answer is 72. This answer is correct.", "72"),
    # boxed
    (r"Thus $\boxed{72}$. Check: 2", "72"),
    (r"\boxed{1} then \boxed{72}", "72"),
    (r"\boxed{\boxed{72}}", r"\boxed{72}"),
    (r"\boxed{72} (write it in \boxed{}) #### 3", "72"),
    (r"\boxed{\frac{1}{\frac{2}{3}}}", "1.5"),
    (r"\boxed{72\text{ dollars}}", "72"),
    (r"\boxed{$72}", "72"),
    (r"\boxed{72 apples}", "72"),
    (r"\boxed{72 months}", "72"),
    (r"\boxed{72 wrong answers}", "72"),
    (r"\boxed{seventy two}", "72"),
    (r"\boxed{72}", [72]),
    (r"\boxed{72}", Decimal("72.0")),
    (r"\boxed{2024-05-06}", datetime.date(2024, 5, 6)),
    (r"\boxed{5\text{ cm}^2}", "5"),
    (r"\boxed{90^\circ}", "90"),
    (r"\boxed{1{,}234}", "1,234"),
    (r"\boxed{x=5}", "5"),
    (r"\boxed{5}", "x=5"),
    (r"\boxed{6*12}", "72"),
    (r"\boxed{2**3}", "8"),
    # fractions and decimals
    (r"\boxed{3/4}", "0.75"),
    (r"\boxed{0.75}", r"$\frac{3}{4}$"),
    (r"\boxed{\dfrac34}", "6/8"),
    (r"\boxed{\frac{-3}{4}}", r"-\tfrac{3}{4}"),
    (r"\boxed{1\frac{1}{2}}", "3/2"),
    (r"\boxed{0.333333}", "1/3"),
    (r"\boxed{-3+2e}", "2e-3"),
    (r"\boxed{1e-5}", "0.00001"),
    # percentages and powers of ten
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{50\%}", "50"),
    (r"\boxed{0.5}", "50%"),
    ("this is 50 percent", "50%"),
    (r"\boxed{1.5e3}", "1500"),
    (r"\boxed{1.5\times10^{3}}", "1500"),
    # expressions, sets, intervals, matrices, relations
    (r"\boxed{1+x^2}", "x^2+1"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{2\sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{pi/2}", r"\frac{\pi}{2}"),
    (r"\boxed{\{2,1\}}", r"\{1,2\}"),
    (r"\boxed{[0,1)}", "[0,1)"),
    (r"\boxed{(1,2)}", "(1,2)"),
    (r"\boxed{y=2x+1}", "2x+1=y"),
    (r"\boxed{x>2}", "x>2"),
    (r"\boxed{\infty}", r"\infty"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    # words and choices
    (r"\boxed{\text{Paris}}", "paris"),
    ("The answer is Paris.", "Paris"),
    (r"\boxed{\textbf{(B)}\ 12}", "B"),
    (r"\boxed{yes}", "Yes"),
    (r"\boxed{(B) vitamin C}", "B"),
    (r"\boxed{(C) both A and B}", "C"),
    (r"\boxed{A. I think so}", "A"),
    (r"\boxed{A. a dog and a cat}", "A"),
    (r"\boxed{B. A dog, i.e. an animal}", "B"),
    (r"\boxed{(B) Vitamin A deficiency}", "B"),
    (r"\boxed{(C) vitamins A, B and D}", "C"),
    (r"\boxed{(D) neither A nor B}", "D"),
    (r"\boxed{(D) either A or B}", "D"),
    (r"\boxed{(B) 25 °C}", "B"),
    (r"\boxed{(B) F = ma}", "B"),
    (r"\boxed{A: it is A}", "A"),
    (r"\boxed{B. Here E lies on AC}", "B. Here E lies on AC"),
    (r"\boxed{B}", "B. Here E lies on AC"),
    ("The answer is A. Option B is wrong.", "A"),
    ("The answer is A. But B is close", "A"),
]

WRONG = [
    ("", "72"),
    ("", "x^2"),
    ("I cannot say.", "72"),
    ("73", "72"),
    ("-72", "72"),
    ("7.2", "72"),
    ("The answer is 72. No wait, the answer is 73", "72"),
    ("#### 72\n#### 73", "72"),
    (r"\boxed{72}, or rather \boxed{73}", "72"),
    (r"\boxed{72, 73}", "72"),
    (r"\boxed{72 or 73}", "72"),
    (r"\boxed{71; 72}", "72"),
    (r"\boxed{not 71 but 72}", "72"),
    (r"\boxed{72 million}", "72"),
    *((rf"\boxed{{72 {word}}}", "72") for word in ("crore", "lakh", "score", "gross", "quadrillion", "wrong")),
    *((rf"\boxed{{72 {part}}}", "72") for part in ("sixths", "eighths", "twelfths", "twentieths", "hundredths")),
    (r"\boxed{72x}", "72"),
    (r"\boxed{0.3333}", "1/3"),
    (r"\boxed{0.0}", "0.0000001"),
    (r"\boxed{1/0}", "72"),
    (r"\boxed{\frac{0}{0}}", "72"),
    (r"\boxed{5000\%}", "50%"),
    (r"\boxed{x^2-1}", "x^2+1"),
    (r"\boxed{x}", "y"),
    (r"\boxed{[0,1]}", "[0,1)"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{silent}", "listen"),
    (r"\boxed{A}", "B"),
    # several choices
    ("The answer is A) B) C) D)", "A"),
    (r"\boxed{A) B) C) D)}", "A"),
    (r"\boxed{(A)(B)}", "A"),
    (r"\boxed{A. but B}", "A"),
    ("The answer is A. but B", "A"),
    (r"\boxed{A. Paris or B}", "A"),
    (r"\boxed{A. B}", "A"),
    (r"\boxed{A: 5 B: 6}", "A"),
    ("answer: A. Actually B", "A"),
    ("answer: A. No! It is B.", "A"),
    ("answer: A) I think B is right", "A"),
    ("answer: A) or perhaps b)", "A"),
    ("#### A: no, B!", "A"),
    (r"\boxed{A. no, it is B}", "A"),
    (r"\boxed{A: either this or that: B}", "A"),
    (r"\boxed{A.\quad\text{B}}", "A"),
    (r"\boxed{A.{B}}", "A"),
    (r"\boxed{A. — B}", "A"),
    (r"\boxed{A. | B}", "A"),
    (r"\boxed{A: $B$}", "A"),
    (r"\boxed{A. Option B}", "A"),
    (r"\boxed{A. choose B}", "A"),
]

OPEN = [
    (r"\boxed{72 except two}", "72"),
    (r"\boxed{72 quarters}", "72"),
    (r"\boxed{about 72}", "72"),
    (r"\boxed{72 for 3 days}", "72"),
    (r"\boxed{72}", ["72", "73"]),
    (r"\boxed{194}", "1234_5"),
    (r"\boxed{3:00}", "3:00 p.m."),
    (r"\boxed{x=72}", "y=72"),
]
"""Answers that only a person can judge: the label's value with words or in a form that may change it."""

UNJUDGED = [
    *((label, "not a text or a number but") for label in (None, True, [], [None], {"value": 72})),
    *((label, "not a finite number") for label in (float("nan"), float("-inf"), 10**400)),
    *((label, "empty or longer than 1000 characters") for label in ("", "  ", "7x" * 1000)),
    *((label, "cannot be read as mathematics") for label in (r"\frac{1}{", r"\frac{0}{0}")),
    *((label, "is no answer") for label in ("???", "N/A", "-", "[]")),
]


@pytest.mark.parametrize(("text", "label"), RIGHT)
def test_right_answers(judge, text, label):
    reward = judge(text, label)
    assert (reward.value, reward.score) == (1.0, 1.0)


@pytest.mark.parametrize(("text", "label"), WRONG)
def test_wrong_answers(judge, text, label):
    reward = judge(text, label)
    assert (reward.value, reward.score) == (0.0, 0.0)


@pytest.mark.parametrize(("text", "label"), OPEN)
def test_what_may_be_right_or_wrong_is_unjudged_but_what_has_another_value_is_wrong(judge, text, label):
    assert "may be the label or not" in judge(text, label).reason
    assert judge(text.replace("72", "71").replace("194", "195").replace("3:00", "4:00"), label).score == 0.0


@pytest.mark.parametrize(("label", "reason"), UNJUDGED, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("text", [r"\boxed{72}", "", "#### ???"])
def test_without_a_usable_label_nothing_is_judged(judge, text, label, reason):
    assert reason in judge(text, label).reason


@pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K is not there")
def test_gsm8k_solutions_are_right_in_every_form(verifier, trajectory):
    solutions = [json.loads(line)["answer"] for line in GSM8K.read_text().splitlines()]
    finals = [solution.rpartition("####")[2].strip() for solution in solutions]
    assert len(solutions) == 7473
    assert all(re.fullmatch(r"-?[\d,.]+", final) for final in finals)

    subject = verifier()
    pairs = list(zip(solutions, solutions, strict=True))
    for form in ("The answer is {}.", r"so $\boxed{{{}}}$", "hence {}"):
        pairs += [(form.format(final), solution) for final, solution in zip(finals[::20], solutions[::20], strict=True)]
    rewards = asyncio.run(subject.score([trajectory(*pair) for pair in pairs], None))
    assert [reward.score for reward in rewards] == [1.0] * len(pairs)
    assert subject._pool is None, "plain numbers need no worker process"
