"""Training commands of other projects, found in shell scripts, Python scripts and configuration files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlhf_host import UserError
from rlhf_host.commands import visible
from rlhf_translate.credentials import without_secrets
from rlhf_translate.elsewhere import key_of
from rlhf_translate.files import configuration, leaves_in, leaves_of
from rlhf_translate.launch import beside, says, start_of
from rlhf_translate.options import Option, split_items
from rlhf_translate.programs import (
    BY_ROLE,
    METHODS,
    OTHERS,
    PROJECTS,
    Command,
    Origin,
    first_program_of,
    mentions,
    origin_of,
    program_of,
    unsupported,
)
from rlhf_translate.python_files import docstring, python_command
from rlhf_translate.shell.script import SHOWS, Call, Script, read_script
from rlhf_translate.shell.word import Word
from rlhf_translate.tasks import answer
from rlhf_translate.versions import options_of

__all__ = ["METHODS", "PROJECTS", "Command", "find_commands"]

_LONGEST = 10_000_000
"""Maximum characters of a script."""
_SILENT = (
    *(
        "set",
        "[",
        "[[",
        "test",
        "read",
        "cd",
        "echo",
        "printf",
        "shift",
        "exit",
        "return",
        ":",
        "true",
        "unset",
        "local",
        "let",
    ),
    *(
        "export",
        "declare",
        "readonly",
        "typeset",
        "mkdir",
        "sleep",
        "break",
        "continue",
        "trap",
        "ulimit",
        "wait",
        "source",
        ".",
    ),
)
_WHOLE = re.compile(r"\$\{(\w+)(?:\[[@*]\])?(\.\.\.)?\}")
"""Pattern of a variable without value; with ``...``, of one whose value is only partly known."""
_ARGUMENTS = re.compile(r"(?:^|_)(?:args?|opts?|options|arguments|extras?|flags?|params?|overrides?|cmd)$", re.I)
"""Ends of names of variables that contain options."""
_ADDED = re.compile(r"\+([\w.]+)=")
_IS_OPTION = re.compile(r"--?[A-Za-z]|[+~]*\w+(?:\.\w+)+=")
"""Beginning of a line that should continue a command."""
_NAMES = re.compile(r"[\w./-]+")
_ASSIGNS = re.compile(r"\w+(\[\w+\])?\+?=")
_CONFIG_NAMES = {"ppo_trainer": "", "ppo_megatron_trainer": "", "sft_trainer": "", "sft_trainer_engine": ""}
"""Hydra's files in verl itself."""


def find_commands(
    path: Path,
    origin: str | None = None,
    given: Mapping[str, str] | None = None,
    processes: int | None = None,
    text: str | None = None,
) -> tuple[list[Command], list[str]]:
    """Returns the training commands of a file, and lines about other commands in it.

    Args:
        origin: ``PROJECT[:METHOD][==VERSION]``, if the file does not tell.
        given: values of variables that a script does not set.
        processes: number of processes of a command that does not tell it.
        text: of a script that is in no file.

    Raises:
        UserError: the file cannot be read, or has no training command.
    """
    whose = origin_of(origin)
    if text is not None:
        commands, others = _in_script(path, text, whose, given or {})
    elif path.is_dir():
        raise UserError(f"{path}: is a directory: give a shell script, a Python script of TRL, or a YAML file of verl or TRL")
    elif path.suffix in (".yaml", ".yml"):
        if given:
            raise UserError(f"--set: {path} is no script, and has no variables")
        command, others = configuration(path, whose), list[str]()
        if command.project == "trl":  # whose command line starts accelerate
            start = start_of([], path, command.options, True)
            command.options, command.processes = [*start.in_files, *command.options], start.processes
        commands = [command]
    else:
        commands, others = _in_script(path, _text(path), whose, given or {})
    if processes is not None:
        others += _told_processes(commands, processes, path)
    return commands, others


