"""Words of a command as they are read: assignments, arrays, sums and the words themselves."""

from __future__ import annotations

import re

from rlhf_host import UserError
from rlhf_translate.shell.expansion import Variables
from rlhf_translate.shell.flow import Flow
from rlhf_translate.shell.lexer import SUBSTITUTIONS, Lexer
from rlhf_translate.shell.word import Value, Word, split

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
COMMENT = re.compile(r"#[^\n]*")
LOCAL = ("local", "declare", "typeset")
"""Words that make variables local to a function."""
SETTERS = ("export", "readonly", *LOCAL)
_ITEM = re.compile(r"([A-Za-z_]\w*)\[([^\]]*)\]\+?=")
_SET = re.compile(r"\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=(?!=)\s*(.+)|(\+\+|--))\s*", re.S)


class WordReader:
    """Reads one command's words after the other."""

    def __init__(self, lexer: Lexer, variables: Variables):
        self.lexer, self.variables = lexer, variables
        self.flow = Flow(variables)
        self.words: list[Word] = []
        self.own: dict[str, Value | None] = {}
        """Variables that assignments of this command set → their earlier values: only the command sees the new ones."""
        self.outer: dict[str, Value | None] = {}
        """Variables that are local → their earlier values."""
        self.before: dict[str, Value] | None = None
        """Values of variables before a command that may run."""

    @property
    def runs(self) -> bool:
        """True if the present part may run."""
        return self.flow.runs

    def structure(self, raw: str, line: int) -> bool:
        """Returns True if the word opens or closes a branch, or precedes a command."""
        return False

    def word(self) -> None:
        lexer = self.lexer
        line, begin = lexer.line, lexer.at
        pieces = lexer.pieces()
        raw = lexer.text[begin : lexer.at]
        if not self.words and self.structure(raw, line):
            return
        sets = bool(self.words) and self.words[0].text in SETTERS
        may = sets or all(ASSIGNMENT.match(word.text) for word in self.words)
        if may and (match := ASSIGNMENT.match(raw)):
            value: Value
            if raw == match[0] and lexer.char == "(":
                value = self.array()
            else:
                whole = self.variables.text(pieces, line)
                value = Word(whole.text[len(match[0]) :], line, whole.missing)
                if value.missing and any(piece.kind == "command" for piece in pieces) and len(split(value, line)) == 1:
                    value = Word(f"${{{match[1]}}}", line, (f"${{{match[1]}}} ({value.text})",))
            kept = self.own if not sets else self.outer if self.words[0].text in LOCAL else {}
            kept.setdefault(match[1], self.variables.values.get(match[1]))
            self.assign(match[1], value, bool(match[2]), line)
            shown = value if isinstance(value, Word) else Word("", line)
            self.words.append(Word(match[0] + shown.text, line, shown.missing))
            return
        if may and (item := _ITEM.match(raw)) and self.runs:
            self.variables.lose(item[1], line, f"an item of it is set on line {line}")
        elif may and not sets:
            for name, before in self.own.items():
                self.variables.assign(name, before)
            self.own = {}
        self.words += self.variables.words(pieces, line)
        if len(self.words) == 3 and (self.words[0].text, raw) == ("case", "in"):  # patterns follow
            self.flow.case(self.words)
            self.words = []

    def assign(self, name: str, value: Value, adds: bool, line: int) -> None:
        if self.runs:
            self.flow.sets(name, line, adds or self.before is not None)
            self.variables.assign(name, value, adds)

    def array(self) -> list[Word]:
        lexer, line = self.lexer, self.lexer.line
        items: list[Word] = []
        lexer.skip(1)
        while lexer.char != ")":
            if not lexer.char:
                raise lexer.open_end("a bracket", line)
            if lexer.blank(" \t\n"):
                continue
            if lexer.char == "#":
                lexer.take(COMMENT)
            elif lexer.char in ";|&<>(" and not lexer.follows(SUBSTITUTIONS):
                raise UserError(f"{lexer.name}:{lexer.line}: {lexer.char!r} in an array cannot be read")
            else:
                number = lexer.line
                items += self.variables.words(lexer.pieces(), number)
        lexer.skip(1)
        return items

    def sums(self, text: str, line: int) -> bool | None:
        """Handles ``((N = A * B))``; returns its status."""
        status: bool | None = None
        for part in text.split(","):
            if match := _SET.fullmatch(part):
                name, sign, right, step = match[1], match[2], match[3], match[4]
                whole = f"{name} {sign} ({right})" if sign else right or f"{name} {step[0]} 1"
                self.assign(name, self.variables.sum(whole, f"$(({whole}))", line), False, line)
            else:
                value = self.variables.sum(part, f"$(({part}))", line)
                status = None if value.missing else value.text != "0"
        return status
