"""Shell scripts, read and not run: the words of their commands, with what the script itself sets put in for variables.

``shlex`` has no variables, arrays, here-documents or lines, takes ``#`` inside a word for a comment, and forgets which quotes a
word had, which decide whether a variable is put in.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from rlhf_host.errors import UserError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_NESTED = r"[^{}]*+"
for _ in range(8):  # in each other
    _NESTED = rf"(?:[^{{}}]++|\{{{_NESTED}\}})*+"
_VARIABLE = re.compile(rf"\$(?:\{{{_NESTED}\}}|\w+|[@*#?!$-])")
_PARAMETER = re.compile(r"(?P<length>#?)(?P<name>\w+)(?:\[(?P<index>[@*]|-?\d+)\])?(?::?(?P<sign>[-=+])(?P<other>.*))?", re.S)
_C_QUOTE = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.S)
_C_ESCAPE = re.compile(r"\\(?:[\\'\"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[0-3]?[0-7]{1,2})")
_BRACES = re.compile(r"\{([^{},]*,[^{}]*|(-?\d{1,3})\.\.(-?\d{1,3}))\}")
_BLANKS = re.compile(r"[ \t\n]+")
_SUBSTITUTIONS = ("<(", ">(")
_COMMENT = re.compile(r"#[^\n]*")
_HERE = re.compile(r"<<-?(?!<)[ \t]*")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>|<<<|<)(?:&[\d-]+)?[ \t]*")
_LINE = re.compile(r"[^\n]*\n?")
_BARE = re.compile(r"[^ \t\n;|&<>()'\"\\$`]+")
_PREFIXES = {"if", "then", "else", "elif", "do", "while", "until", "{", "}", "!", "time", "exec", "nohup", "sudo", "env"}
_SETTERS = {"export", "declare", "local", "readonly", "typeset"}
_BRANCHES = {"if": 1, "case": 1, "fi": -1, "esac": -1}
_MOST = 1_000_000
"""Characters that variables put in."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    line: int


_Piece: TypeAlias = tuple[str, str, bool]
"""``text``, ``variable`` or ``command``; what it says; whether it is in double quotes."""


@dataclass
class Script:
    """What a script says."""

    commands: list[list[Word]] = field(default_factory=list)
    """Assignments before a command are words of it."""
    values: dict[str, str | list[Word]] = field(default_factory=lambda: {"HOME": "~"})
    unset: list[str] = field(default_factory=list)
    """What has no value here and stays in the words: ``${NAME}``, also where a command sets it, or ``$(COMMAND)``."""
    branched: dict[str, list[int]] = field(default_factory=dict)
    """Variables whose value depends on a condition, and is used → lines that set them. The last one counts."""
    arguments: dict[int, int] = field(default_factory=dict)
    """Number of a command that passes the script's own arguments on, ``$@`` → the line."""


def read_script(text: str, name: str) -> Script:
    """The commands of a script in order, of every branch and body.

    Args:
        name: the file, for messages.

    Raises:
        UserError: a quote, bracket or here-document that does not end, or variables without end.
    """
    return _Reader(text.replace("\r\n", "\n"), name).read()