def _told_processes(commands: Sequence[Command], number: int, path: Path) -> list[str]:
    """Tells commands how many processes there are, and returns lines about those that know it.

    Raises:
        UserError: all of them do.
    """
    own = []
    for command in commands:
        told, place = says(number), command.processes.file or str(path)
        if (command.project, command.method) in BY_ROLE:
            own.append(f"{path}:{command.line}: says on how many devices each role is")
        elif command.processes.line and not command.processes.missing:
            own.append(f"{place}:{command.processes.line}: says how many processes there are")
        else:
            command.processes = told
    if len(own) == len(commands):
        raise UserError("\n".join(f"--processes {number}: {line}" for line in own))
    return [f"{line}: --processes has no effect" for line in own]


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_LONGEST + 1)
        if len(text) > _LONGEST:
            raise UserError(f"{path}: has more than {_LONGEST:,} characters, and is no script")
        return text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8 text'}") from error


def _in_script(path: Path, text: str, origin: Origin, given: Mapping[str, str]) -> tuple[list[Command], list[str]]:
    if path.suffix == ".py":
        made = python_command(path, text, origin)
        if made is not None:
            if given:
                raise UserError(f"--set: {path} is no shell script: put values in the place of its variables")
            return [made], []
        about = docstring(text)
        if about is None or not mentions(about[0]):
            raise UserError(f"{path}: makes no configuration of TRL, and says no command that runs it: translate that command")
        text = "\n" * (about[1] - 1) + "\n".join(line for line in about[0].splitlines() if not line.startswith("```"))
    script = read_script(text, str(path), given, mentions, lambda name: _beside(name, path))
    if unused := [name for name in given if name not in script.given]:
        raise UserError(f"--set {unused[0]}: no variable of {path} that is used has this name and no value there")
    commands: list[Command] = []
    others: list[str] = []
    refused: list[str] = []
    for call in script.calls:
        command = _command(call, path, origin)
        if isinstance(command, Command):
            commands.append(command)
        elif command is not None:
            refused.append(f"{path}:{call.line}: {command}")
        elif commands and _IS_OPTION.match(call.words[0].text):
            commands[-1].notes.append(
                f"line {call.line}: {without_secrets(call.words[0].text)} and what follows belong to no command, because the line "
                f"before does not go on (a comment ends it, and so does a blank after its backslash): they are not translated"
            )
        elif call.words[0].text not in _SILENT and not all(_ASSIGNS.match(word.text) for word in call.words):
            others.append(f"{path}:{call.line}: not a training command, left out: {_short(call.words)}")
    if not commands:
        unread = "".join(f"; {text}" for text in _notes(script) if "is not read" in text)
        raise UserError("\n".join(refused) or _nothing_found(path, script, text, others, origin) + unread)
    for command in commands:
        command.notes += _notes(script)
    others += [
        f"{path}:{call.line}: does not run, because of a condition: {_short(call.words)}"
        for call in script.left_out
        if isinstance(_command(call, path, origin), Command)
    ]
    return commands, [*refused, *(dict.fromkeys(others))]


def _beside(name: str, path: Path) -> str | None:
    """Returns the text of a script that another one reads, if it is here and not someone's start-up file."""
    file = beside(name, path)
    if file is None or file.name.startswith(".") or file.resolve() == path.resolve():
        return None
    return _text(file)


def _notes(script: Script) -> Iterator[str]:
    for word in script.read:
        yield f"line {word.line}: {without_secrets(word.text)} is read in its place; lines of what it has are its own"
    for word in script.unread:
        yield f"line {word.line}: {without_secrets(word.text)} is not read: variables that it sets have no value here"
    if script.directives:
        first = script.directives[0]
        yield f"line {first.line}: #SBATCH lines are for Slurm: keep them in the script that calls rlhf train"


def _short(words: Sequence[Word]) -> str:
    """Returns the program and its script; other arguments may be secret."""
    words = [word for word in words if not _ASSIGNS.match(word.text)] or words
    script = next((f" {word.text}" for word in words[1:] if word.text.endswith(".py")), "")
    return visible(without_secrets(f"{words[0].text.partition('=')[0]}{script}"))[:60]


