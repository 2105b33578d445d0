"""Names of other projects: the tables of ``docs/reference/names.md``, and hints for users who type such a name here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from rlhf_translate import habits
from rlhf_translate.objects import of_object

if TYPE_CHECKING:
    from rlhf_host.settings import UnknownName

_SHOWN = 3


class Name(NamedTuple):
    """One name of another project."""

    project: str
    text: str
    """Text in the other project: ``--pretrain``, ``learning_rate``, ``--algo.advantage.estimator gae``."""
    here: str
    """Flags here; empty: there is none."""
    about: str
    """Explanation, if there is no flag here."""
    remark: str
    """Last column: the difference between the two."""
    now: str
    """Name in the newest version, if known."""

    @property
    def words(self) -> tuple[str, str]:
        """The name as returned by ``key_of``, and its value."""
        name, _, value = self.text.partition(" ")
        return key_of(name), value


def hint(unknown: UnknownName) -> str:
    """Returns ``; OpenRLHF's --pretrain is --actor.model here`` for a name of another project, and what a name that people type out
    of habit is here; else nothing."""
    if unknown.what == "command":
        return habits.of_command(unknown.name)
    if unknown.what == "object":
        return of_object(unknown.value)
    if unknown.what == "flag":
        return _of_flag(unknown.name, unknown.value, unknown.fits) or habits.of_flag(unknown.name, unknown.value)
    return {"option": _of_option, "section": _of_section, "choice": _of_choice}[unknown.what](unknown.name)


def _of_flag(name: str, value: object, fits: Callable[[str], bool]) -> str:
    same = [known for known in names() if known.words[0] == key_of(name) and (not known.here or fits(known.here))]
    with_value = [known for known in same if known.words[1] == str(value)]
    return _hint(with_value or same)


def _of_option(name: str) -> str:
    """Returns a hint if its last part is among names that are other flags here."""
    last = key_of(name.rpartition(".")[2])
    return _hint([known for known in names() if known.words[0] == last and key_of(known.here) != key_of(name)])


def _of_section(name: str) -> str:
    """Returns a hint for the names in a section: its keys may all be another project's."""
    inside = [known for known in names() if known.here and known.words[0].startswith(f"{key_of(name)}.")]
    return f"; docs/reference/names.md says what {inside[0].project}'s {key_of(name)}.* are here" if inside else ""


def _of_choice(name: str) -> str:
    return _hint([known for known in names() if name in (known.words[1], known.text)])


def _hint(known: list[Name]) -> str:
    """Returns the hint; projects with the same name are listed together."""
    answers: dict[str, list[Name]] = {}
    for name in known:
        answers.setdefault(name.here or name.about, []).append(name)
    texts = []
    for answer, same in list(answers.items())[:_SHOWN]:
        owners = " and ".join(dict.fromkeys(f"{name.project}'s" for name in same))
        remark = next((f" ({name.remark})" for name in same if name.remark), "")
        texts.append(f"{owners} {same[0].text} is {answer} here{remark}" if same[0].here else answer)
    return "".join(f"; {text}" for text in texts)


def key_of(name: str) -> str:
    """Returns a name in the form by which the tables are searched."""
    return name.lstrip("-+").replace("-", "_")


@cache
def names() -> list[Name]:
    """Returns the rows of the tables."""
    return list(_read((files("rlhf_translate") / "names.md").read_text(encoding="utf-8")))


def _read(page: str) -> Iterator[Name]:
    """Yields the rows of a table. Columns before ``here`` have names: as many as there are flags, or one set for all of them.
    A table without that column lists names that do not exist here, or are not needed.
    """
    project, columns, suffix = "", 1, ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith("## "):
            project = line.removeprefix("## ")
        elif "here" in cells:
            columns = cells.index("here")
        elif cells and cells[-1].startswith("not "):
            columns, suffix = 0, ": not implemented yet" if cells[-1] == "not here" else ""
        elif any(cell.startswith("`") for cell in cells[:2]):
            flags = [] if not columns else _code(cells[columns])
            newest = _code(cells[0])
            for cell in cells[:columns] or cells[:1]:
                texts, remark = _code(cell), _plain(cells[-1]) if columns else ""
                here = flags if len(texts) == len(flags) else [" and ".join(flags)] * len(texts)
                now = newest if len(texts) == len(newest) else texts
                for text, own, new in zip(texts, here, now, strict=True):
                    yield Name(project, text, own, "" if columns else cells[1] + suffix, remark, new)


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _plain(cell: str) -> str:
    return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", cell).replace("`", "")
