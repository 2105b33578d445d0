"""Training commands of other projects, found in shell scripts and configuration files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf_host.config.yaml_file import Located, plain, read_yaml
from rlhf_host.errors import UserError
from rlhf_host.plugins.elsewhere import names
from rlhf_host.translate.options import Option, split_items, without_secrets
from rlhf_host.translate.words import Word, read_script

PROJECTS = {"openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl"}

METHODS = {
    "openrlhf": ("ppo_ray", "dpo", "sft", "rm", "kto"),
    "trl": ("grpo", "rloo", "dpo", "sft", "kto", "reward"),
    "verl": ("ppo",),
}
"""Project → what its programs train, as they call it. The first is that of a file that does not say."""

_BEGINNINGS = {"openrlhf": "train_", "trl": "trl ", "verl": "main_"}

_PROGRAMS = {
    "openrlhf": re.compile(r"(?:.*[./])?openrlhf[./]cli[./]train_(\w+?)(?:\.py)?"),
    "trl": re.compile(r"(?:.*/)?(?:trl[./]scripts|examples/scripts)[./](\w+?)(?:\.py)?"),
    "verl": re.compile(r"(?:.*[./])?(?:verl[./]trainer|recipe[./]\w+)[./]main_(?:(ppo)|dapo)(?:\.py)?"),
}
_SILENT = {
    "set",
    "[",
    "[[",
    "]]",
    "read",
    "fi",
    "done",
    "case",
    "esac",
    "in",
    "cd",
    "echo",
    "shift",
    "exit",
    "for",
    "function",
    ":",
    "unset",
}
_STRUCTURE = {"-m", "--module", "--", "-u"}


@dataclass
class Command:
    """One command that trains."""

    project: str
    method: str
    options: list[Option]
    line: int
    program: str = ""
    """As the file has it; of a configuration, the file."""
    launch: list[Option] = field(default_factory=list)
    """Of what starts the program: torchrun, accelerate, a job of Ray; and variables before it."""
    unset: dict[str, int] = field(default_factory=dict)
    """What has no value in the file, ``${NAME}``, ``$(COMMAND)`` or ``$@`` → a line."""

    @property
    def about(self) -> str:
        return f"{PROJECTS[self.project]} ({self.method})"


def find_commands(path: Path, origin: str | None = None) -> tuple[list[Command], list[str]]:
    """The training commands of a file, and lines about other commands in it.

    Args:
        origin: ``PROJECT`` or ``PROJECT:METHOD``, where the file does not say.

    Raises:
        UserError: the file cannot be read, or has no training command.
    """
    project, _, method = (origin or "").partition(":")
    if project and (project not in METHODS or (method and method not in METHODS[project])):
        known = ", ".join(f"{name}[:{'|'.join(methods)}]" for name, methods in METHODS.items())
        raise UserError(f"--from {origin}: should be one of {known}")
    if path.is_dir():
        raise UserError(f"{path}: is a directory: give a shell script, or a YAML file of verl or TRL")
    if path.suffix in (".yaml", ".yml"):
        return [_configuration(path, project, method)], []
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error
    script = read_script(text, str(path))
    commands, others, unsupported = [], [], []
    for number, words in enumerate(script.commands):
        command = _command(words, path, project, method)
        if isinstance(command, Command):
            uses = [(text, word.line) for text in script.unset for word in reversed(words) if text in word.text]
            command.unset = {without_secrets(text): line for text, line in uses}  # the first use
            command.unset |= {"$@": script.arguments[number]} if number in script.arguments else {}
            commands.append(command)
        elif command is not None:
            unsupported.append(f"{path}:{words[0].line}: {command}")
        elif words[0].text not in _SILENT and not re.match(r"\w+\+?=", words[0].text) and words[0].text != "export":
            others.append(f"{path}:{words[0].line}: not a training command, left out: {_short(words)}")
    if not commands:
        raise UserError("\n".join(unsupported) or _nothing_found(path, others, project))
    for name, lines in script.branched.items():
        places = ", ".join(map(str, lines))
        others.append(f"{path}:{lines[-1]}: {name} is set on lines {places}, under conditions: the last is taken; check it")
    return commands, [*unsupported, *others]


def _short(words: Sequence[Word]) -> str:
    """The program and its script; other arguments may be secret."""
    script = next((f" {word.text}" for word in words[1:] if word.text.endswith(".py")), "")
    return without_secrets(f"{words[0].text.partition('=')[0]}{script}")[:60]


def _nothing_found(path: Path, others: Sequence[str], project: str) -> str:
    wanted = "openrlhf.cli.train_ppo_ray, trl grpo or verl.trainer.main_ppo"
    seen = f"; it has {', '.join(other.rpartition(': ')[2] for other in others[:3])}" if others else ""
    hint = "" if project else "; --from PROJECT takes a command whose program has another name"
    return f"{path}: no training command of OpenRLHF, TRL or verl, such as {wanted}{seen}{hint}"


# --- shell commands -----------------------------------------------------------------------------


def _command(words: Sequence[Word], path: Path, project: str, method: str) -> Command | str | None:
    """The command, or why it is none although it is a program of a project."""
    for place, word in enumerate(words):
        for name, pattern in _PROGRAMS.items():
            if match := pattern.fullmatch(word.text):
                return _of(name, method or match[1] or "ppo", words[: place + 1], words[place + 1 :], path)
        if word.text.rpartition("/")[2] == "trl" and words[place + 1 :] and words[place + 1].text in METHODS["trl"]:
            return _of("trl", words[place + 1].text, words[: place + 1], words[place + 2 :], path)
    for place in (place for place, word in enumerate(words) if project and word.text.endswith(".py")):
        return _of(project, method or METHODS[project][0], words[: place + 1], words[place + 1 :], path)
    return None


def _of(project: str, method: str, before: Sequence[Word], words: Sequence[Word], path: Path) -> Command | str:
    if method not in METHODS[project]:
        names = ", ".join(_BEGINNINGS[project] + name for name in METHODS[project])
        return f"{before[-1].text} is not supported; supported are {names}"
    options = list(_overrides(words) if project == "verl" else _flags(words))
    if project == "trl":
        options = list(_with_file(options, path))
    program = f"trl {method}" if before[-1].text.endswith("trl") else before[-1].text
    return Command(project, method, options, before[0].line, program, list(_launch(before[:-1])))


def _flags(words: Sequence[Word]) -> Iterator[Option]:
    """``--name``, ``--name value ...``, ``--name=value``; what stands before the first is an option too, lest it be lost."""
    name, line = "", 0
    values: list[str] = []
    for word in [*words, Word("--", 0)]:
        if word.text.startswith("--"):
            if name:
                yield Option(name, tuple(values), line)
            name, equals, value = word.text.partition("=")
            values, line = [value] if equals else [], word.line
        elif name:
            values.append(word.text)
        else:
            yield Option(word.text, (), word.line)


def _overrides(words: Sequence[Word]) -> Iterator[Option]:
    """Hydra's ``key=value``, ``+key=value``, ``~key``."""
    for word in words:
        name, equals, value = word.text.partition("=")
        if name.startswith("-") or not equals:
            yield Option(name, (value,) if equals else (), word.line, "=")
        else:
            yield Option(name.lstrip("+"), tuple(_hydra(value)), word.line, "=")