def _nothing_found(path: Path, script: Script, text: str, others: Sequence[str], origin: Origin) -> str:
    if (
        call := next((call for call in script.left_out if isinstance(_command(call, path, origin), Command)), None)
    ) is not None:
        return (
            f"{path}:{call.line}: does not run, because of a condition: {_short(call.words)}; --set NAME=VALUE gives a variable"
        )
    for number, line in enumerate(text.splitlines(), 1):
        if not line.lstrip().startswith("#") and (name := next(filter(program_of, _NAMES.findall(line)), None)):
            where = "in a substitution, a quote or a part that nothing calls"
            return f"{path}:{number}: {name} is {where}: write its command on a line of its own"
    wanted = "openrlhf.cli.train_ppo_ray, trl grpo or verl.trainer.main_ppo"
    seen = f"; it has {', '.join(other.rpartition(': ')[2] for other in others[:3])}" if others else ""
    hint = "" if origin.project else "; --from PROJECT takes a command whose program has another name"
    return f"{path}: no training command of OpenRLHF, TRL or verl, such as {wanted}{seen}{hint}"


# --- shell commands -----------------------------------------------------------------------------


def _command(call: Call, path: Path, origin: Origin) -> Command | str | None:
    """Returns the command, or why it is none although it is a program of a project."""
    words = call.words
    if words[0].text in (*SHOWS, "[", "[[", "test"):
        return None
    if told := answer(words):
        return told
    for place, word in enumerate(words):
        after = [each.text.partition("=")[0] for each in words[place + 1 :]]
        if found := program_of(word.text) or first_program_of(word.text, after):
            project, method = found
            return _of(project, origin.method or method, place + 1, call, path, origin)
        if word.text.rpartition("/")[2] == "trl" and words[place + 1 :] and re.fullmatch(r"[a-z][\w-]*", words[place + 1].text):
            return _of("trl", words[place + 1].text, place + 2, call, path, origin)
    for place, word in enumerate(words):
        if origin.project and word.text.endswith(".py"):
            return _of(origin.project, origin.method or METHODS[origin.project][0], place + 1, call, path, origin)
        stem = Path(word.text).stem if word.text.endswith(".py") else ""
        name = word.text.rpartition("/")[2]
        starts = place == 0 or not words[place - 1].text.startswith("-") or words[place - 1].text == "-m"
        if name in OTHERS and starts and place + 1 < len(words):
            file = next((each.text for each in words if each.text.endswith((".yaml", ".yml"))), None)
            more = f"; rlhf translate {without_secrets(file)} says what to begin with" if file else ""
            return f"{name} is a program of {OTHERS[name]}, which is not translated{more}"
        if stem in METHODS["trl"] and _is_trls(stem, words[place + 1 :]):
            return _of("trl", stem, place + 1, call, path, origin)
    return None


def _is_trls(method: str, words: Sequence[Word]) -> bool:
    """Returns True if a script with the name of one of TRL's has such options."""
    names = {key_of(word.text.partition("=")[0]) for word in words if word.text.startswith("--")}
    known = {*options_of("trl", method), "config"}
    return "config" in names or len(names & known) >= 3


def _of(project: str, method: str, begin: int, call: Call, path: Path, origin: Origin) -> Command | str:
    before, words = call.words[:begin], [word for word in call.words[begin:] if word.text != "..."]
    hidden = list(_hidden(words, project))
    words = [word for word in words if word not in hidden]
    program = before[-1].text
    if origin.project not in ("", project):
        return f"is a command of {PROJECTS[project]}, and --from says {PROJECTS[origin.project]}"
    if method not in METHODS[project]:
        return unsupported(f"trl {method}" if before[-1].text == method else program, project, method)
    options = list(_overrides(words) if project == "verl" else _flags(words))
    if project == "trl":
        options = list(_with_file(options, path))
    elif project == "verl":
        options = list(_with_hydras_file(options, path))
    by_trl = program == method
    start = start_of(before[:-2] if by_trl else before[:-1], path, options, by_trl)
    name = f"trl {method}" if by_trl else program
    options = [*start.in_files, *options]
    command = Command(project, method, options, before[0].line, name, start.options, start.processes, origin.version)
    command.added = frozenset(match[1] for word in words if project == "verl" and (match := _ADDED.match(word.text)))
    if shortened := next((word for word in call.words if word.text == "..."), None):
        command.notes.append(f"... (line {shortened.line}): stands for options that are not shown: add them")
    for word in hidden:
        shown = " and ".join(word.missing)
        command.notes.append(f"{shown} (line {word.line}): stands for options that are not known: add them")
    if call.passes_on:
        command.notes.append(f"$@ (line {call.passes_on}): arguments of the script itself are not known: add them")
    return command


