"""Variables of a shell script, and words with their values filled in."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rlhf_host import UserError
from rlhf_translate.shell.arithmetic import evaluate
from rlhf_translate.shell.lexer import Lexer, Piece
from rlhf_translate.shell.word import Value, Word, joined, split, union

_PARAMETER = re.compile(
    r"(?P<length>#?)(?P<name>\w+|\#)(?:\[(?P<index>[@*]|-?\d+)\])?"
    r"(?:(?P<sign>:?[-=+?]|%%?|\#\#?|//?|\^\^?|,,?|:)(?P<other>.*))?",
    re.S,
)
_BRACES = re.compile(r"\{([^{},]*,[^{}]*|(-?\d{1,3})\.\.(-?\d{1,3}))\}")
_CUT = re.compile(r"[@*](?::\s*(\d+)(?::\s*(\d+))?)?")
_OF_PATH = re.compile(r"\$\(\s*(basename|dirname)\s+(?:--\s+)?((?:[^'`|;&<>()\\\n-]|(?<=\S)-)+)\)")
_NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
_MOST = 1_000_000
"""Maximum characters from variables."""


class _Part(NamedTuple):
    """Meaning of a piece of a word."""

    value: Value
    splits: bool
    """True if it is split at blanks."""


@dataclass
class Variables:
    """Values of variables at one place of a script."""

    name: str
    """Name of the file, for messages."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Values from the reader for variables that the script does not set."""
    values: dict[str, Value] = field(default_factory=dict)
    left: int = _MOST
    used: set[str] = field(default_factory=set)
    """Names of variables that the reader gave and the script needed."""
    passes_on: int = 0
    """Line of ``$@`` in the words since this was set to 0: the arguments of the script itself."""

    # --- values ---------------------------------------------------------------------------------

    def get(self, name: str) -> Value | None:
        """Returns the value; None for a variable that nothing sets."""
        if name.isdigit() or name == "#":
            return self._argument(name)
        value = self.values.get(name)
        if name in self.given and (value is None or (isinstance(value, Word) and value.missing)):
            self.used.add(name)
            return Word(self.given[name], 0)
        return value

    def assign(self, name: str, value: Value | None, adds: bool = False) -> None:
        """Sets it; None removes the value."""
        old = self.values.get(name)
        if value is None:
            self.values.pop(name, None)
        elif not adds or old is None:
            self.values[name] = value
        elif isinstance(old, Word):
            self.values[name] = joined([old, value], old.line, "") if isinstance(value, Word) else [old, *value]
        elif isinstance(value, Word):  # to the first item
            first, *others = old or [Word("", value.line)]
            self.values[name] = [joined([first, value], first.line, ""), *others]
        else:
            self.values[name] = [*old, *value]

    def lose(self, name: str, line: int, why: str) -> None:
        """Marks the variable's value as unknown."""
        self.values[name] = Word(f"${{{name}}}", line, (f"${{{name}}} ({why})",))

    # --- arguments ------------------------------------------------------------------------------

    @property
    def _given_arguments(self) -> list[Word]:
        """Arguments of the script itself, from the reader."""
        names = sorted((name for name in self.given if name.isdigit()), key=int)
        return [Word(self.given[name], 0) for place, name in enumerate(names, 1) if int(name) == place]

    def _argument(self, name: str) -> Word | None:
        """Returns ``$1`` and ``$#`` of the function, or of the script itself."""
        known = self.values.get("@")
        if isinstance(known, Word):
            return Word(f"${{{name}}}", known.line, (f"${{{name}}}",))
        if name == "#":
            return Word(str(len(self._given_arguments if known is None else known)), 0)
        if known is None:
            self.used |= {name} & set(self.given)
            return Word(self.given[name], 0) if name in self.given else None
        return known[int(name) - 1] if 0 < int(name) <= len(known) else None

    def _arguments(self, inner: str, quoted: bool, line: int) -> _Part:
        """Returns ``$@``, ``$*``, ``${@:2}``."""
        known = self.values.get("@")
        if known is None:
            self.passes_on = line
            return _Part([], False)
        cut = _CUT.fullmatch(inner)
        if isinstance(known, Word) or not cut:
            return _Part(Word(f"${{{inner}}}", line, (f"${{{inner}}}",)), False)
        begin = max(int(cut[1] or 1), 1) - 1
        words = known[begin : begin + int(cut[2]) if cut[2] else None]
        return _Part(joined(words, line) if quoted and inner.startswith("*") else words, not quoted)

    def shift(self, words: list[Word]) -> None:
        """Does ``shift 2``: removes the first arguments."""
        known = self.values.get("@")
        own = self._given_arguments
        if words and (words[0].missing or not words[0].text.isdigit()):
            self.lose("@", words[0].line, f"shift on line {words[0].line}")
        elif isinstance(known, list) or (known is None and own):
            self.used |= {name for name in self.given if name.isdigit()} if known is None else set()
            self.values["@"] = (own if known is None else known)[int(words[0].text) if words else 1 :]

    # --- words ----------------------------------------------------------------------------------

    def words(self, pieces: list[Piece], line: int) -> list[Word]:
        """Returns the words of one word as it is written: a variable without quotes may be several, or none."""
        return [word for each in self._braces(pieces, line) for word in self._expanded(each, line)]

    def text(self, pieces: list[Piece], line: int) -> Word:
        """Returns one word, whatever is in it."""
        parts = list(self._parts(pieces, line))
        words = [joined(part.value, line) if isinstance(part.value, list) else part.value for part in parts]
        return Word("".join(word.text for word in words), line, union(words))

    def _expanded(self, pieces: list[Piece], line: int) -> list[Word]:
        words: list[Word] = []
        last: list[Word] = []  # parts of the word that has not ended
        exists = spread = False
        for value, splits in self._parts(pieces, line):
            if isinstance(value, list):  # its first item goes on with the word before it, and its last one is gone on with
                spread = True
                for number, item in enumerate(value):
                    if number:
                        words.append(_one(last, line))
                        last = []
                    last.append(item)
            elif splits:
                for number, part in enumerate(split(value, line)):
                    if number and (last or exists):
                        words.append(_one(last, line))
                        last, exists = [], False
                    last += [part] if part.text else []
            else:
                last.append(value)
                exists = True
        return [*words, _one(last, line)] if any(part.text for part in last) or (exists and not spread) else words

    def _braces(self, pieces: list[Piece], line: int) -> Iterator[list[Piece]]:
        """Expands ``d{1,2}`` to ``d1`` and ``d2``."""
        for place, (kind, said, quoted) in enumerate(pieces):
            if kind == "text" and not quoted and (match := _BRACES.search(said)):
                first, last = (int(match[2]), int(match[3])) if match[2] else (0, 0)
                step = 1 if first <= last else -1
                numbers = range(first, last + step, step)
                for item in map(str, numbers) if match[2] else match[1].split(","):
                    text = said[: match.start()] + item + said[match.end() :]
                    word = [*pieces[:place], Piece("text", text, False), *pieces[place + 1 :]]
                    self.spend(sum(len(piece.text) for piece in word), line)
                    yield from self._braces(word, line)
                return
        yield pieces

    def spend(self, count: int, line: int) -> None:
        self.left -= count
        if self.left < 0:
            raise UserError(f"{self.name}:{line}: the variables up to here make more than {_MOST:,} characters")

    def _parts(self, pieces: list[Piece], line: int) -> Iterator[_Part]:
        for kind, said, quoted in pieces:
            if kind == "variable":
                for part in self._variable(said, quoted, line):
                    value = part.value
                    self.spend(len(value.text) if isinstance(value, Word) else sum(len(word.text) + 1 for word in value), line)
                    yield part
            elif kind == "arithmetic":
                yield _Part(self.sum(said[3:-2], said, line), False)
            elif kind == "command":
                path = self._of_path(said, line)
                yield _Part(path or Word(said, line, (said,)), path is not None and not quoted)
            else:
                yield _Part(Word(said, line), not quoted)

    def _of_path(self, said: str, line: int) -> Word | None:
        """Returns the value of ``$(basename PATH .sh)`` and ``$(dirname PATH)``, which depend on nothing but their words; None for
        another command.
        """
        match = _OF_PATH.fullmatch(said)
        try:
            parts = shlex.split(match[2]) if match else []
        except ValueError:
            return None
        words = [self.text(Lexer(part, self.name, line).quoted(), line) for part in parts]
        if match is None or union(words) or not 0 < len(words) <= 1 + (match[1] == "basename") or not words[0].text:
            return None
        path = words[0].text.rstrip("/") or "/"
        if match[1] == "dirname":
            return Word(path.rpartition("/")[0].rstrip("/") or ("/" if path.startswith("/") else "."), line)
        name = path.rpartition("/")[2] or "/"
        suffix = words[1].text if len(words) > 1 else ""
        return Word(name.removesuffix(suffix) or name, line)

    # --- variables and sums ---------------------------------------------------------------------

    def sum(self, text: str, shown: str, line: int) -> Word:
        """Returns the value of a sum, or the sum itself if it has none."""
        lost: list[Word] = []

        def number(name: str) -> int:
            value = self.get(name)
            word = (
                joined(value[:1], line) if isinstance(value, list) else value or Word(f"${{{name}}}", line, (f"${{{name}}}",))
            )
            if word.missing:
                lost.append(word)
                raise ValueError(name)
            return int(word.text, 10) if word.text.strip() else 0

        pieces = Lexer(text, self.name, line).quoted()
        inner = self.text(pieces, line)
        try:
            if inner.missing:
                raise ValueError(text)
            return Word(str(evaluate(inner.text, number)), line)
        except (ValueError, RecursionError):
            return Word(shown, line, inner.missing or union(lost) or (shown,))

    def _variable(self, raw: str, quoted: bool, line: int) -> Iterator[_Part]:
        inner = raw[2:-1] if raw.startswith("${") else raw[1:]
        if inner.startswith(("@", "*")):
            yield self._arguments(inner, quoted, line)
            return
        match = _PARAMETER.fullmatch(inner)
        if inner.startswith("!") and (name := _NAME.fullmatch(inner[1:])):  # the variable that another one names
            through = self.get(name[1])
            match = _PARAMETER.fullmatch(through.text) if isinstance(through, Word) and not through.missing else None
        value = self._known(match) if match else None
        sign = (match["sign"] or "") if match else ""
        kind = sign.lstrip(":") if match and match["other"] is not None else ""
        empty = value is None or (sign.startswith(":") and isinstance(value, Word) and not value.text) or value == []
        if kind in ("-", "=", "+") and match and (empty if kind != "+" else not empty):
            yield from self._other(match, kind, quoted, line)
        elif kind == "+":
            yield _Part(Word("", line), not quoted)
        elif value is None:
            shown = f"${{{inner}}}" if kind != "?" and match else raw
            shown = f"${{{match['name']}}}" if kind == "?" and match else shown
            yield _Part(Word(shown, line, (shown,)), False)
        elif sign in ("", ":-", "-", ":=", "=", ":?", "?"):
            whole = quoted and isinstance(value, list) and match is not None and match["index"] != "@"
            yield _Part(joined(value, line) if whole and isinstance(value, list) else value, not quoted)
        else:
            yield _Part(self._cut(match, value, raw, line), not quoted)

    def _other(self, match: re.Match[str] | None, kind: str, quoted: bool, line: int) -> Iterator[_Part]:
        """Yields the text of ``${NAME:-THIS}`` in place of the variable."""
        assert match is not None
        other = re.sub(r'(?<!\\)"', "", match["other"]) if quoted else match["other"]
        lexer = Lexer(other, self.name, line)
        parts = list(self._parts(lexer.quoted() if quoted else lexer.pieces(""), line))
        if kind == "=":
            self.values[match["name"]] = joined((part.value for part in parts if isinstance(part.value, Word)), line, "")
        yield from (_Part(part.value, part.splits and not quoted) for part in parts)

    def _known(self, parameter: re.Match[str]) -> Value | None:
        value, index = self.get(parameter["name"]), parameter["index"]
        if value is not None and index and index not in "@*":
            items = [value] if isinstance(value, Word) else value
            value = items[int(index)] if -len(items) <= int(index) < len(items) else Word("", 0)
        if value is None or not parameter["length"]:
            return value
        if isinstance(value, list) != (index in ("@", "*")) or (isinstance(value, Word) and value.missing):
            return None
        return Word(str(len(value) if isinstance(value, list) else len(value.text)), 0)

    def _cut(self, match: re.Match[str] | None, value: Value, raw: str, line: int) -> Word:
        """Handles ``${NAME%.sh}``, ``${NAME##*/}``, ``${NAME/a/b}``, ``${NAME^^}``, ``${NAME:1:2}``."""
        assert match is not None
        word = joined(value, line) if isinstance(value, list) else value
        other = self.text(Lexer(match["other"], self.name, line).quoted(), line)
        if word.missing or other.missing:
            return Word(raw, line, (*word.missing, *other.missing))
        text = _changed(word.text, match["sign"], other.text)
        return Word(raw, line, (raw,)) if text is None else Word(text, line)


