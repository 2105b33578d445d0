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


@dataclass(frozen=True, slots=True)
class Option:
    """One option as it is written there."""

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

    @property
    def value(self) -> str:
        return " ".join(self.values)

    @property
    def text(self) -> str:
        shown = f"[{', '.join(self.values)}]" if self.sign == "=" and len(self.values) > 1 else self.value
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
        try:
            number = float(self.value)
        except ValueError:
            return None
        return number if math.isfinite(number) else None

    @property
    def items(self) -> list[str]:
        """The values, also where one has commas or brackets."""
        plain = (value[1:-1] if value[:1] + value[-1:] in ("[]", "()") else value for value in self.values)
        items = (item.strip().strip("'\"") for value in plain for item in split_items(value))
        return [item for item in items if item]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an option is here."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key of a configuration file, with dots → value; texts are read as a flag's."""
    remark: str = ""
    lost: bool = False
    """Nothing here does it; ``remark`` says why. An option with neither settings nor this needs none."""
    todo: str = ""
    """The key that the reader must set, because its value does not follow from the file."""


Convert: TypeAlias = Callable[[Option, "Given"], Outcome]
"""``ValueError``: the value is none that the other project takes."""
Table: TypeAlias = dict[str, Convert]
"""Newest name → what the option is here."""
Defaults: TypeAlias = dict[str, tuple[str, ...]]
"""Newest name → value, of options that matter here when nobody sets them."""


def to(settings: Mapping[str, Any], remark: str = "") -> Outcome:
    return Outcome(settings, remark)


def same(remark: str) -> Outcome:
    """It needs no setting here."""
    return Outcome(remark=remark)


def lost(remark: str) -> Outcome:
    return Outcome(remark=remark, lost=True)


def todo(name: str, remark: str) -> Outcome:
    """Only the reader knows the value of this key."""
    return Outcome(remark=remark, lost=True, todo=name)


def key(name: str, remark: str = "") -> Convert:
    """The value is the same here, under this key."""
    return lambda option, given: to({name: option.value}, remark)


def always(remark: str) -> Convert:
    return lambda option, given: same(remark)


def never(remark: str) -> Convert:
    return lambda option, given: lost(remark)


def switch(settings: Mapping[str, Any], remark: str = "") -> Convert:
    """Settings for an option that is on; one that is off needs none."""
    return lambda option, given: to(settings, remark) if not option.is_off else same("off, as it is here")


class Given:
    """The options of one command under their newest names, with the other project's defaults."""

    def __init__(self, method: str, options: Iterable[tuple[str, Option]]):
        self.method = method
        self._options = dict(options)
        self.files = {option.file for option in self._options.values()}

    def __getitem__(self, name: str) -> Option:
        return self._options.get(name, Option(name, ("none",)))

    def __contains__(self, name: str) -> bool:
        """Whether it has a value."""
        return name in self._options and self[name].value.lower() not in NONE

    def wrote(self, *names: str) -> bool:
        """Whether the command has one of them."""
        return any(self[name].line for name in names)

    def is_on(self, name: str) -> bool:
        return name in self._options and not self[name].is_off

    def number(self, name: str, otherwise: float = 0.0) -> float:
        number = self[name].number
        return otherwise if number is None else number


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


_SECRET = r"api_?key|access_?key|_key$|token$|secret|passw|passphrase|pass$|pwd$|credential|auth(?!or(?!iz))"
_KEY_OF_ROWS = (
    "answer|audio|best_metric|chosen|completion|context|data_source|enable_thinking|extra_info|group|ground_truth|image"
    "|images|index|input|label|mask|messages|metric|output|prompt|question|rejected|response|reward|reward_fn|reward_model"
    "|score|system|system_prompt|teacher|text|tools|turn|video|videos"
)
_HARMLESS = re.compile(
    rf"(?:{_KEY_OF_ROWS})_key|(?:\w+_)?(?:pad|eos|bos|unk|sep|cls|mask|image|video|stop|end|per|special|dp|valid)_token"
)
_INSIDE = re.compile(r"""(?<![\w.-])([\w.-]++)[\\"']*+\s*+[:=]\s*+(?:(?:bearer|basic|token)\s+)?""", re.I)
"""A name before its value, in JSON, a header or an address."""
_VALUE = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|[\[{\\"'].*|[^\s,;&}\])]*""", re.S)
_USER = re.compile(r"(?<=://)[^/\s\"'?#]*@")


def _is_secret(name: str) -> bool:
    name = name.strip("-").replace("-", "_").lower()
    last = name.rpartition(".")[2]
    return not _HARMLESS.fullmatch(last) and bool(re.search(_SECRET, last) or name.endswith("wandb.key"))


def without_secrets(text: str) -> str:
    """A text without the keys, tokens and passwords in it."""
    text, at = _USER.sub("", text), 0
    while match := _INSIDE.search(text, at):
        at = match.end()
        if _is_secret(match[1]) and (value := _VALUE.match(text, at)) and value[0]:
            hidden = '"..."' if value[0].startswith('"') else "..."
            text, at = text[:at] + hidden + text[value.end() :], at + len(hidden)
    return text


def without_secret(option: Option) -> Option:
    """Keys, tokens and passwords are not written into files."""
    if re.match(r"[A-Za-z_]\w*=", option.name):  # a variable of the environment
        name, _, value = option.name.partition("=")
        return replace(option, name=f"{name}={'...' if _is_secret(name) else without_secrets(value)}")
    named = _is_secret(option.name) or option.name.lstrip("-") == "use_wandb"
    if named and option.value.lower() not in (*ON, *OFF, *NONE):
        return replace(option, values=("...",))
    values, whole = tuple(map(without_secrets, option.values)), without_secrets(option.value)
    values = values if " ".join(values) == whole else (whole,)
    return replace(option, name=without_secrets(option.name), values=values, without_credentials=values != option.values)
