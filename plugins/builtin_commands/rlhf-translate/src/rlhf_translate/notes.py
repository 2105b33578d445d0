"""Notes on each option of a command, and on the defaults it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlhf_translate.elsewhere import key_of
from rlhf_translate.options import PROCESSES, PROGRAM, Given, Option, Outcome, Unknown, ask, lost, nowhere
from rlhf_translate.page import UNKNOWN, by_page
from rlhf_translate.programs import PROJECTS, Command
from rlhf_translate.projects import Reading
from rlhf_translate.reasons import by_reason

_STAND_INS = ("1", "2", "0.5", "0", "true", "all")
"""Values that show which settings an option would set."""
_DEEPEST = 4
"""Maximum number of options without value that one option needs."""


@dataclass
class Note:
    """Note on one option."""

    name: str
    """Newest name of the option."""
    option: Option
    outcome: Outcome
    unfit: list[str] = field(default_factory=list)
    """Invalid settings of it, with the reason."""

    @property
    def asks(self) -> bool:
        return self.outcome.asks is not None

    @property
    def lost(self) -> bool:
        return not self.asks and (self.outcome.lost or bool(self.unfit))

    @property
    def needs_none(self) -> bool:
        return not self.asks and not self.lost and not self.outcome.settings


def notes_of(command: Command, reading: Reading, refused: Mapping[Option, str]) -> Iterator[Note]:
    """Yields notes on every option, then on defaults.

    Args:
        refused: options whose value is invalid here, and why.
    """

    def usable(option: Option) -> Option:
        return replace(option, refused=refused[option]) if option in refused else option

    options = [(name, usable(option)) for name, option in reading.options]
    defaults = [(name, usable(option)) for name, option in reading.defaults]
    given = Given(command.method, [*defaults, *options], reading.version.key)
    last = dict(options)
    for name, option in [*options, *(item for item in defaults if item[0] not in last)]:
        if last.get(name, option) is not option:
            yield Note(name, option, lost(f"set again ({last[name].place}), which counts"))
        elif name in reading.table:
            yield Note(name, option, _outcome(reading, name, option, given))
        elif name not in (PROGRAM, PROCESSES):
            yield Note(name, option, _by_page(command, name, option, option in reading.launch))


def _by_page(command: Command, name: str, option: Option, of_launcher: bool) -> Outcome:
    try:
        outcome = by_page(PROJECTS[command.project], option, name)
    except Unknown as unknown:
        keys = by_page(PROJECTS[command.project], replace(option, missing=(), refused="", values=("1",)), name).settings
        return ask(unknown.why, *keys) if keys else lost(unknown.why)
    if outcome.lost and outcome.remark == UNKNOWN:
        written = key_of(option.name) if command.project != "verl" else option.name
        outcome = by_reason(command, option, (written, name), of_launcher)
    return _asking(outcome, option)


def _outcome(reading: Reading, name: str, option: Option, given: Given) -> Outcome:
    try:
        return _asking(reading.table[name](option, given), option)
    except ValueError:
        return lost("the value cannot be read")
    except Unknown as unknown:
        return _without_value(reading, name, option, given, unknown)


def _asking(outcome: Outcome, option: Option) -> Outcome:
    """Returns the outcome; asks the reader for its keys if the text has parts without value."""
    if not option.missing or not outcome.settings or outcome.asks is not None:
        return outcome
    return replace(outcome, asks=tuple(outcome.settings), remark=nowhere(option.missing))


def _without_value(reading: Reading, name: str, option: Option, given: Given, unknown: Unknown, depth: int = 0) -> Outcome:
    """Returns what the option would set if another option, or the option itself, had a value."""
    missing = unknown.option
    own = missing == option
    remark = unknown.why if own else f"follows from {missing.text} ({missing.place}): {unknown.why}"
    tried: dict[tuple[str, ...], Outcome] = {}
    for value in [*_usual(reading, missing), *((stand_in,) for stand_in in _STAND_INS)]:
        other = given.instead(missing, value)
        try:
            tried[value] = reading.table[name](other[name] if own else option, other)
        except ValueError:
            continue
        except Unknown as further:
            if further.option.name != missing.name and depth < _DEEPEST:
                tried[value] = _without_value(reading, name, option, other, further, depth + 1)
    setting = {value: outcome for value, outcome in tried.items() if outcome.settings or outcome.asks}
    if not setting:
        why = next((outcome.remark for outcome in tried.values() if outcome.lost), "")
        return lost(f"{remark}; {why}" if why else remark)
    first = next(iter(setting.values()))
    if not own and len(setting) == len(tried) > 2 and all(outcome == first for outcome in setting.values()):
        return first
    keys = dict.fromkeys(key for outcome in setting.values() for key in (*outcome.settings, *(outcome.asks or ())))
    same = {key for key in keys if len({repr(outcome.settings.get(key, "")) for outcome in setting.values()}) == 1}
    kept = {key: value for key, value in first.settings.items() if key in same} if len(same) < len(keys) else {}
    if not own and (value := next(iter(setting))) not in [(stand_in,) for stand_in in _STAND_INS]:
        values = ", ".join(f"{key} {each}" for key, each in setting[value].settings.items() if key not in kept)
        remark += f"; with {' '.join(value)} there {values} here" if values else ""
    stand_ins = {key: value for key, value in {**first.stand_ins, **first.settings}.items() if key not in kept}
    return Outcome(kept, remark, asks=tuple(key for key in keys if key not in kept), stand_ins=stand_ins)


def _usual(reading: Reading, option: Option) -> list[tuple[str, ...]]:
    """Returns the other project's default of an option, if it has one."""
    names = [name for name, each in reading.options if each.name == option.name]
    return [
        each.values for name, each in reading.defaults if name in names and each.values and each.values[0].lower() != "none"
    ]