def _one(parts: list[Word], line: int) -> Word:
    """Joins parts to one word; a single part keeps its line."""
    filled = [part for part in parts if part.text]
    return filled[0] if len(filled) == 1 else joined(parts, line, "")


def _changed(text: str, sign: str, other: str) -> str | None:
    """Returns the text after one operation; None if the operation is unknown here."""
    if sign in ("^^", ",,") and not other:
        return text.upper() if sign == "^^" else text.lower()
    if sign in ("^", ",") and not other:
        return (text[:1].upper() if sign == "^" else text[:1].lower()) + text[1:]
    if sign == ":":
        parts = other.split(":")
        if len(parts) > 2 or not all(re.fullmatch(r" *-?\d+ *", part) for part in parts):
            return None
        begin = int(parts[0])
        rest = text[begin:]
        return rest[: int(parts[1])] if len(parts) == 2 else rest
    if sign in ("/", "//"):
        pattern, _, new = other.partition("/")
        if set(pattern) & set("*?[#%"):
            return None
        return text.replace(pattern, new) if sign == "//" else text.replace(pattern, new, 1)
    ends = range(len(text) + 1)
    if sign in ("#", "##"):
        fits = [end for end in ends if fnmatch.fnmatchcase(text[:end], other)]
        return text[(fits[0] if sign == "#" else fits[-1]) :] if fits else text
    fits = [begin for begin in ends if fnmatch.fnmatchcase(text[begin:], other)]
    return text[: fits[-1] if sign == "%" else fits[0]] if fits else text
