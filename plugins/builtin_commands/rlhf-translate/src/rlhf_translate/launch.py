"""Launchers of a program: ``torchrun``, ``accelerate launch``, ``deepspeed``, ``srun``, and the number of processes they start."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rlhf_host import UserError
from rlhf_translate.elsewhere import key_of
from rlhf_translate.files import leaves_of
from rlhf_translate.options import PROCESSES, Option
from rlhf_translate.shell.word import Word

_STRUCTURE = {"-m", "--module", "--", "-u"}
_SWITCHES = {"multi_gpu", "use_deepspeed", "use_fsdp", "cpu", "tpu", "debug", "standalone", "no_python", "exclusive", "no_wait"}
"""Options of launchers without a value."""
_PROGRAM = re.compile(r"(?:.*/)?(?:python[\d.]*|torchrun|accelerate|deepspeed|trl|uv|ray|srun|bash|sh|nsys)")
"""Words that are programs, and no values of the option before them."""

TRLS_OWN = {
    "single_gpu": {"num_processes": "1"},
    "multi_gpu": {"num_processes": "8"},
    **{f"zero{stage}": {"num_processes": "8", "deepspeed_config.zero_stage": str(stage)} for stage in (1, 2, 3)},
    **{
        f"fsdp{kind}": {"num_processes": "8", "distributed_type": "FSDP", "fsdp_config.fsdp_version": str(kind)}
        for kind in (1, 2)
    },
}
"""Configurations of accelerate that TRL has, by name; the same in 0.17 and 1.16."""


@dataclass
class Start:
    """Start of a program."""

    options: list[Option] = field(default_factory=list)
    in_files: list[Option] = field(default_factory=list)
    """Options in accelerate's files, which the others override."""
    processes: Option = field(default_factory=lambda: Option(PROCESSES, ("1",)))
    """Number of processes, or why it is not known."""


def start_of(words: Sequence[Word], path: Path, own: Sequence[Option] = (), trl: bool = False) -> Start:
    """Returns how the program is started.

    Args:
        words: words before the program.
        own: the program's options: ``trl`` takes those of ``accelerate launch`` among them.
        trl: True if ``trl`` starts it.
    """
    written = [*_options(words), *(own if trl else ())]
    named = [*written, *(option for option in own if not trl and key_of(option.name) in ("deepspeed", "fsdp_config"))]
    in_files = [option for each in named for option in _of_file(each, path)]
    names = [word.text.rpartition("/")[2] for word in words]
    given = {key_of(option.name): option for option in [*in_files, *written]}
    line = next((word.line for word in words), 1)
    if "accelerate" in names or trl:
        processes = _of_accelerate("trl" if trl else "accelerate launch", given, line)
    elif "torchrun" in names or any(name.startswith("torch.distributed") for name in names):
        processes = _product([given.get("nnodes"), given.get("nproc_per_node")])
    elif "deepspeed" in names:
        processes = _of_deepspeed(given, line)
    elif any(name in ("srun", "mpirun", "mpiexec") for name in names):
        launcher = next(name for name in names if name in ("srun", "mpirun", "mpiexec"))
        processes = _of_slurm(launcher, given, line)
    else:
        processes = Option(PROCESSES, ("1",))
    return Start(list(_options(words)), in_files, processes)


def _options(words: Sequence[Word]) -> Iterator[Option]:
    """Yields the options; names of programs are not options."""
    name: Word | None = None
    for word in words:
        if re.match(r"[A-Za-z_]\w*=", word.text):
            yield Option(word.text, (), word.line, missing=word.missing)
        elif word.text in _STRUCTURE or not word.text.startswith("-"):
            if name is not None:
                switch = word.text in _STRUCTURE or key_of(name.text) in _SWITCHES or bool(_PROGRAM.fullmatch(word.text))
                yield Option(name.text, () if switch else (word.text,), name.line, missing=() if switch else word.missing)
                name = None
        else:
            if name is not None:
                yield Option(name.text, (), name.line)
            text, equals, value = word.text.partition("=")
            name = None if equals else word
            if equals:
                yield Option(text, (value,), word.line, missing=word.missing)
    if name is not None:
        yield Option(name.text, (), name.line)


