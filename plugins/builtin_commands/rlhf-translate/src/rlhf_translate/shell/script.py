"""The commands of a shell script: the words of each, with variables replaced by the values that the script itself sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rlhf_host import UserError
from rlhf_translate.shell import here
from rlhf_translate.shell.calls import Call, Script
from rlhf_translate.shell.conditions import both, either, negated, truth
from rlhf_translate.shell.expansion import Variables
from rlhf_translate.shell.flow import KEYWORDS
from rlhf_translate.shell.lexer import SUBSTITUTIONS, Lexer
from rlhf_translate.shell.nested import file_of, script_of
from rlhf_translate.shell.reader import ASSIGNMENT, COMMENT, LOCAL, WordReader
from rlhf_translate.shell.slurm import DIRECTIVE, variables_of
from rlhf_translate.shell.word import PLACES, Value, Word, joined

_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>|<<<|<)(?:&[\d-]+)?[ \t]*")
_FUNCTION = re.compile(r"(?:function[ \t]+([\w-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w-]*)[ \t]*\([ \t]*\))\s*\{(?=\s)")
_SUM = re.compile(r"\(\((.*?)\)\)", re.S)
_FILLED_IN = re.compile(PLACES)
_PREFIXES = ("time", "exec", "nohup", "sudo", "env")
_TESTS = ("[", "[[", "test", "grep", "which", "type", "command", "pgrep", "diff", "cmp", "false")
SHOWS = ("echo", "printf", "cat", "logger")
"""Programs that write their words and start nothing."""
_DEEPEST = 6
"""Maximum depth of scripts in scripts."""


def read_script(
    text: str,
    name: str,
    given: Mapping[str, str] | None = None,
    is_script: Callable[[str], bool] = lambda text: False,
    beside: Callable[[str], str | None] = lambda name: None,
) -> Script:
    """Returns the commands of a script in order, in every branch and body that may run.

    Args:
        name: the file, for messages.
        given: values of variables that the script does not set.
        is_script: returns True if a word contains a command that is searched.
        beside: the text of another script, if it is here.

    Raises:
        UserError: a quote, bracket or here-document that does not end, or variables without end.
    """
    variables = Variables(name, given or {}, {"HOME": Word("~", 0)})
    script = Script()
    reader = _ScriptReader(Lexer(text.replace("\r\n", "\n"), name), variables, script, is_script)
    reader.read_script = beside
    reader.read()
    for function in [name for name in reader.functions if name not in reader.called]:
        reader.call(function, None)
    script.given = variables.used
    return script


class _ScriptReader(WordReader):
    def __init__(
        self,
        lexer: Lexer,
        variables: Variables,
        script: Script,
        is_script: Callable[[str], bool],
        outer: _ScriptReader | None = None,
    ):
        super().__init__(lexer, variables)
        self.script, self.is_script = script, is_script
        self.waiting: list[here.HereDocument] = []
        self.into_script = False
        """True if this command writes a script."""
        self.functions: dict[str, Word] = outer.functions if outer else {}
        self.called: set[str] = outer.called if outer else set()
        self.read_script: Callable[[str], str | None] = outer.read_script if outer else lambda name: None
        self.depth: int = outer.depth + 1 if outer else 0
        if self.depth > _DEEPEST:
            raise UserError(f"{lexer.name}:{lexer.line}: scripts in scripts, more than {_DEEPEST} deep")
        self.status: bool | None = True
        """Status of the last command."""
        self.tested = False
        """True if that was a test: other commands are assumed to succeed."""
        self.link = ""
        """``&&`` or ``||`` before this command."""
        self.flips = False
        """True after ``!``."""

    def read(self) -> None:
        lexer = self.lexer
        while lexer.char:
            if lexer.blank():
                continue
            if lexer.char == "#":
                self.comment()
            elif lexer.follows("((") and (not self.words or self.words[0].text == "for"):
                self.bare_sums()
            elif self.in_brackets and lexer.char in "&|<>()":
                self.sign()
            elif lexer.follows(SUBSTITUTIONS):
                self.word()
            elif lexer.take(here.HERE):
                self.waiting.append(here.begin(lexer, self.words, self.into_script))
            elif redirection := lexer.take(_REDIRECTION):
                self.redirected(redirection)
            elif lexer.char in "\n;|&()":
                self.separator()
            elif not self.words and (match := _FUNCTION.match(lexer.text, lexer.at)):
                self.function(match)
            else:
                self.word()
        self.end()
        if self.waiting:
            raise lexer.open_end(f"the here-document {self.waiting[0].delimiter}", lexer.line)

    def bare_sums(self) -> None:
        """Handles ``((...))``, as a command or a condition, or as the header of a loop."""
        line, text = self.lexer.line, self.lexer.take(_SUM)[2:-2]
        if self.words:
            self.words.append(Word(text.partition("=")[0].strip(), line))
        else:
            status, self.own = self.sums(text, line), {}
            self.ended(status, True)

    # --- between commands -----------------------------------------------------------------------

    @property
    def in_brackets(self) -> bool:
        """True between ``[[`` and ``]]``."""
        return bool(self.words) and self.words[0].text == "[[" and self.words[-1].text != "]]"

    def comment(self) -> None:
        line, text = self.lexer.line, self.lexer.take(COMMENT)
        if directive := DIRECTIVE.match(text):
            self.script.directives.append(Word(directive[1].strip(), line))
            for name, value in variables_of(directive[1]).items():
                self.variables.values.setdefault(name, Word(value, line))

    def sign(self) -> None:
        """Handles ``&&``, ``<`` and brackets in ``[[ ]]``."""
        text = self.lexer.text[self.lexer.at : self.lexer.at + 2]
        text = text if text in ("&&", "||") else text[0]
        self.words.append(Word(text, self.lexer.line))
        self.lexer.skip(len(text))

    def redirected(self, sign: str) -> None:
        if "&" in sign[1:]:
            return
        pieces = self.lexer.pieces()  # the file
        if ">" in sign and any(piece.text.endswith(here.SCRIPTS) for piece in pieces):
            self.into_script = True
            for document in self.waiting:
                document.is_script = True

    def separator(self) -> None:
        lexer, char = self.lexer, self.lexer.char
        frame = self.flow.open[-1] if self.flow.kind == "case" else None
        if frame is not None and frame.patterns is not None and char in "|)":
            frame.patterns += self.words
            self.words = []
            if char == ")":
                self.flow.choose()
            lexer.skip(1)
            return
        begins = char == "(" and not self.words and (frame is None or frame.patterns is None)
        self.end()
        if begins:
            self.group(char)
            lexer.skip(1)
            return
        if char == ")" and self.flow.kind == "(":
            self.flow.leave_subshell()
        sign = next((sign for sign in ("&&", "||", ";;") if lexer.follows(sign)), char)
        if sign == ";;" and frame is not None:
            self.flow.leave()
            frame.patterns, frame.runs = [], True
        lexer.skip(len(sign))
        self.link = sign if sign in ("&&", "||") else ""
        self.before = dict(self.variables.values) if self.link and self.reached is None else None
        if char == "\n":
            self.here_bodies()

    @property
    def reached(self) -> bool | None:
        """True if this command runs, judging by the one before it."""
        if not self.link:
            return True
        status = True if self.status is None and not self.tested and self.link == "&&" else self.status
        return status if self.link == "&&" else negated(status)

    @property
    def runs(self) -> bool:
        """True if the present part may run."""
        return self.flow.runs and self.reached is not False

    def end(self) -> None:
        """Ends a command."""
        words, self.words, self.own, self.into_script = self.words, [], {}, False
        call, self.variables.passes_on = Call(words, self.variables.passes_on), 0
        if not words:
            return
        if words[0].text in ("for", "select"):
            self.flow.loop(words)
        else:
            if self.runs:
                self.effects(words)
                self.record(call)
            else:
                self.script.left_out.append(call)
            plain = all(ASSIGNMENT.match(word.text) for word in words)
            self.ended(True if plain else truth(words), words[0].text in _TESTS)

    def ended(self, status: bool | None, tested: bool) -> None:
        """Notes the status of a command."""
        if self.before is not None:
            self.variables.values = self.flow.merged([self.before, self.variables.values], self.lexer.line)
            self.before = None
        status, self.flips = negated(status) if self.flips else status, False
        joins = {"&&": both, "||": either}
        self.status = joins[self.link](self.status, status) if self.link else status
        self.tested = tested or (bool(self.link) and self.tested)
        self.link = ""

    # --- what commands do -----------------------------------------------------------------------

    def effects(self, words: list[Word]) -> None:
        """Applies a command's effects on variables."""
        first = words[0].text
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word.text)]
        if first in LOCAL:
            for word in names:
                self.outer.setdefault(word.text, self.variables.values.get(word.text))
        elif first == "unset":
            for word in names:
                self.variables.assign(word.text, None)
        elif first in ("read", "mapfile", "readarray", "getopts"):
            for word in names:
                self.variables.lose(word.text, word.line, f"read on line {word.line}")
        elif first == "printf" and len(words) > 2 and words[1].text == "-v":
            self.variables.lose(words[2].text, words[2].line, f"set by printf on line {words[2].line}")
        elif first == "set" and len(words) > 1 and words[1].text == "--":
            self.variables.assign("@", words[2:])
        elif first == "shift":
            self.variables.shift(words[1:])
        elif first in ("exit", "return") and self.reached:
            self.flow.stop()
        elif first == "let":
            for word in words[1:]:
                self.sums(word.text, word.line)
        elif first in ("source", ".") and len(words) > 1:
            self.source(words[1:])

    def record(self, call: Call) -> None:
        """Keeps the command, or those of the script or function that it runs."""
        words = call.words
        name = words[0].text
        if name in self.functions:
            self.call(name, words[1:])
            return
        if name == "eval" and (text := joined(words[1:], words[-1].line)).without(text.missing).strip():
            self.inner(text, [])
            return
        for place, word in enumerate(words):
            if script := script_of(words, place):
                self.inner(words[script], words[:place])
                return
            if (file := file_of(words, place)) is not None and self.of_file(words[file:]):
                return
            if name not in (*SHOWS, *_TESTS) and self.is_script_in(word):
                self.inner(word, words[:place])
                return
        self.script.calls.append(call)

    def is_script_in(self, word: Word) -> bool:
        """Returns True for a word that is a script. What only a run would fill in is none: its own commands are not its text."""
        text = _FILLED_IN.sub("", word.without(word.missing))
        return bool(re.search(r"\s", text.strip())) and not ASSIGNMENT.match(text) and self.is_script(text)

    def of_file(self, words: list[Word]) -> bool:
        """Reads a script that runs with this one's variables; returns True if it is here and has a command that is searched."""
        text = self.read_script(words[0].text) if not words[0].missing and self.depth < _DEEPEST else None
        if text is None or not self.is_script(text):
            return False
        before = dict(self.variables.values)
        self.script.read.append(words[0])
        self.within(words[1:], Word(text, 1))
        self.variables.values = before
        return True

    def source(self, words: list[Word]) -> None:
        """Reads another script that runs in the place of this line."""
        text = self.read_script(words[0].text) if not words[0].missing else None
        if text is None or self.depth >= _DEEPEST:
            self.script.unread.append(words[0])
            return
        self.script.read.append(words[0])
        self.within(words[1:] or self.variables.values.get("@"), Word(text, 1))

    def inner(self, text: Word, before: list[Word]) -> None:
        """Reads a script in a word.

        Args:
            before: words that start it.
        """
        script = Script()
        _ScriptReader(Lexer(text.text, self.lexer.name, text.line), self.variables, script, self.is_script, self).read()
        self.script.calls += [Call([*before, *each.words], each.passes_on) for each in script.calls]
        self.script.left_out += script.left_out
        self.script.unread += script.unread
        self.script.read += script.read

    def call(self, name: str, words: list[Word] | None) -> None:
        """Calls a function.

        Args:
            words: its arguments, if they are known.
        """
        body = self.functions[name]
        self.called.add(name)
        if self.depth >= _DEEPEST:
            return
        self.variables.spend(len(body.text), body.line)
        outer = self.within(words, body)
        for variable, value in outer.items():
            self.variables.assign(variable, value)

    def within(self, own: Value | None, text: Word) -> dict[str, Value | None]:
        """Reads a text with its own arguments.

        Returns:
            The earlier values of the variables that it makes local.
        """
        before = self.variables.values.get("@")
        self.variables.assign("@", own)
        reader = _ScriptReader(Lexer(text.text, self.lexer.name, text.line), self.variables, self.script, self.is_script, self)
        reader.read()
        self.variables.assign("@", before)
        return reader.outer

    def function(self, match: re.Match[str]) -> None:
        """Keeps a function's body for its calls."""
        lexer, line, depth = self.lexer, self.lexer.line, 1
        lexer.skip(len(match[0]))
        begin = Word("", lexer.line)
        at = start = lexer.at
        waiting: list[here.HereDocument] = []
        while lexer.char and depth:
            if lexer.char == "\n" and waiting:
                lexer.skip(1)
                for document in waiting:
                    here.body(document, lexer)
                waiting = []
            elif lexer.take(here.HERE):
                waiting.append(here.begin(lexer, [], False))
            elif lexer.char == "#":
                lexer.take(COMMENT)
            elif not lexer.blank(" \t\n;&|()<>"):
                at = lexer.at
                lexer.pieces()
                text = lexer.text[at : lexer.at]
                depth += (text == "{") - (text == "}")
        if depth:
            raise lexer.open_end(f"the function {match[1] or match[2]}", line)
        self.functions[match[1] or match[2]] = Word(lexer.text[start:at], begin.line)

    def structure(self, raw: str, line: int) -> bool:
        """Returns True if the word opens or closes a branch, or precedes a command."""
        if raw == "!":
            self.flips = not self.flips
        elif raw == "{":
            self.group(raw)
        elif raw in KEYWORDS:
            self.flow.keyword(raw, line, self.status)
            self.link, self.before = "", None
        elif raw not in _PREFIXES:
            return False
        return True

    def group(self, sign: str) -> None:
        """Begins the contents of ``{`` or ``(``."""
        self.flow.begin(sign, self.lexer.line)
        self.flow.branch(self.reached)
        self.link, self.before = "", None

    def here_bodies(self) -> None:
        waiting, self.waiting = self.waiting, []
        for document in waiting:
            text = here.body(document, self.lexer)
            if document.is_script and self.flow.runs:
                self.inner(here.script_of(document, text), [])
            elif document.variable and self.flow.runs:
                self.variables.assign(document.variable, here.words_of(document, text, self.variables))
