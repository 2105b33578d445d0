"""The characters of a shell script: the ends of words, and the kinds of their pieces.

``shlex`` has no variables, arrays, here-documents or lines, takes ``#`` inside a word for a comment, and forgets the quotes of
a word, which decide if a variable is filled in.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from rlhf_host import UserError
from rlhf_host.commands import visible

_NESTED = r"[^{}]*+"
for _ in range(8):  # in each other
    _NESTED = rf"(?:[^{{}}]++|\{{{_NESTED}\}})*+"
VARIABLE = re.compile(rf"\$(?:\{{{_NESTED}\}}|\w+|[@*#?!$-])")
_OLD_SUM = re.compile(r"\$\[([^\]]*)\]")
_C_QUOTE = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S)
_C_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0-3]?[0-7]{1,2})")
SUBSTITUTIONS = ("<(", ">(")
_BARE = re.compile(r"[^ \t\n;|&<>()'\"\\$`]+")
BLANKS = " \t\n"
STOPS = " \t\n;|&<>()"
"""Characters that end a word."""


class Piece(NamedTuple):
    """A part of a word."""

    kind: str
    """``text``, ``variable``, ``arithmetic`` or ``command``."""
    text: str
    quoted: bool


class Lexer:
    """A place in a text."""

    def __init__(self, text: str, name: str, line: int = 1):
        self.text, self.name = text, name
        self.at, self.line = 0, line

    @property
    def char(self) -> str:
        """Next character; nothing at the end."""
        return self.text[self.at : self.at + 1]

    def follows(self, text: str | tuple[str, ...]) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, pattern: re.Pattern[str]) -> str:
        """Returns what the pattern matches here, and moves past it."""
        match = pattern.match(self.text, self.at)
        text = match[0] if match else ""
        self.skip(len(text))
        return text

    def skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def blank(self, blanks: str = " \t") -> bool:
        """Moves past a blank, or the end of a line that continues; returns True if there was one."""
        if self.follows("\\\n"):
            self.skip(2)
        elif self.char and self.char in blanks:
            self.skip(1)
        else:
            return False
        return True

    def open_end(self, what: str, line: int) -> UserError:
        return UserError(f"{self.name}:{line}: {visible(what)} that begins here does not end")

    def pieces(self, stops: str = STOPS) -> list[Piece]:
        """Returns the pieces of one word, from here to its end."""
        pieces: list[Piece] = []
        while self.at < len(self.text):
            char = self.char
            if self.follows(SUBSTITUTIONS) and stops:
                pieces.append(Piece("command", self.brackets(), False))
            elif char in stops:
                break
            elif char == "'":
                pieces.append(Piece("text", self.until("'", "a quote"), True))
            elif char == '"':
                pieces += self._double_quoted()
            elif char == "\\":
                text = self.text[self.at + 1 : self.at + 2]
                pieces += [Piece("text", text, True)] if text != "\n" else []
                self.skip(2)
            elif char in "$`":
                pieces.append(self._dollar(False))
            else:
                pieces.append(Piece("text", self.take(_BARE) or char, False))
                if not _BARE.match(char):
                    self.skip(1)
        return pieces

    def until(self, close: str, what: str) -> str:
        """Returns the text between here and the closing character."""
        end = self.text.find(close, self.at + 1)
        if end < 0:
            raise self.open_end(what, self.line)
        text = self.text[self.at + 1 : end]
        self.skip(end + 1 - self.at)
        return text

    def quoted(self, close: str = "", escaped: str = '"\\$`\n') -> list[Piece]:
        """Returns the text from here to one of the closing characters, or to the end, as in double quotes.

        Args:
            escaped: characters that a backslash escapes.
        """
        pieces = [Piece("text", "", True)]
        while self.at < len(self.text) and self.char not in close:
            char, following = self.char, self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following and following in escaped:
                pieces.append(Piece("text", following.strip("\n"), True))
                self.skip(2)
            elif char in "$`":
                pieces.append(self._dollar(True))
            else:
                pieces.append(Piece("text", char, True))
                self.skip(1)
        return pieces

    def brackets(self) -> str:
        """Returns the text from here to the closing bracket; brackets in quotes do not count."""
        begin, line, depth = self.at, self.line, 0
        while self.at < len(self.text):
            char = self.char
            if char in "'\"" and self.text.find(char, self.at + 1) > 0 and depth:
                self.skip(1)
                while self.char and self.char != char:
                    self.skip(2 if self.char == "\\" and char == '"' else 1)
            depth += (char == "(") - (char == ")")
            self.skip(1)
            if char == ")" and depth == 0:
                return self.text[begin : self.at]
        raise self.open_end("a bracket", line)

    def _double_quoted(self) -> list[Piece]:
        line = self.line
        self.skip(1)
        pieces = self.quoted('"')
        if self.at >= len(self.text):
            raise self.open_end("a quote", line)
        self.skip(1)
        return pieces

    def _dollar(self, quoted: bool) -> Piece:
        """Returns a variable, a sum, or a command whose output would be filled in."""
        if self.char == "`":
            return Piece("command", f"`{self.until('`', 'a quote')}`", quoted)
        if self.follows("$("):
            text = self.brackets()
            return Piece("arithmetic" if text.startswith("$((") and text.endswith("))") else "command", text, quoted)
        if old := _OLD_SUM.fullmatch(self.take(_OLD_SUM)):
            return Piece("arithmetic", f"$(({old[1]}))", quoted)
        if variable := self.take(VARIABLE):
            return Piece("variable", variable, quoted)
        if self.follows("${"):
            raise UserError(f"{self.name}:{self.line}: a ${{ that does not end, or nests more than 8 deep")
        if not quoted and (text := self.take(_C_QUOTE)):
            return Piece("text", _C_ESCAPE.sub(lambda escape: escape[0].encode().decode("unicode_escape"), text[2:-1]), True)
        translates = not quoted and self.follows('$"')
        self.skip(1)
        return Piece("text", "" if translates else "$", True)
