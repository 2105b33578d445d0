"""Another project's options, and what becomes of each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

PROGRAM = "program"
"""Stands for the program that a command runs, which may choose the algorithm."""

ON = ("", "true", "1", "yes")
OFF = ("false", "0", "no")
NONE = ("none", "null", "~", "")


PROCESSES = "processes"
"""Stands for the number of processes that the command starts."""


class Unknown(Exception):
    """The value of an option does not follow from the file."""

    def __init__(self, option: Option, why: str):
        super().__init__(why)
        self.option, self.why = option, why


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it is written there.

    Its value has no figure where the file gives none: what asks for it gets ``Unknown``.
    """

    name: str
    """``--pretrain``, ``data.train_files``."""
    values: tuple[str, ...] = ()
    line: int = 0
    """0: nobody wrote it; the value is the other project's default."""
    sign: str = " "
    """Between name and value."""
    file: str = ""
    """Where the line is, if that is not the file that is translated."""
    without_credentials: bool = False
    """A key, or the user and password of an address, were taken out of the value."""
    missing: tuple[str, ...] = ()
    """Parts of the value that have none in the file: ``${NAME}``."""
    refused: str = ""
    """Why the value cannot be one here."""
    shown: str = ""
    """As it is written, where that is not name and value."""

    @property
    def written(self) -> str:
        """The value as a text, which may have parts without value."""
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
        """``None`` for an option that is ``None``."""
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
        """Several values, also where one has commas or brackets; they may have parts without value."""
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an option is here."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key of a configuration file, with dots → value; texts are read as a flag's."""
    remark: str = ""
    lost: bool = False
    """Nothing here does it; ``remark`` says why. An option with neither settings nor this needs none."""
    asks: tuple[str, ...] | None = None
    """Keys that the reader must set, because their values do not follow from the file; perhaps none that is known."""
    stand_ins: Mapping[str, Any] = field(default_factory=dict)
    """Values of these with which the rest can be tried."""


Convert: TypeAlias = Callable[[Option, "Given"], Outcome]
"""``Unknown``: it needs a value that the file does not give. ``ValueError``: the value is none that the other project takes."""
Table: TypeAlias = dict[str, Convert]
"""Newest name → what the option is here."""
Defaults: TypeAlias = dict[str, tuple[str, ...]]
"""Newest name → value, of options that matter here when nobody sets them."""


def nowhere(missing: Iterable[str]) -> str:
    """That parts of a value have none."""
    return f"no value in the file for {' and '.join(missing)}"


def to(settings: Mapping[str, Any], remark: str = "") -> Outcome:
    return Outcome(settings, remark)


def same(remark: str) -> Outcome:
    """It needs no setting here."""
    return Outcome(remark=remark)


def lost(remark: str) -> Outcome:
    return Outcome(remark=remark, lost=True)


def ask(remark: str, *names: str, **stand_ins: str) -> Outcome:
    """Only the reader knows the values of these keys.

    Args:
        stand_ins: section → plugin with which the rest can be tried.
    """
    return Outcome(remark=remark, asks=names, stand_ins={f"{section}.name": name for section, name in stand_ins.items()})


def key(name: str, remark: str = "") -> Convert:
    """The value is the same here, under this key."""
    return lambda option, given: to({name: option.written}, remark)


def always(remark: str) -> Convert:
    return lambda option, given: same(remark)


def never(remark: str) -> Convert:
    return lambda option, given: lost(remark)


def switch(settings: Mapping[str, Any], remark: str = "") -> Convert:
    """Settings for an option that is on; one that is off needs none."""
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
        """Whether it has a value, known or not."""
        option = self[name]
        return name in self._options and (bool(option.missing) or option.written.lower() not in NONE)

    def wrote(self, *names: str) -> bool:
        """Whether the command has one of them."""
        return any(self[name].line for name in names)

    def is_on(self, name: str) -> bool:
        return name in self._options and not self[name].is_off

    def number(self, name: str, otherwise: float = 0.0) -> float:
        """Of an option that is ``None`` or not there: ``otherwise``."""
        number = self[name].number
        return otherwise if number is None else number

    def many(self, name: str, otherwise: float = 1.0) -> float:
        """A number of things, of which there is at least one."""
        number = self.number(name, otherwise)
        if number <= 0:
            raise Unknown(self[name], f"{self[name].value} is not above 0")
        return number

    def instead(self, option: Option, value: tuple[str, ...]) -> Given:
        """The same with another value of an option, as if it had been written."""
        known = replace(option, values=value, missing=(), refused="")
        given = Given(self.method, {name: known if each == option else each for name, each in self._options.items()}.items())
        given.version, given.files = self.version, self.files
        return given


def count(value: float) -> int:
    """A count of 1 or more."""
    return max(1, round(value))


def shown(number: float) -> str:
    return f"{number:g}"


def rounded(number: float) -> str:
    """A remark on a count."""
    return "" if number >= 1 and number == round(number) else "; not a whole number, so it is rounded"


def split_items(text: str) -> list[str]:
    """At commas that are not in quotes."""
    return [item.strip() for item in re.findall(r"""(?:"[^"]*"|'[^']*'|[^,])+""", text)]