def _hidden(words: Sequence[Word], project: str) -> Iterator[Word]:
    """Yields variables without value that represent options, by their place or their name."""
    before = ""
    for word in words:
        if word.missing and (match := _WHOLE.fullmatch(word.text)):
            alone = not before.startswith("-") if project == "verl" else not before
            if match[2] or alone or _ARGUMENTS.search(match[1]):
                yield word
                continue
        before = word.text


def _flags(words: Sequence[Word]) -> Iterator[Option]:
    """Yields ``--name``, ``--name value ...``, ``--name=value``; words before the first become options too, so that they are
    not lost.
    """
    name: Word | None = None
    values: list[Word] = []
    for word in [*words, Word("--", 0)]:
        if word.text.startswith("--"):
            if name is not None:
                missing = tuple(part for value in values for part in value.missing)
                yield Option(name.text, tuple(value.text for value in values), name.line, missing=missing)
            text, equals, value = word.text.partition("=")
            name, values = Word(text, word.line), [Word(value, word.line, word.missing)] if equals else []
        elif name is not None:
            values.append(word)
        else:
            yield Option(word.text, (), word.line, missing=word.missing)


def _overrides(words: Sequence[Word]) -> Iterator[Option]:
    """Yields Hydra's ``key=value``, ``+key=value``, ``~key``, and its own flags."""
    flag: Word | None = None
    for word in words:
        name, equals, value = word.text.partition("=")
        name = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}.get(name, name)
        if flag is not None and not equals and not name.startswith("-"):
            yield Option(flag.text, (name,), flag.line, "=", missing=word.missing)
            flag = None
            continue
        if flag is not None:
            yield Option(flag.text, (), flag.line, "=")
        flag = word if name.startswith("-") and not equals else None
        if flag is None and (name.startswith("-") or not equals):
            yield Option(name, (value,) if equals else (), word.line, "=", missing=word.missing)
        elif flag is None:
            yield from _override(name.lstrip("+"), value, word)
    if flag is not None:
        yield Option(flag.text, (), flag.line, "=")


def _override(name: str, value: str, word: Word) -> Iterator[Option]:
    """Yields the override of one key, or of each key in a mapping."""
    inner = leaves_in(value) if value.startswith("{") and without_secrets(value) == value else []
    for key, values in inner:
        yield Option(f"{name}.{key}", values, word.line, "=", missing=word.missing)
    if inner:
        return
    yield Option(name, tuple(_hydra(value)), word.line, "=", missing=word.missing)


def _hydra(value: str) -> list[str]:
    if value.startswith("[") and value.endswith("]"):
        return [item if "," in item else item.strip("'\"") for item in split_items(value[1:-1]) if item]
    return [value.strip("'\"")]


def _with_file(options: Sequence[Option], path: Path) -> Iterator[Option]:
    """Yields the options of TRL's ``--config FILE`` before the others, which override them."""
    for option in options:
        if option.name == "--config" and option.values and not option.missing and (file := beside(option.values[0], path)):
            yield from (replace(each, name=f"--{each.name}", sign=" ", file=option.values[0]) for each in leaves_of(file))
    yield from options


def _with_hydras_file(options: Sequence[Option], path: Path) -> Iterator[Option]:
    """Yields the options of ``--config-path FOLDER --config-name NAME`` before the others, if the file is here."""
    given = {option.name.replace("_", "-"): option for option in options if option.name.startswith("--config")}
    name = given.get("--config-name")
    if name is not None and name.values and not name.missing and name.values[0].removesuffix(".yaml") not in _CONFIG_NAMES:
        folder = " ".join(given["--config-path"].values) if "--config-path" in given else "."
        if file := beside(f"{folder}/{name.values[0].removesuffix('.yaml')}.yaml", path):
            yield from (replace(each, file=str(file)) for each in leaves_of(file))
    yield from options
