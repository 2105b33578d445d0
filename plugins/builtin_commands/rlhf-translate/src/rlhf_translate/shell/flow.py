"""Branches and loops of a shell script: which of them run, and the values of variables after them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rlhf_translate.shell.conditions import both, either, negated
from rlhf_translate.shell.expansion import Variables
from rlhf_translate.shell.word import Value, Word, union

LOOPS = ("while", "until", "for")
_ARGUMENTS = re.compile(r"(?:.*\s)?(?:--?[A-Za-z]|[+~]*[A-Za-z_][\w.]*=)", re.S)
"""Pattern of a text that is a list of arguments."""
KEYWORDS = ("if", "then", "elif", "else", "fi", "while", "until", "do", "done", "esac", "}")


@dataclass
class Branches:
    """An ``if``, ``case`` or loop that has begun."""

    kind: str
    """``if``, ``case``, ``while``, ``until``, ``for``, ``{`` or ``(``."""
    line: int
    before: dict[str, Value]
    """Values of variables at its beginning."""
    ran: bool | None = False
    """True if one of its branches has run; None if unknown."""
    runs: bool | None = True
    """True if the present part runs."""
    stops: bool = False
    """True if the script ends in the present part, so that its values are not those of later lines."""
    ends: list[dict[str, Value]] = field(default_factory=list)
    """Values at the ends of branches that may run."""
    word: Word | None = None
    """Word that a ``case`` compares."""
    patterns: list[Word] | None = None
    """Patterns of a ``case``, at the beginning of one."""
    variable: str = ""
    """Variable of a ``for``."""
    choices: list[Word] = field(default_factory=list)
    """Values of the variable of a ``for``."""


class Flow:
    """The branches around a place of a script."""

    def __init__(self, variables: Variables):
        self.variables = variables
        self.open: list[Branches] = []
        self.set_on: dict[str, list[int]] = {}
        """Variable → lines that set it, since it was last set with certainty."""

    @property
    def runs(self) -> bool:
        """True if the present part may run."""
        return all(each.runs is not False for each in self.open)

    @property
    def kind(self) -> str:
        """Kind of the innermost."""
        return self.open[-1].kind if self.open else ""

    def keyword(self, word: str, line: int, status: bool | None) -> None:
        """Opens, continues or closes.

        Args:
            status: status of the command before it.
        """
        if word in ("if", "while", "until"):
            self.begin(word, line)
        elif word == "then" and self.kind == "if":
            self.branch(status)
        elif word == "elif" and self.kind == "if":
            self.leave()
            self.open[-1].runs = True
        elif word == "else" and self.kind == "if":
            self.leave()
            self.branch(True)
        elif word == "do" and self.kind in LOOPS:
            goes_on = negated(status) if self.kind == "until" else status
            self.branch(True if self.kind == "for" else False if goes_on is False else None)
        elif (word, self.kind) in (("fi", "if"), ("}", "{")) or (word == "done" and self.kind in LOOPS):
            self.leave()
            self.finish(line)
        elif (word, self.kind) == ("esac", "case"):
            if self.open[-1].patterns is None:
                self.leave()
            self.finish(line)

    def begin(self, kind: str, line: int) -> Branches:
        self.open.append(Branches(kind, line, dict(self.variables.values)))
        return self.open[-1]

    def loop(self, words: list[Word]) -> None:
        """Handles ``for NAME in WORDS``."""
        frame = self.begin("for", words[0].line)
        frame.variable = words[1].text if len(words) > 1 else ""
        frame.choices = words[3:] if len(words) > 3 and words[2].text == "in" else []

    def case(self, words: list[Word]) -> None:
        """Handles ``case WORD in``."""
        frame = self.begin("case", words[0].line)
        frame.word, frame.patterns = words[1] if len(words) > 1 else None, []

    def branch(self, condition: bool | None) -> None:
        """Begins a branch of the innermost: it runs if the condition is true, and no earlier branch has run."""
        frame = self.open[-1]
        frame.runs = both(condition, negated(frame.ran))
        frame.ran = True if condition else either(frame.ran, frame.runs)  # after else, one of them has
        self.variables.values = dict(frame.before)
        if frame.kind == "for" and frame.variable:
            self._of_loop(frame)

    def choose(self) -> None:
        """Begins the branch of a ``case``, whose patterns are complete."""
        frame = self.open[-1]
        patterns, frame.patterns = frame.patterns or [], None
        known = frame.word is not None and not frame.word.missing and not any(pattern.missing for pattern in patterns)
        if known and frame.word is not None:
            text = frame.word.text
            self.branch(any(fnmatch.fnmatchcase(text, pattern.text) for pattern in patterns))
        else:
            self.branch(True if any(pattern.text == "*" for pattern in patterns) else None)

    def leave(self) -> None:
        """Ends a branch."""
        frame = self.open[-1]
        if frame.kind in LOOPS and len(frame.choices) != 1:
            for name, value in list(self.variables.values.items()):  # each turn may change it again
                if frame.before.get(name) != value and name != frame.variable:
                    ends = (frame.before.get(name), value)
                    self.variables.values[name] = _common(name, ends, frame.line, f"set in the loop on line {frame.line}")
        if frame.runs is not False and not frame.stops:
            frame.ends.append(dict(self.variables.values))
        frame.stops = False

    def stop(self) -> None:
        """Handles ``exit``."""
        if self.open:
            self.open[-1].stops = True

    def finish(self, line: int) -> None:
        frame = self.open.pop()
        ends = [*frame.ends, frame.before] if frame.ran is not True else frame.ends
        self.variables.values = self.merged(ends or [frame.before], line)

    def leave_subshell(self) -> None:
        """Handles ``)``: variables set inside the brackets keep their old values outside."""
        self.variables.values = self.open.pop().before

    def sets(self, name: str, line: int, again: bool) -> None:
        """Notes that a line sets a variable.

        Args:
            again: its earlier value may still count.
        """
        self.set_on[name] = [*self.set_on.get(name, []), line] if again or self.open else [line]

    def merged(self, ends: list[dict[str, Value]], line: int) -> dict[str, Value]:
        """Returns the values that are the same at the end of every branch, and the names of others."""
        if len(ends) == 1:
            return ends[0]
        values: dict[str, Value] = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            known = [end.get(name) for end in ends]
            first = known[0]
            if first is not None and all(_text(each) == _text(first) for each in known):
                values[name] = first
            else:
                lines = sorted(set(self.set_on.get(name, [])))
                where = f" on line{'s' * (len(lines) > 1)} {', '.join(map(str, lines))}" if lines else ""
                values[name] = _common(name, known, line, f"set{where} under a condition")
        return values

    def _of_loop(self, frame: Branches) -> None:
        if len(frame.choices) == 1:
            self.variables.assign(frame.variable, frame.choices[0])
        elif frame.choices:
            texts = ", ".join(word.text for word in frame.choices[:8])
            self.variables.lose(frame.variable, frame.line, f"one of {texts} (line {frame.line})")
        else:
            self.variables.lose(frame.variable, frame.line, f"of the loop on line {frame.line}")


def _text(value: Value | None) -> str | list[str] | None:
    return value.text if isinstance(value, Word) else [word.text for word in value] if value is not None else None


def _common(name: str, ends: Sequence[Value | None], line: int, why: str) -> Value:
    """Returns what a variable has in any case: the first arguments that all have, and a word for the others."""
    rest = Word(f"${{{name}...}}", line, (f"${{{name}...}} ({why})",))
    lists = [[] if end is None else end for end in ends if not isinstance(end, Word)]
    if len(lists) == len(ends) and any(lists) and name != "@":
        first = takewhile(lambda words: len({word.text for word in words}) == 1, zip(*lists, strict=False))
        return [*(words[0] for words in first), rest]
    words = [Word("", line) if end is None else end for end in ends if not isinstance(end, list)]
    if len(words) == len(ends) and any(_ARGUMENTS.match(word.text) for word in words):
        letters = takewhile(lambda each: len(set(each)) == 1, zip(*(f"{word.text} " for word in words), strict=False))
        text = "".join(each[0] for each in letters)
        text = text[: text.rfind(" ") + 1]
        missing = (*union(words), *rest.missing)
        last = text.rstrip().rpartition(" ")[2]
        if last.startswith("-") and all(re.match(r"[^\s-]", word.text[len(text) :]) for word in words):  # its value differs
            text += f"${{{name}..}} "
            missing = (*missing, f"${{{name}..}} ({why})")
        return Word(text + rest.text, line, missing)
    return Word(f"${{{name}}}", line, (f"${{{name}}} ({why})",))