class _Reader:
    def __init__(self, text: str, name: str, line: int = 1):
        self.text, self.name = text, name
        self.at, self.line, self.passes_on = 0, line, 0
        self.script = Script()
        self.words: list[Word] = []
        self.waiting: list[tuple[str, str | None, bool]] = []
        """Here-documents that begin on the next line: delimiter, the variable that gets it, whether variables are put in."""
        self.depth, self.follows = 0, False
        """Branches around this place; whether it runs only if the command before did, or did not."""
        self.set_on: dict[str, list[int]] = {}
        self.left = _MOST

    def read(self) -> Script:
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t" or self.text.startswith("\\\n", self.at):
                self.skip(2 if char == "\\" else 1)
            elif self.take(_COMMENT):
                pass
            elif self.text.startswith(_SUBSTITUTIONS, self.at):
                self.word()
            elif self.take(_HERE):
                self.here_document()
            elif redirection := self.take(_REDIRECTION):
                if "&" not in redirection[1:]:
                    self.pieces()  # the file
            elif char in "\n;|&()":
                self.end()
                self.follows = self.text.startswith(("&&", "||"), self.at)
                self.skip(2 if self.follows else 1)
                if char == "\n":
                    self.here_bodies()
            else:
                self.word()
        self.end()
        if self.waiting:
            raise self.open_end(f"the here-document {self.waiting[0][0]}", self.line)
        return self.script

    def take(self, pattern: re.Pattern[str]) -> str:
        """What the pattern matches here, which is then behind."""
        match = pattern.match(self.text, self.at)
        text = match[0] if match else ""
        self.skip(len(text))
        return text

    def skip(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def open_end(self, what: str, line: int) -> UserError:
        return UserError(f"{self.name}:{line}: {what} that begins here does not end")

    def end(self) -> None:
        """Of a command."""
        while self.words:
            self.depth += _BRANCHES.get(self.words[0].text, 0)
            if self.words[0].text not in _PREFIXES:
                break
            self.words.pop(0)
        if self.words and self.words[0].text == "unset":
            for word in self.words[1:]:
                self.assign(word.text, "", False, word.line)
        if self.words:
            self.script.arguments |= {len(self.script.commands): self.passes_on} if self.passes_on else {}
            self.script.commands.append(self.words)
        self.words, self.passes_on = [], 0

    # --- words ----------------------------------------------------------------------------------

    def word(self) -> None:
        line, begin = self.line, self.at
        pieces = self.pieces()
        raw = self.text[begin : self.at]
        first = not self.words or self.words[0].text in _SETTERS | _PREFIXES or _ASSIGNMENT.match(self.words[-1].text)
        if first and (match := _ASSIGNMENT.match(raw)):
            name, adds = match[0].rstrip("+="), "+=" in match[0]
            if raw == match[0] and self.text.startswith("(", self.at):
                value: str | list[Word] | None = self.array()
            elif any(kind == "command" for kind, _, _ in pieces):
                value = None
            else:
                value = "".join(word.text for word in self.put_in(pieces, line, split=False))[len(match[0]) :]
            self.assign(name, value, adds, line)
            if not isinstance(value, list):
                self.words += [Word(raw if value is None else match[0] + value, line)]
        else:
            self.words += self.put_in(pieces, line)

    def assign(self, name: str, value: str | list[Word] | None, adds: bool, line: int) -> None:
        old = self.script.values.get(name)
        if self.depth > 0 or self.follows:
            self.set_on.setdefault(name, []).append(line)
        elif not adds:
            self.set_on[name] = [line]
        if value is None:
            self.script.values.pop(name, None)
        elif not adds or old is None:
            self.script.values[name] = value
        elif isinstance(old, str):
            self.script.values[name] = old + value if isinstance(value, str) else [Word(old, line), *value]
        elif isinstance(value, str):  # to the first item
            first, *others = old or [Word("", line)]
            self.script.values[name] = [Word(first.text + value, first.line), *others]
        else:
            self.script.values[name] = [*old, *value]

    def array(self) -> list[Word]:
        line, outer, self.words = self.line, self.words, []
        self.skip(1)
        while not self.text.startswith(")", self.at):
            if self.at >= len(self.text):
                raise self.open_end("a bracket", line)
            char = self.text[self.at]
            if char in " \t\n" or self.text.startswith("\\\n", self.at):
                self.skip(2 if char == "\\" else 1)
            elif self.take(_COMMENT):
                pass
            elif char in ";|&<>(":
                raise UserError(f"{self.name}:{self.line}: {char!r} in an array cannot be read")
            else:
                number = self.line
                self.words += self.put_in(self.pieces(), number)
        self.skip(1)
        items, self.words = self.words, outer
        return items

    def pieces(self, stops: str = " \t\n;|&<>()") -> list[_Piece]:
        """Of one word, from here to its end."""
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith(_SUBSTITUTIONS, self.at):
                pieces.append(("command", self.brackets(), False))
            elif char in stops:
                break
            elif char == "'":
                pieces.append(("text", self.until("'", "a quote"), True))
            elif char == '"':
                pieces += self.double_quoted()
            elif char == "\\":
                pieces += [("text", text, True)] if (text := self.text[self.at + 1 : self.at + 2]) != "\n" else []
                self.skip(2)
            elif char in "$`":
                pieces.append(self.dollar(False))
            else:
                pieces.append(("text", self.take(_BARE) or char, False))
                if not _BARE.match(char):
                    self.skip(1)
        return pieces

    def until(self, close: str, what: str) -> str:
        end = self.text.find(close, self.at + 1)
        if end < 0:
            raise self.open_end(what, self.line)
        text = self.text[self.at + 1 : end]
        self.skip(end + 1 - self.at)
        return text

    def double_quoted(self) -> list[_Piece]:
        line = self.line
        self.skip(1)
        pieces = self.quoted('"')
        if self.at >= len(self.text):
            raise self.open_end("a quote", line)
        self.skip(1)
        return pieces

    def quoted(self, close: str) -> list[_Piece]:
        """From here to the quote that closes, or to the end."""
        pieces = [("text", "", True)]
        while self.at < len(self.text) and self.text[self.at] != close:
            char, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following and following in '"\\$`\n':
                pieces.append(("text", following.strip("\n"), True))
                self.skip(2)
            elif char in "$`":
                pieces.append(self.dollar(True))
            else:
                pieces.append(("text", char, True))
                self.skip(1)
        return pieces

    def dollar(self, quoted: bool) -> _Piece:
        """A variable, or a command whose output would be put in."""
        if self.text[self.at] == "`":
            return "command", f"`{self.until('`', 'a quote')}`", quoted
        if self.text.startswith("$(", self.at):
            return "command", self.brackets(), quoted
        if variable := self.take(_VARIABLE):
            return "variable", variable, quoted
        if self.text.startswith("${", self.at):
            raise UserError(f"{self.name}:{self.line}: a ${{ that does not end, or nests more than 8 deep")
        if not quoted and (text := self.take(_C_QUOTE)):
            return "text", _C_ESCAPE.sub(lambda escape: escape[0].encode().decode("unicode_escape"), text[2:-1]), True
        translates = not quoted and self.text.startswith('$"', self.at)
        self.skip(1)
        return "text", "" if translates else "$", True

    def brackets(self) -> str:
        """From here to the bracket that closes."""
        begin, line, depth = self.at, self.line, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            depth += (char == "(") - (char == ")")
            self.skip(1)
            if char == ")" and depth == 0:
                return self.text[begin : self.at]
        raise self.open_end("a bracket", line)

    # --- variables ------------------------------------------------------------------------------

    def put_in(self, pieces: list[_Piece], line: int, split: bool = True) -> list[Word]:
        """Words of the pieces: a variable without quotes may be several, or none."""
        words: list[Word] = []
        for each in self.braces(pieces, line) if split else [pieces]:
            words += self.expanded(each, line, split)
        return words

    def braces(self, pieces: list[_Piece], line: int) -> Iterator[list[_Piece]]:
        """``d{1,2}`` as ``d1`` and ``d2``."""
        for place, (kind, said, quoted) in enumerate(pieces):
            if kind == "text" and not quoted and (match := _BRACES.search(said)):
                first, last = (int(match[2]), int(match[3])) if match[2] else (0, 0)
                step = 1 if first <= last else -1
                numbers = range(first, last + step, step)
                for item in map(str, numbers) if match[2] else match[1].split(","):
                    text = said[: match.start()] + item + said[match.end() :]
                    word: list[_Piece] = [*pieces[:place], ("text", text, False), *pieces[place + 1 :]]
                    self.spend(sum(len(text) for _, text, _ in word), line)
                    yield from self.braces(word, line)
                return
        yield pieces

    def spend(self, count: int, line: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UserError(f"{self.name}:{line}: the variables up to here make more than {_MOST:,} characters")

    def expanded(self, pieces: list[_Piece], line: int, split: bool) -> list[Word]:
        words: list[Word] = []
        text, exists, spread = "", False, False
        for value, splits in self.values(pieces, line):
            if isinstance(value, list):
                if split:  # words of an array stand alone where they are used
                    words += value
                    spread = True
                    continue
                value = " ".join(word.text for word in value)
            if splits and split:
                for number, part in enumerate(_BLANKS.split(value)):
                    if number and (text or exists):
                        words.append(Word(text, line))
                        text, exists = "", False
                    text, exists = text + part, exists or bool(part)
            else:
                text, exists = text + value, True
        return [*words, Word(text, line)] if text or (exists and not spread) else words

    def values(self, pieces: list[_Piece], line: int) -> Iterator[tuple[str | list[Word], bool]]:
        """What the pieces say, and whether it is split at blanks."""
        for kind, said, quoted in pieces:
            if kind == "variable":
                for value, splits in self.variable(said, quoted, line):
                    self.spend(len(value) if isinstance(value, str) else sum(len(word.text) + 1 for word in value), line)
                    yield value, splits
            else:
                yield self.without_value(said) if kind == "command" else said, not (quoted or kind == "command")

    def variable(self, raw: str, quoted: bool, line: int) -> Iterator[tuple[str | list[Word], bool]]:
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        match = _PARAMETER.fullmatch(inner)
        if inner in ("@", "*"):
            self.passes_on = line
            yield [], False
            return
        name, sign = (match["name"], match["sign"]) if match else ("", None)
        known = self.known(match) if match else None
        if len(lines := self.set_on.get(name, [])) > 1:
            self.script.branched[name] = list(lines)
        if match and sign and (known if sign == "+" else not known):
            other = re.sub(r'(?<!\\)"', "", match["other"]) if quoted else match["other"]
            reader = _Reader(other, self.name, line)
            values = list(self.values(reader.quoted("") if quoted else reader.pieces(""), line))
            if sign == "=":
                self.script.values[name] = "".join(value for value, _ in values if isinstance(value, str))
            yield from ((value, splits and not quoted) for value, splits in values)
        elif known is None:
            yield self.without_value(f"${{{inner}}}"), False
        else:
            yield "" if sign == "+" else known, not quoted

    def known(self, parameter: re.Match[str]) -> str | list[Word] | None:
        value, index = self.script.values.get(parameter["name"]), parameter["index"]
        if value is not None and index and index not in "@*":
            items = [value] if isinstance(value, str) else [word.text for word in value]
            value = items[int(index)] if -len(items) <= int(index) < len(items) else ""
        if value is None or not parameter["length"]:
            return value
        return str(len(value)) if isinstance(value, list) == (index in ("@", "*")) else None

    def without_value(self, text: str) -> str:
        if text not in self.script.unset:
            self.script.unset.append(text)
        return text

    # --- here-documents -------------------------------------------------------------------------

    def here_document(self) -> None:
        raw = self.at
        delimiter = "".join(text for _, text, _ in self.pieces())
        reads = self.words and self.words[0].text == "read"
        quoted = self.text[raw] in "'\"\\"
        self.waiting.append((delimiter, self.words[-1].text if reads else None, not quoted))

    def here_bodies(self) -> None:
        for delimiter, variable, puts_in in self.waiting:
            begin, words = self.line, []
            while self.at < len(self.text):
                number, line = self.line, self.take(_LINE).removesuffix("\n")
                if line.strip() == delimiter:
                    break
                for text in line.removesuffix("\\").split():
                    words += self.put_in(self.parts(text) if puts_in else [("text", text, True)], number)
            else:
                raise self.open_end(f"the here-document {delimiter}", begin - 1)
            if variable is not None:
                self.script.values[variable] = words
        self.waiting = []

    @staticmethod
    def parts(text: str) -> list[_Piece]:
        pieces: list[_Piece] = []
        end = 0
        for match in _VARIABLE.finditer(text):
            pieces += [("text", text[end : match.start()], False), ("variable", match[0], False)]
            end = match.end()
        return [*pieces, ("text", text[end:], False)]
