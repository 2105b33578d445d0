r"""Two invariants on generated texts: answer × decoration × place × language.

1. If the label's value is the candidate, or a rival of it, the verdict is right or unjudged: never wrong.
2. While anything stays unread, the verdict is never right.

``MATH_EXAMPLES=20000 python -m pytest -s tests/test_properties.py`` runs as many examples of each and prints the verdicts.
"""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlhf_plugin_math_verifier.algebra import SYMPY
from rlhf_plugin_math_verifier.candidates import find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.claims import NONE
from rlhf_plugin_math_verifier.judging import judge
from rlhf_plugin_math_verifier.labels import read_label

EXAMPLES = int(os.environ.get("MATH_EXAMPLES", "150"))
SETTINGS = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 1000, suppress_health_check=list(HealthCheck), database=None
)


def verdict(text: str, label: str) -> str:
    read = read_label(label)
    found = find(fold(text), prose=read.prose, parts=read.parts)
    return judge(read.text, found.claim if found else NONE, 6, SYMPY)


def decimal(value: Fraction) -> str:
    return f"{float(value):.2f}".rstrip("0").rstrip(".")


FORMS = {
    "fraction": [r"\frac{%d}{%d}", r"\dfrac{%d}{%d}", "%d/%d", r"\tfrac{%d}{%d}", r"{%d\over %d}"],
    "percent": ["%d\\%%", "%d%%", "%d percent"],
    "money": ["\\$%d", "€%d", "US\\$%d", "₹%d", "%d dollars"],
    "latex": [r"%d\sqrt{%d}", r"%d\pi+%d", r"\frac{%d\pi}{%d}"],
    "tuple": ["(%d, %d)", r"\left(%d,%d\right)", "(%d;%d)"],
    "interval": ["[%d, %d)", r"\left[%d,%d\right)", r"%d\le x<%d"],
    "unit": ["%d cm", r"%d\text{ cm}", r"%d\,\mathrm{cm}"],
}


@st.composite
def answers(draw) -> tuple[str, str, bool]:
    """A label, another way to write it, and whether that is LaTeX, which needs marks of mathematics in a sentence."""
    kind = draw(st.sampled_from([*FORMS, "integer", "decimal", "mixed", "grouped"]))
    number = draw(st.integers(2, 99_999))
    small, large = draw(st.integers(2, 30)), draw(st.integers(31, 97))
    sign = draw(st.sampled_from(["", "", "-"]))
    form = draw(st.sampled_from(FORMS.get(kind, ["%d"])))
    written = form % ((small, large) if form.count("%d") == 2 else small if kind == "percent" else number)
    match kind:
        case "integer":
            return f"{sign}{number}", f"{sign}{number}", False
        case "decimal":
            value = decimal(Fraction(number, 100))
            return f"{sign}{value}", sign + value + draw(st.sampled_from(["", "0" if "." in value else ".0"])), False
        case "fraction":
            return rf"{sign}\frac{{{small}}}{{{large}}}", sign + written, "\\" in form
        case "mixed":
            improper = rf"\frac{{{small * large + 1}}}{{{large}}}"
            mixed = rf"{small}\frac{{1}}{{{large}}}"
            return mixed, draw(st.sampled_from([mixed, improper])), True
        case "percent":
            return f"{small}%", written, False
        case "money":
            return str(number), written, False
        case "latex":
            return written, written, True
        case "grouped":
            return str(number + 1000), f"{number + 1000:,}", False
        case "tuple":
            return f"({small},{large})", written, True
        case "interval":
            return f"[{small},{large})", written, True
        case _:
            return f"{number} cm", written, False