def _of_file(option: Option, path: Path) -> Iterator[Option]:
    """Yields the options of accelerate's file that an option names, if the file is here."""
    key = key_of(option.name)
    files = ("config_file", "accelerate_config", "deepspeed", "deepspeed_config_file", "fsdp_config")
    if key in files and option.values and not option.missing:
        name, inside = option.values[0], "fsdp_config." if key == "fsdp_config" else ""
        if name in TRLS_OWN and key == "accelerate_config":
            for setting, value in TRLS_OWN[name].items():
                yield Option(f"--{setting}", (value,), option.line, file=f"TRL's {name}.yaml", sign=" ")
        elif (file := beside(name, path)) and file.suffix in (".yaml", ".yml", ".json"):
            for each in leaves_of(file):
                if each.values != ("auto",):  # as the program's own options say
                    yield replace(each, name=f"--{inside}{each.name}", sign=" ", file=name)


def beside(name: str, path: Path) -> Path | None:
    """Returns the file that a script means, if it is here: relative to where the command runs, or to the script."""
    file = Path(os.path.expanduser(name))
    places = (file, path.parent / file, *(parent / file for parent in path.absolute().parents[1:4]))
    return next((place for place in places if place.is_file()), None)


# --- numbers of processes -----------------------------------------------------------------------


def _known(option: Option | None) -> Option | None:
    """Returns the option if it is a number of processes."""
    if option is None:
        return None
    text = "".join(option.values)
    if option.missing or not text.isdigit():
        why = option.missing or (option.text,)
        return Option(PROCESSES, (text,), option.line, file=option.file, missing=why)
    return Option(PROCESSES, (text,), option.line, file=option.file)


def _product(options: Sequence[Option | None]) -> Option:
    """Returns the product; an unknown factor is one."""
    total, line = 1, 0
    missing: tuple[str, ...] = ()
    for known in filter(None, map(_known, options)):
        line = line or known.line
        missing = missing or known.missing
        total *= int(known.values[0]) if not known.missing else 1
    return Option(PROCESSES, (str(total),), line, missing=missing)


def _nobody_says(launcher: str, line: int, why: str) -> Option:
    return Option(PROCESSES, (f"of {launcher}",), line, missing=(f"the number of processes of {launcher} ({why})",))


def _of_accelerate(launcher: str, given: dict[str, Option], line: int) -> Option:
    if (known := _known(given.get("num_processes"))) is not None:
        return known
    named = next((given[name] for name in ("config_file", "accelerate_config") if name in given), None)
    if named is not None:
        return _nobody_says(launcher, named.line, f"{' '.join(named.values)} says it, and is not here")
    return _nobody_says(launcher, line, "all devices of the machine, or as accelerate's own file says")


def _of_deepspeed(given: dict[str, Option], line: int) -> Option:
    if "include" in given and (match := re.fullmatch(r"\w+:(\d+(?:,\d+)*)", " ".join(given["include"].values))):
        return Option(PROCESSES, (str(len(match[1].split(","))),), given["include"].line)
    alone = "include" not in given and ("hostfile" not in given or "num_nodes" in given)
    if "num_gpus" in given and alone:
        return _product([given.get("num_nodes"), given["num_gpus"]])
    for name, option in given.items():
        devices = re.fullmatch(r"CUDA_VISIBLE_DEVICES=(\d+(?:,\d+)*)", name)
        if devices and not option.missing and "include" not in given and "hostfile" not in given:
            return Option(PROCESSES, (str(len(devices[1].split(","))),), option.line)
    return _nobody_says("deepspeed", line, "all devices of the machines")


def _of_slurm(launcher: str, given: dict[str, Option], line: int) -> Option:
    for name in ("ntasks", "n", "np"):
        if name in given and (known := _known(given[name])):
            return known
    if "ntasks_per_node" in given and ("nodes" in given or "N" in given):
        return _product([given.get("nodes", given.get("N")), given["ntasks_per_node"]])
    return _nobody_says(launcher, line, "as its job says")


def says(number: int) -> Option:
    """Returns the number of processes given by the reader, for a command whose file does not tell it."""
    if number < 1:
        raise UserError("--processes: should be 1 or more")
    return Option(PROCESSES, (str(number),), shown=f"--processes {number}")
