"""Another project's options, and their outcomes here."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

PROGRAM = "program"
"""Key for the program that a command runs, which may choose the algorithm."""

ON = ("", "true", "1", "yes")
OFF = ("false", "0", "no")
NONE = ("none", "null", "~", "")


PROCESSES = "processes"
"""Key for the number of processes that the command starts."""


class Unknown(Exception):
    """The value of an option cannot be derived from the file."""

    def __init__(self, option: Option, why: str):
        super().__init__(why)
        self.option, self.why = option, why


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it is written in the other project.

    If the file gives no value, reading it raises ``Unknown``.
    """

    name: str
    """``--pretrain``, ``data.train_files``."""
    values: tuple[str, ...] = ()
    line: int = 0
    """Line; 0: not written, the value is the other project's default."""
    sign: str = " "
    """Sign between name and value."""
    file: str = ""
    """File of the line, if it is not the translated one."""
    without_credentials: bool = False
    """True if a key, or the user and password of an address, were removed from the value."""
    missing: tuple[str, ...] = ()
    """Parts of the value that are unknown from the file: ``${NAME}``."""
    refused: str = ""
    """Reason for which the value is invalid here."""
    shown: str = ""
    """Written form, if it is not name and value."""

    @property
    def written(self) -> str:
        """The value as a text, which may have unknown parts."""
        if self.refused:
            raise Unknown(self, self.refused)
        return " ".join(self.values)

    @property
    def value(self) -> str:
        if self.missing:
            raise Unknown(self, nowhere(self.missing))
        return self.written

    @property
    def text(self) -> str:
        if self.shown:
            return self.shown
        shown = f"[{', '.join(self.values)}]" if self.sign == "=" and len(self.values) > 1 else " ".join(self.values)
        text = f"{self.name}{self.sign}{shown}" if self.values else self.name
        return f"{text} [credentials left out]" if self.without_credentials else text

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.file else f"line {self.line}"

    @property
    def is_on(self) -> bool:
        return self.value.lower() in ON

    @property
    def is_off(self) -> bool:
        return self.value.lower() in OFF or (bool(self.values) and self.value.lower() in NONE)

    @property
    def number(self) -> float | None:
        """The number; None for an option that is ``None``."""
        if not self.value:
            raise Unknown(self, "it has no value")
        if self.value.lower() in NONE:
            return None
        try:
            number = float(self.value.replace("_", ""))
        except ValueError as error:
            raise Unknown(self, f"{self.value} is no number") from error
        if not math.isfinite(number):
            raise Unknown(self, f"{self.value} is no finite number")
        return number

    @property
    def texts(self) -> list[str]:
        """Several values, also if one has commas or brackets; they may have unknown parts."""
        if self.refused:
            raise Unknown(self, self.refused)
        plain = (value[1:-1] if value[:1] + value[-1:] in ("[]", "()") else value for value in self.values)
        items = (item.strip().strip("'\"") for value in plain for item in split_items(value))
        return [item for item in items if item]

    @property
    def items(self) -> list[str]:
        """The same, all of them known."""
        _ = self.value
        return self.texts

    @property
    def numbers(self) -> list[float]:
        try:
            return [float(item) for item in self.items]
        except ValueError as error:
            raise Unknown(self, f"{self.value} is not a list of numbers") from error

    @property
    def pair(self) -> tuple[float, float]:
        """The lower and the upper limit."""
        if len(self.numbers) != 2:
            raise Unknown(self, f"should be two numbers, the lower limit and the upper one, and is {self.value or 'none'}")
        low, high = self.numbers
        return low, high


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of an option here."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key of a configuration file, with dots → value; texts are read as those of flags."""
    remark: str = ""
    lost: bool = False
    """True if nothing here does it; ``remark`` says why. An option with neither settings nor this needs none."""
    asks: tuple[str, ...] | None = None
    """Keys that the reader must set, because their values cannot be derived from the file; may be empty."""
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    """Values of these with which the rest can be tried."""