def _hydra(value: str) -> list[str]:
    if value.startswith("[") and value.endswith("]"):
        return [item if "," in item else item.strip("'\"") for item in split_items(value[1:-1]) if item]
    return [value.strip("'\"")]


def _launch(words: Sequence[Word]) -> Iterator[Option]:
    """Options of what starts the program; the names of programs are none."""
    name: Word | None = None
    for word in words:
        if re.match(r"[A-Za-z_]\w*=", word.text):
            yield Option(word.text, (), word.line)
        elif word.text in _STRUCTURE or not word.text.startswith("-"):
            if name is not None:
                values = () if word.text in _STRUCTURE else (word.text,)
                yield Option(name.text, values, name.line)
                name = None
        else:
            if name is not None:
                yield Option(name.text, (), name.line)
            text, equals, value = word.text.partition("=")
            name = None if equals else word
            if equals:
                yield Option(text, (value,), word.line)
    if name is not None:
        yield Option(name.text, (), name.line)


# --- configuration files ------------------------------------------------------------------------


def _with_file(options: Sequence[Option], path: Path) -> Iterator[Option]:
    """The options of TRL's ``--config FILE`` before the others, which override them."""
    for option in options:
        file = Path(option.value).expanduser()
        known = next((place for place in (file, path.parent / file) if place.is_file()), None)
        if option.name == "--config" and known is not None:
            yield from (replace(each, name=f"--{each.name}", sign=" ", file=option.value) for each in _leaves(read_yaml(known)))
    yield from options


def _configuration(path: Path, project: str, method: str) -> Command:
    leaves = list(_leaves(read_yaml(path)))
    if not leaves:
        raise UserError(f"{path}: has no settings")
    project = project or _project(path, leaves)
    if project != "verl":
        leaves = [Option(f"--{option.name}", option.values, option.line) for option in leaves]
    return Command(project, method or _method(path, project, leaves), leaves, 1, path.name)


def _project(path: Path, leaves: Sequence[Option]) -> str:
    """Whose names the file has."""
    known = {(name.project, name.words[0]) for name in names()}
    titles = {project: title for project, title in PROJECTS.items() if project != "openrlhf"}  # which reads no files
    hits = {project: sum((title, leaf.name) in known for leaf in leaves) for project, title in titles.items()}
    best = max(hits, key=lambda project: hits[project])
    if not hits[best]:
        raise UserError(f"{path}: has no names of verl or TRL that are known here; --from PROJECT says whose it is")
    return best


def _method(path: Path, project: str, leaves: Sequence[Option]) -> str:
    if project != "trl":
        return METHODS[project][0]
    given = {leaf.name.lstrip("-") for leaf in leaves}
    if given & {"reward_funcs", "num_generations", "max_completion_length", "epsilon", "reward_weights"}:
        return "grpo"
    raise UserError(f"{path}: TRL's file does not say what reads it; say it with --from trl:{'|'.join(METHODS['trl'])}")


def _leaves(tree: Located, path: tuple[str, ...] = ()) -> Iterator[Option]:
    """Every value with its line, under its dotted name; a mapping in a list is JSON."""
    if isinstance(tree.value, Mapping) and tree.value:
        for name, inner in tree.value.items():
            yield from _leaves(inner, (*path, str(name)))
    elif path:
        value = plain(tree)
        values = tuple(map(_item, value)) if isinstance(value, list) else (_text(value),)
        yield Option(".".join(path), values, _line(tree), "=")


def _line(tree: Located) -> int:
    match = re.search(r":(\d+)(?:: |$)", tree.where)
    return int(match[1]) if match else 1


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


def _item(value: Any) -> str:
    """Of a list: a text with commas in quotes."""
    return json.dumps(value, ensure_ascii=False) if "," in str(value) else _text(value)