IN_BOX = [
    "{}",
    " {} ",
    r"\,{}\,",
    r"\text{{{}}}",
    r"\textbf{{{}}}",
    r"\mathbf{{{}}}",
    r"\color{{red}}{{{}}}",
    r"\textcolor{{blue}}{{{}}}",
    r"{{{}}}",
    r"\underline{{{}}}",
    r"{}\tag{{1}}",
    r"\large {}",
    r"\displaystyle {}",
    r"{}\checkmark",
    r"{}\quad",
    "${}$",
    r"\({}\)",
    r"\left.{}\right.",
    r"\boxed{{{}}}",
    r"{} \blacksquare",
    r"\phantom{{0}}{}",
    r"{}.",
    r"\bf {}",
    r"\therefore {}",
    r"\colorbox{{yellow}}{{{}}}",
    "{}~",
    r"\ {}",
]
IN_TEXT = [
    "{}",
    "**{}**",
    "*{}*",
    "***{}***",
    "`{}`",
    "__{}__",
    "_{}_",
    "<b>{}</b>",
    '"{}"',
    "**`{}`**",
    "{}.",
    "<strong>{}</strong>",
    "=={}==",
]
IN_MARKS = ["${}$", r"\({}\)", "$${}$$", "**${}$**", r"\[{}\]", "${}$."]
MARKED = [
    r"Thus $\boxed{{{}}}$.",
    r"So the answer is \boxed{{{}}}",
    r"\boxed{{{}}}",
    r"$$\boxed{{{}}}$$",
    r"**Answer:** $\boxed{{{}}}$",
    "\\[\n\\boxed{{{}}}\n\\]",
    r"\boxed{{{}}} (as required)",
    r"因此答案是 $\boxed{{{}}}$。",
    r"La respuesta es \boxed{{{}}}.",
    r"Die Antwort lautet $\boxed{{{}}}$.",
    r"답은 $\boxed{{{}}}$ 입니다.",
    r"答えは $\boxed{{{}}}$ です。",
    r"Ответ: $\boxed{{{}}}$.",
    "<think>no</think>\n\\boxed{{{}}}",
    "<|begin_of_box|>{}<|end_of_box|>",
    "\\answer{{{}}}",
    "First 17 is tried.\n\n\\boxed{{{}}}",
]
PLACES = [
    "{}",
    "The answer is {}",
    "The final answer is: {}",
    "Answer: {}",
    "**Answer:** {}",
    "**Final Answer:** {}",
    "## Final Answer\n\n{}",
    "#### {}",
    "We add 3 and 4.\n#### {}",
    "<answer>{}</answer>",
    "<answer>\n{}\n</answer>",
    "- {}",
    "> {}",
    "```\n{}\n```",
    "So we get {}",
    "Hence, it is {}",
    "答案是{}",
    "答案：{}",
    "所以答案是 {}",
    "答えは {} です",
    "답은 {}",
    "La respuesta es {}",
    "La réponse est {}",
    "Die Antwort ist {}",
    "La risposta è {}",
    "Ответ: {}",
    "Odpowiedź: {}",
    "Cevap: {}",
    "Jawaban: {}",
    "उत्तर: {}",
    "Svar: {}",
    "คำตอบคือ {}",
    "đáp án là {}",
    "A resposta é {}",
    "1. We add.\n2. The answer is {}",
    "Therefore, the total is {}",
    '{{"answer": "{}"}}',
]
LATER = ["{}", "{}\n", "{} ✅", "{}\n\n(This was checked.)", "{}<|im_end|>", "{}</s>"]


@st.composite
def texts(draw, unread: str = "") -> tuple[str, str]:
    label, written, latex = draw(answers())
    if unread:
        written = unread.format(written)
    if draw(st.booleans()):
        text = draw(st.sampled_from(MARKED)).format(draw(st.sampled_from(IN_BOX)).format(written))
    else:
        marks = IN_MARKS if latex or (unread and "\\" in unread) else IN_TEXT
        place = draw(st.sampled_from(PLACES))
        if "{{" in place and "\\" in written:
            written = written.replace("\\", "\\\\")
        text = place.format(draw(st.sampled_from(["{}"] if "{{" in place else marks)).format(written))
    return draw(st.sampled_from(LATER)).format(text), label


def test_the_labels_value_is_never_wrong():
    counts: Counter[str] = Counter()

    @SETTINGS
    @given(texts())
    def check(case):
        text, label = case
        found = verdict(text, label)
        counts[found] += 1
        assert found in ("right", "unjudged"), case

    check()
    print(f"\nthe label's value is the candidate: {dict(counts)}")
    assert counts["right"] >= 0.9 * counts.total(), counts


RIVALS = [
    "\\boxed{{{}}}\n\n\\boxed{{{}}}",
    "\\boxed{{{}}}. The answer is {}.",
    "The answer is {}.\n\nThe answer is {}.",
    "He has {} apples and {} pears.",
    "#### {}\n\nThe answer is {}",
    "It takes {} hours to fill {} tanks.",
    "From {} to {}",
    "\\boxed{{{} \\text{{ maybe }} {}}}",
]


def test_a_rivals_value_is_never_wrong_nor_a_doubtful_one_right():
    counts: Counter[str] = Counter()

    @SETTINGS
    @given(st.sampled_from(RIVALS), st.integers(2, 500), st.integers(501, 999), st.booleans())
    def check(form, one, other, first):
        text = form.format(one, other)
        found = verdict(text, str(one if first else other))
        counts[found] += 1
        if "From" not in text:  # a range is read: it is neither of its ends
            assert found in ("right", "unjudged"), text

    check()
    print(f"\nthe label's value is a rival: {dict(counts)}")


UNREAD = [
    "about {}",
    "maybe {}",
    "{} or so",
    "{} (guess)",
    "{}?",
    "{}?.",
    "{} dollars?!",
    "{} dollars!?",
    "{} dollars?;",
    "[{} dollars?]",
    "=={}?==",
    "{}⁇",
    "probably {}",
    "roughly {}",
    "not {}",
    "at least {}",
    "{} or more",
    "more than {}",
    "{} +",
    r"{}\zork",
    r"\zork {}",
    r"{}\pm",
    "half of {}",
    "{} million",
    "{} or 1/7",
    r"{}\cdot",
    "{} minus something",
    r"\ne {}",
    "the square of {}",
    "{} squared",
    "{} except two",
    r"\lnot {}",
    "between 1 and {}",
    "{}, not sure",
]


def test_what_stays_unread_is_never_right():
    counts: Counter[str] = Counter()

    @SETTINGS
    @given(st.sampled_from(UNREAD).flatmap(texts))
    def check(case):
        text, label = case
        found = verdict(text, label)
        counts[found] += 1
        assert found != "right", case

    check()
    print(f"\nsomething beside the label's value is unread: {dict(counts)}")