Convert: TypeAlias = Callable[[Option, "Given"], Outcome]
"""Function from an option to its outcome. ``Unknown``: it needs a value that is not in the file. ``ValueError``: the other
project does not accept the value.
"""
Table: TypeAlias = dict[str, Convert]
"""Newest name → outcome of the option here."""
Defaults: TypeAlias = dict[str, tuple[str, ...]]
"""Newest name → value, for options that matter here if they are not set."""


def nowhere(missing: Iterable[str]) -> str:
    """Returns a message about parts of a value that are not in the file."""
    return f"no value in the file for {' and '.join(missing)}"


def to(settings: Mapping[str, Any], remark: str = "") -> Outcome:
    return Outcome(settings, remark)


def same(remark: str) -> Outcome:
    """Returns the outcome of an option that needs no setting here."""
    return Outcome(remark=remark)


def lost(remark: str) -> Outcome:
    return Outcome(remark=remark, lost=True)


def ask(remark: str, *names: str, **stand_ins: str) -> Outcome:
    """Returns the outcome of an option whose keys only the reader can set.

    Args:
        stand_ins: section → plugin with which the rest can be tried.
    """
    return Outcome(remark=remark, asks=names, stand_ins={f"{section}.name": name for section, name in stand_ins.items()})


def key(name: str, remark: str = "") -> Convert:
    """Returns the outcome of an option with the same value here, under this key."""
    return lambda option, given: to({name: option.written}, remark)


def always(remark: str) -> Convert:
    return lambda option, given: same(remark)


def never(remark: str) -> Convert:
    return lambda option, given: lost(remark)


def switch(settings: Mapping[str, Any], remark: str = "") -> Convert:
    """Returns settings for an option that is on; one that is off needs none."""
    return lambda option, given: to(settings, remark) if not option.is_off else same("off, as it is here")


class Given:
    """The options of one command under their newest names, with the other project's defaults."""

    def __init__(self, method: str, options: Iterable[tuple[str, Option]], version: tuple[int, ...] = ()):
        self.method, self.version = method, version
        self._options = dict(options)
        self.files = {option.file for option in self._options.values()}

    def __getitem__(self, name: str) -> Option:
        return self._options.get(name, Option(name, ("none",)))

    def __contains__(self, name: str) -> bool:
        """Returns True if the option has a value, known or not."""
        option = self[name]
        return name in self._options and (bool(option.missing) or option.written.lower() not in NONE)

    def wrote(self, *names: str) -> bool:
        """Returns True if the command has one of them."""
        return any(self[name].line for name in names)

    def is_on(self, name: str) -> bool:
        return name in self._options and not self[name].is_off

    def number(self, name: str, otherwise: float = 0.0) -> float:
        """Returns the number of an option; ``otherwise`` if the option is ``None`` or missing."""
        number = self[name].number
        return otherwise if number is None else number

    def many(self, name: str, otherwise: float = 1.0) -> float:
        """Returns a number of things, of which there is at least one."""
        number = self.number(name, otherwise)
        if number <= 0:
            raise Unknown(self[name], f"{self[name].value} is not above 0")
        return number

    def instead(self, option: Option, value: tuple[str, ...]) -> Given:
        """Returns the same with another value of an option, as if it had been written."""
        known = replace(option, values=value, missing=(), refused="")
        given = Given(self.method, {name: known if each == option else each for name, each in self._options.items()}.items())
        given.version, given.files = self.version, self.files
        return given


def count(value: float) -> int:
    """Returns a count of 1 or more."""
    return max(1, round(value))


def shown(number: float) -> str:
    return f"{number:g}"


def rounded(number: float) -> str:
    """Returns a remark on a count."""
    return "" if number >= 1 and number == round(number) else "; not a whole number, so it is rounded"


def split_items(text: str) -> list[str]:
    """Splits at commas that are not in quotes."""
    return [item.strip() for item in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,])+""", text)]
