r"""Tokens of an answer: numbers, letters, words, LaTeX commands and signs, each written in one way. Only white space, layout
(``\left``, ``\,``, ``\displaystyle``) and the marks of mathematics (``$``, ``\(``) are left out.
"""

from __future__ import annotations

import re
import string
from collections.abc import Container, Sequence
from typing import Literal, NamedTuple

from rlhf_plugin_math_verifier import units, vocabulary
from rlhf_plugin_math_verifier.characters import as_latex, fold, without_repetition

Kind = Literal["number", "letter", "word", "command", "sign"]


class Token(NamedTuple):
    kind: Kind
    text: str
    spaced: bool = False
    r"""True if white space, or the edge of a ``\text``, is before it."""


_DEGREES = re.compile(r"(?:\{\})?\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z])|\{\s*o\s*\}|o(?![A-Za-z]))|\\degree(?![A-Za-z])")
_NOT_EQUAL = re.compile(r"\\not\s*=")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DECIMALS = re.compile(r"(?:\.[0-9]+)?")
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:\\[,;: ]|~| )[0-9]{3})+(?![0-9])")
_TEXT = (
    r"\\(?:text[a-z]*|math(?:rm|bf|it|sf|tt|normal|cal|bb|frak|scr)|Bbb|boldsymbol|bm|mbox|hbox|operatorname\*?)(?![A-Za-z])\s*"
)
_SETS = dict(zip("RZNQC", (r"\reals", r"\integers", r"\naturals", r"\rationals", r"\complexes"), strict=True))
_FLOAT = (
    r"(?:(?:[0-9]+\.[0-9]+[eE]|[0-9]+E|(?<![0-9])1e)[-+]?[0-9]{1,3}|[0-9]+e(?:[0-9]{1,3}|[-+][0-9]{2,3}))(?![0-9A-Za-z_^{.])"
)
"""Pattern of ``1.5e3``, ``1e-5``, ``2e-05``; but ``2e-3`` is twice Euler's number, minus 3."""
_TOKEN = re.compile(
    rf"(?P<set>\\(?:mathbb|Bbb|mathbf)\s*\{{?\s*(?P<letter_of_set>[RZNQC])\s*\}}?(?![A-Za-z]))"
    rf"|(?P<text>{_TEXT})(?P<brace>\{{)?"
    r"|(?P<blank>\s+|~|\\[,;:!>\s]|\\q?quad(?![A-Za-z])|\\\\(?=\s*$))"
    r"|(?P<environment>\\(?:begin|end)\s*\{\s*[a-z]+\*?\s*\}(?:\{[clr|\s]*\})?)"
    r"|(?P<root>\\sqrt\s*\[\s*(?P<degree>[0-9a-z]+)\s*\])"
    r"|(?P<command>\\(?:[A-Za-z]+\*?|[{}|%$#&_\\]))"
    rf"|(?P<number>{_FLOAT}|[0-9]+\.?[0-9]*|\.[0-9]+)"
    r"|(?P<half>(?<![A-Za-z])[AaPp](?:\.\s?[Mm]\.?|[Mm])(?![A-Za-z]))"
    r"|(?P<latin>[A-Za-z\u00c0-\u024f]+(?:'[a-z]+)?(?:-[A-Za-z]{3,})*)"
    r"|(?P<script>[^\W\d_][^\W\d_\u0300-\u036f\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]*(?:[\u0300-\u036f\u064b-\u065f\u0900-\u0903\u093a-\u094f\u0e31\u0e34-\u0e3a\u0e47-\u0e4e]+[^\W\d_]*)*)"
    r"|(?P<sign><=|>=|(?<![0-9)}])!=|==|<>|\*\*|\.\.\.|\+/?-|.)",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_SAME = {
    r"\dfrac": r"\frac",
    r"\tfrac": r"\frac",
    r"\cfrac": r"\frac",
    r"\dbinom": r"\binom",
    r"\tbinom": r"\binom",
    r"\leq": r"\le",
    r"\leqslant": r"\le",
    r"\leqq": r"\le",
    "<=": r"\le",
    r"\geq": r"\ge",
    r"\geqslant": r"\ge",
    r"\geqq": r"\ge",
    ">=": r"\ge",
    r"\neq": r"\ne",
    "!=": r"\ne",
    "<>": r"\ne",
    r"\lt": "<",
    r"\gt": ">",
    "==": "=",
    "**": "^",
    "*": r"\times",
    r"\ast": r"\times",
    r"\cdotp": r"\cdot",
    r"\div": "/",
    r"\colon": ":",
    r"\varnothing": r"\emptyset",
    r"\backslash": r"\setminus",
    r"\vee": r"\lor",
    r"\wedge": r"\land",
    r"\vert": "|",
    r"\lvert": "|",
    r"\rvert": "|",
    r"\lbrace": r"\{",
    r"\rbrace": r"\}",
    r"\lbrack": "[",
    r"\rbrack": "]",
    r"\%": "%",
    r"\$": "$",
    r"\bigcup": r"\cup",
    r"\bigcap": r"\cap",
    r"\imath": "i",
    r"\jmath": "j",
    r"\thickapprox": r"\approx",
    r"\simeq": r"\approx",
    r"\ldots": r"\dots",
    r"\cdots": r"\dots",
    "...": r"\dots",
    "+-": r"\pm",
    "+/-": r"\pm",
    r"\mp": r"\pm",
    r"\infin": r"\infty",
    r"\lnot": r"\neg",
    r"\R": r"\reals",
    r"\Z": r"\integers",
    r"\N": r"\naturals",
    r"\Q": r"\rationals",
    r"\and": r"\land",
    r"\or": r"\lor",
    r"\tg": r"\tan",
    r"\ctg": r"\cot",
    r"\arctg": r"\arctan",
    r"\varepsilon": r"\epsilon",
    r"\vartheta": r"\theta",
    r"\varphi": r"\phi",
}
FUNCTIONS = frozenset(
    str.split(r"\sin \cos \tan \cot \sec \csc \arcsin \arccos \arctan \sinh \cosh \tanh \log \ln \exp \max \min \gcd \lcm")
)
_NAMES = {name[1:]: name for name in FUNCTIONS} | {
    "sqrt": r"\sqrt",
    "pi": r"\pi",
    "infinity": r"\infty",
    "infty": r"\infty",
    "inf": r"\infty",
    "theta": r"\theta",
    "alpha": r"\alpha",
    "beta": r"\beta",
    "gamma": r"\gamma",
    "lambda": r"\lambda",
    "sigma": r"\sigma",
    "omega": r"\omega",
    "phi": r"\phi",
    "psi": r"\psi",
}
_SHORT_WORDS = frozenset(str.split("or and is to of by no at if it so th st nd rd am pm in on as be an per not"))
_ARGUMENTS = {r"\frac": 2, r"\binom": 2, r"\sqrt": 1}
_NEXT_WORD = re.compile(r"\s+([A-Za-z]{2,})")
_VOWEL = re.compile("[aeiou\u00e0-\u024f]")
_OPEN, _CLOSED = ("(", "[", r"\{"), (")", "]", r"\}")
OPENING = frozenset([*_OPEN, "{", r"\langle", r"\lfloor", r"\lceil"])
CLOSING = frozenset([*_CLOSED, "}", r"\rangle", r"\rfloor", r"\rceil"])


def tokens(answer: str) -> list[Token]:
    r"""Returns the tokens of an answer. Arguments of fractions and roots have braces: ``\frac12`` is ``\frac{1}{2}``."""
    text = _NOT_EQUAL.sub(r"\\ne ", _DEGREES.sub(r"^\\circ ", as_latex(fold(answer))))
    text = without_repetition(text)
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", "", match.group()), text)
    return _Tokenizer(text).run()


class _Tokenizer:
    def __init__(self, text: str):
        text = _DELIMITERS.sub(" ", text)
        self.text = text if len(_DOLLAR.findall(text)) % 2 else _DOLLAR.sub(" ", text)  # an odd one is money
        self.out: list[Token] = []
        self.open: list[_Open] = []
        self.wanted = 0
        """Number of arguments of the last command that are still to come."""
        self.spaced = True

    def run(self) -> list[Token]:
        position = 0
        while position < len(self.text):
            if thousands := None if any(one.sign in _OPEN for one in self.open) else _THOUSANDS.match(self.text, position):
                decimals = _DECIMALS.match(self.text, thousands.end())
                assert decimals
                self.add("number", thousands.group().replace(",", "") + decimals.group())
                position = decimals.end()
                continue
            match = _TOKEN.match(self.text, position)
            assert match
            self.take(match)
            position = match.end()
        return self.out

    def take(self, match: re.Match[str]) -> None:
        text = match.group()
        if match["set"]:
            self.add("command", _SETS[match["letter_of_set"]])
        elif match["text"]:
            if match["brace"]:
                self.open.append(_Open("text", 0))
            self.spaced = True
        elif match["blank"]:
            self.spaced = True
        elif match["environment"]:
            name = "".join(text.split()).replace("*", "").partition("}")[0] + "}"
            self.out.append(Token("command", name.replace("{matrix", "{pmatrix").replace("{smallmatrix", "{pmatrix")))
        elif match["root"]:
            self.add("command", rf"\sqrt[{match['degree']}]")
        elif match["number"]:
            self.number(text)
        elif match["half"]:
            self.add("word", text[0].lower() + "m")
        elif match["latin"]:
            self.latin(text, self.text[match.end() : match.end() + 20])
        elif match["script"]:
            self.add("word", text)
        else:
            self.sign(_SAME.get(text, text))

    def add(self, kind: Kind, text: str) -> None:
        token = Token(kind, text, self.spaced)
        self.spaced = False
        takes = _ARGUMENTS.get(text.partition("[")[0] if kind == "command" else "", 0)
        if self.wanted and not takes:
            self.out += [Token("sign", "{"), token, Token("sign", "}")]
            self.wanted -= 1
        else:
            self.out.append(token)
            self.wanted = takes

    def number(self, text: str) -> None:
        root = bool(self.out) and self.out[-1].text.startswith(r"\sqrt")
        while self.wanted and text.isdigit() and len(text) > 1 and not root:  # \frac12
            self.add("number", text[0])
            text = text[1:]
        self.add("number", text)

    def latin(self, text: str, rest: str) -> None:
        folded = text.casefold()
        next_word = (
            _NEXT_WORD.match(rest) if folded in ("a", "an") and self.out and self.out[-1].kind in ("number", "word") else None
        )
        article = next_word is not None and next_word[1].casefold() not in _NAMES  # "5 a week"
        after_number = bool(self.out) and self.out[-1].kind == "number"
        if folded in _NAMES and not (after_number and units.known(text)):
            self.add("command", _NAMES[folded])
        elif (
            (len(text) > 1 and any(one.sign == "text" for one in self.open))
            or _is_word(text, self.out, spaced=self.spaced)
            or article
        ):
            self.add("word", text)
        else:
            for letter in text:
                self.add("letter", letter)

    def sign(self, text: str) -> None:
        if text in ("{", *_OPEN):
            argument = self.wanted > 0 and text in "{("  # plain sqrt(2) is \sqrt{2}
            self.open.append(_Open(text, self.wanted - 1 if argument else 0, "}" if argument else ""))
            text, self.wanted = "{" if argument else text, 0
        elif text in ("}", *_CLOSED) and self.open:
            closed = self.open.pop()
            if closed.sign == "text":
                self.spaced = True
                return
            text, self.wanted = closed.closing or text, closed.wanted
            self.out.append(Token("sign", text, self.spaced))
            self.spaced = False
            return
        if text.startswith("\\") and text[1:].isalpha():
            self.add("command", text)
        elif text.isalpha():
            self.add("letter", text)
        else:
            self.out.append(Token("sign", text, self.spaced))
            self.spaced = False


class _Open(NamedTuple):
    sign: str
    wanted: int
    """Number of arguments of a command that are to come after it."""
    closing: str = ""


def _is_word(text: str, before: Sequence[Token], *, spaced: bool) -> bool:
    """Returns True for letters that are a word, and not a product of variables, such as xyz or abc."""
    folded = text.casefold()
    if len(text) == 1:
        return False
    if folded in _SHORT_WORDS or vocabulary.changes(text):
        return len(text) > 2 or not text.isupper() or text in ("OR", "IS", "AM", "PM")  # NO is in NO_2
    if (units.known(text) or folded in units.POWERS) and before and before[-1].kind != "letter":
        return True
    if len(text) > 1 and spaced and before and before[-1].kind == "number" and text != text.lower():
        return True  # "45 CHF", "30 kWh"
    return len(text) > 2 and not text.isupper() and folded not in string.ascii_lowercase and bool(_VOWEL.search(folded))


def joined(found: Sequence[Token]) -> str:
    """Returns the tokens as LaTeX, in one way of writing."""
    out, last = [], Token("sign", "")
    for token in found:
        touching = token.kind == last.kind == "number" or (
            last.text[:1] == "\\" and last.text[-1:].isalpha() and token.text[:1].isalpha()
        )
        out.append(" " if touching else "")
        out.append(rf"\text{{{token.text}}}" if token.kind == "word" else token.text)
        last = token
    return "".join(out)


def depth(found: Sequence[Token]) -> int:
    """Returns the maximum depth of open brackets; the braces of LaTeX arguments do not count."""
    deepest = current = 0
    for token in found:
        if token.text != "{" and token.text in OPENING:
            current += 1
            deepest = max(deepest, current)
        elif token.text != "}" and token.text in CLOSING:
            current -= 1
    return deepest


def split(found: Sequence[Token], separators: Container[str]) -> tuple[list[list[Token]], list[str]]:
    """Returns the parts between separators outside of brackets, and the separators."""
    parts: list[list[Token]] = [[]]
    between: list[str] = []
    level = 0
    for token in found:
        level += _step(token)
        if level == 0 and token.text in separators and token.text not in CLOSING:
            parts.append([])
            between.append(token.text)
        else:
            parts[-1].append(token)
    return parts, between


def enclosed(found: Sequence[Token]) -> bool:
    """Returns True if the first token's bracket is closed by the last one."""
    level = 0
    for position, token in enumerate(found):
        level += _step(token)
        if level <= 0:
            return level == 0 and position == len(found) - 1 > 0
    return False


def _step(token: Token) -> int:
    if token.text in OPENING or token.text.startswith(r"\begin"):
        return 1
    return -1 if token.text in CLOSING or token.text.startswith(r"\end") else 0
