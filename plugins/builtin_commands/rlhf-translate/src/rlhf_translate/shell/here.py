"""Here-documents: ``read -r x <<EOF``, ``sbatch <<EOF``, ``cat > job.sh <<EOF``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlhf_host import UserError
from rlhf_translate.shell.expansion import Variables
from rlhf_translate.shell.lexer import BLANKS, Lexer, Piece
from rlhf_translate.shell.word import Word

HERE = re.compile(r"<<-?(?!<)[ \t]*")
_LINE = re.compile(r"[^\n]*\n?")
_WORD = re.compile(r"(?:[^\s\\]|\\(?!\n))+")
_ESCAPE = re.compile(r"\\(?=[$`])")
_SHELLS = ("bash", "sh", "zsh", "sbatch", "ssh")
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


@dataclass
class HereDocument:
    """A here-document that begins on the next line."""

    delimiter: str
    puts_in: bool
    """True if variables are filled in."""
    variable: str
    """Variable that gets its words; empty: none."""
    is_script: bool


def begin(lexer: Lexer, words: list[Word], is_script: bool) -> HereDocument:
    """Returns the here-document whose delimiter is here.

    Args:
        words: words of the command so far.
        is_script: True if the command writes a script.
    """
    raw = lexer.at
    delimiter = "".join(piece.text for piece in lexer.pieces())
    if lexer.at == raw:
        raise UserError(f"{lexer.name}:{lexer.line}: << names no line at which the here-document ends")
    variable = words[-1].text if words and words[0].text == "read" else ""
    is_script = is_script or any(word.text.rpartition("/")[2] in _SHELLS for word in words[:1])
    return HereDocument(delimiter, lexer.text[raw] not in "'\"\\", variable, is_script)


def body(document: HereDocument, lexer: Lexer) -> Word:
    """Returns its text; the lexer is then after it."""
    line, begins = lexer.line, lexer.at
    while lexer.char:
        end = lexer.at
        if lexer.take(_LINE).removesuffix("\n").strip() == document.delimiter:
            return Word(lexer.text[begins:end], line)
    raise lexer.open_end(f"the here-document {document.delimiter}", line - 1)


def script_of(document: HereDocument, text: Word) -> Word:
    """Returns the script that it contains."""
    return Word(_ESCAPE.sub("", text.text), text.line) if document.puts_in else text


def words_of(document: HereDocument, text: Word, variables: Variables) -> list[Word]:
    lexer = Lexer(text.text, variables.name, text.line)
    words: list[Word] = []
    while lexer.char:
        if lexer.blank(BLANKS):
            continue
        line = lexer.line
        if document.puts_in:
            pieces = [Piece(kind, part, kind == "text") for kind, part, _ in lexer.quoted(BLANKS, "\\$`\n") if part]
            words += variables.words(pieces, line)
        else:
            words.append(Word(lexer.take(_WORD), line))
    return words
