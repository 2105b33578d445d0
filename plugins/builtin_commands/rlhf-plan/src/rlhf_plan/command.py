"""``rlhf plan``, and the same for ``rlhf train --dry-run``."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rlhf_host import UserError
from rlhf_host.commands import near_matches, phase, wrap
from rlhf_host.protocols import Checking, DeviceKind
from rlhf_host.settings import CommandLine, RunConfig, SettingsCommand, merge_needs, resolve
from rlhf_plan.items import GB, GPU_NAMES, PARTS

if TYPE_CHECKING:
    from rlhf_host.internals import PluginManager
    from rlhf_plan.phases import Phase

HELP_GROUP = "Train"

KINDS: dict[str, DeviceKind] = {"cuda": "cuda", "cpu": "cpu"}
TIME = ("time", "price", "gpu", "answers", "measure-answers", "prompt-tokens", "link-gbs")
CONTROL = ("memory-gb", "device", "json", *(f"{part}-gb" for part in PARTS), *TIME)

START = {
    "algo": "NAME: the algorithm, which says what roles there are",
    "actor.model": "the model to train: a directory with a config.json, or a hub name",
    "reward": "[ALIAS=]NAME: what scores the answers, as in rlhf train",
    "placement": "ROLE+ROLE=DEVICES: these roles share devices (rollout: the engines); repeatable",
    "memory-gb": "memory of a device, in 10⁹ bytes: a run that needs more than 90 % is refused (default: that of a GPU here)",
    "device": "cuda or cpu: kind of the devices (default cuda)",
    "json": "print a JSON object, with bytes, instead of a table",
    "time": "say how long a step and the run take, as ranges: timed by dry steps on this CPU, or computed for --gpu",
    "price": "with --time: what a device costs in an hour; the cost of the run is said",
    "gpu": f"with --time: {', '.join(GPU_NAMES)}: compute the time on these devices",
    "answers": "with --time: RUN or FILE of rlhf rollout: answers are as long as there",
    "measure-answers": "with --time: sample answers to 20 prompts first, to know how long they are",
    "prompt-tokens": "with --gpu: tokens of a prompt, or of a row of data (default: read from the data)",
    "link-gbs": "with --gpu: LOW..HIGH, GB/s between devices",
    **{f"{part}-gb": f"{text}: this number in place of the computed one" for part, text in PARTS.items()},
}

SECTIONS = {"rollout": "Rollouts", "train": "Training", "roles": "Models", "data": "Data"}

NOTE = "Computed from config.json and settings; nothing of it was measured on a GPU."

ABOUT = """Say how much memory a run needs on each device in each phase, and with --time what its steps take. Flags and files are
those of rlhf train; of models only config.json is read."""


@click.command(
    cls=SettingsCommand,
    control=CONTROL,
    usage="plan [FLAGS]",
    about=ABOUT,
    start=START,
    sections=SECTIONS,
    example="plan --algo ppo --model models/x --engine vllm",
)
def plan(line: CommandLine) -> None:
    """Say how much memory a run needs on each device in each phase, before it starts."""
    device = KINDS.get(word := line.value("device") or "cuda")
    if device is None:
        raise UserError(f"--device {word}: it is cuda or cpu{near_matches(word, KINDS)}")
    size = _bytes(line, "memory-gb")
    if size == 0:
        raise UserError("--memory-gb 0: give the memory of a device, such as --memory-gb 80")
    overrides = {part: amount for part in PARTS if (amount := _bytes(line, f"{part}-gb")) is not None}
    if "time" in line.own:
        plan_time(line)
        return
    if lost := next((name for name in TIME if name in line.own), None):
        raise UserError(f"--{lost} goes with --time")
    began = time.perf_counter()
    loaded = line.read()
    run = resolve(loaded.config, loaded.origins)
    phase("Loading libraries")
    with closing(run.plugins()) as manager:
        size = _memory_here(device) if size is None else size
        made = Plan.of(run.config, manager, device=device, device_bytes=size, overrides=overrides)
    click.echo(made.json() if "json" in line.own else "\n".join(made.lines()))
    click.echo(f"Planned in {time.perf_counter() - began:.1f} s.", err=True)
    if made.problem is not None:
        raise UserError(made.problem)


def plan_time(line: CommandLine) -> None:
    """Says how long the run takes, and keeps it for the end of the run."""
    price = _number(line, "price", "what a device costs in an hour, such as --price 2.49")
    prompt = _number(line, "prompt-tokens", "tokens of a prompt, such as --prompt-tokens 200")
    answers, gpu = line.value("answers"), line.value("gpu")
    if answers is not None and not Path(answers).exists():
        raise UserError(f"--answers {answers}: no such run or file")
    if answers is not None and "measure-answers" in line.own:
        raise UserError("--answers and --measure-answers: give one of them")
    loaded = line.read()
    if gpu is not None and prompt is None and not loaded.config.data.sources:
        raise UserError("--time --gpu: how long prompts are is unknown: give --data, or --prompt-tokens N")
    run = resolve(loaded.config, loaded.origins)
    phase("Loading libraries")
    from rlhf_plan.gpu_time import LINK_GBS
    from rlhf_plan.prediction import keep
    from rlhf_plan.time_plan import Asked, predict

    if gpu is None and line.value("device") == "cuda":
        raise UserError("--time --device cuda: say which GPU its data sheet is of, such as --gpu H100")
    asked = Asked(
        gpu,
        None if answers is None else Path(answers),
        "measure-answers" in line.own,
        prompt,
        _span(line, "link-gbs") or LINK_GBS,
    )
    with closing(run.plugins()) as manager:
        made = predict(run.config, manager, asked)
    keep(run.config, made)
    if "json" in line.own:
        click.echo(json.dumps(made.json() | {"price": price}, indent=2))
        return
    for text in made.lines(price):
        click.echo(text)
    if price is None:
        click.echo("  - no cost: --price N is what a device costs in an hour")


def forecast(config: RunConfig, manager: PluginManager) -> list[str]:
    """Returns the plan of a run on the devices of this machine, or why there is none.

    Raises ``UserError`` for a run that does not fit.
    """
    size = _memory_here("cuda")
    try:
        made = Plan.of(config, manager, device="cpu" if size is None else "cuda", device_bytes=size, overrides={})
    except UserError as error:
        return [f"no plan of memory: {error}"]
    if made.problem is not None:
        raise UserError("\n".join([made.problem, *made.lines()]))
    return made.lines()


@dataclass(frozen=True, slots=True)
class Plan:
    """Phases on each group of devices, and what does not fit."""

    phases: Sequence[Phase]
    notes: Sequence[str]
    problem: str | None
    device: DeviceKind
    """Kind of the devices, where the placement does not say otherwise."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        manager: PluginManager,
        *,
        device: DeviceKind,
        device_bytes: float | None,
        overrides: Mapping[str, float],
    ) -> Plan:
        """Plans a run. Nothing is loaded.

        Args:
            device: kind of the devices.
            device_bytes: memory of each; None: unknown.
            overrides: part → bytes in place of what is computed.

        Raises:
            UserError: a model without a ``config.json``, or one that cannot be made without its weights; plugins that do not
                tell what they need; what the backend refuses.
        """
        from rlhf_host.internals import RunTraits, refusals, runtime_plugin, runtime_start, weight_sync_plugin
        from rlhf_plan.phases import Planner, Sampling
        from rlhf_plan.refusals import problem

        needs, traits = merge_needs(manager), RunTraits.of(config)
        if not any(need.name == "actor" for need in needs.roles):
            raise UserError("no algorithm is chosen, so there is no model to plan for: give --algo NAME")
        if reasons := list(refusals(config, traits, needs)):
            raise UserError("\n".join(reasons))
        start = runtime_start(config, manager, needs, None, 1, {})
        if isinstance(backend := start.backend.build(), Checking):
            backend.check(start, {})
        rollout, prompt = config.rollout, config.data.max_prompt_tokens
        row = rollout.max_tokens or (None if prompt is None else prompt + rollout.max_new_tokens)
        more = "Prompts are not in the cache, nor in rows: set --data.max-prompt-tokens or --rollout.max-tokens."
        if not needs.samples:
            more = "A row of data that is longer than a micro-batch needs more: set --data.max-tokens."
        sampling = Sampling(
            answers=config.train.batch_size * rollout.n * (config.async_depth + 1),
            longest=row or rollout.max_new_tokens,
            row=row if needs.samples else config.data.max_tokens,
            answer=rollout.max_new_tokens if needs.samples else 0,
            bucket_bytes=weight_sync_plugin(config).traits.bucket_bytes if needs.samples else 0,
            remote=traits.runtime.remote,
        )
        planner = Planner(sampling=sampling, device=device, device_bytes=device_bytes, overrides=overrides)
        runtime = runtime_plugin(config)
        phases = planner.plan(start, runtime)
        notes = [NOTE, more] if sampling.row is None else [NOTE]
        return cls(phases, notes, problem(phases, planner, start, runtime), device)

    def lines(self, width: int | None = None) -> list[str]:
        """Returns the table, with the columns that something is in, and the notes.

        Args:
            width: columns there are; default: those of the terminal, and any number where there is none. Where the table is
                wider, a row's name is above its numbers, and where these are wider alone, they are a list.
        """
        width = width or shutil.get_terminal_size((10_000, 24)).columns
        parts = [part for part in PARTS if any(phase.parts.get(part) for phase in self.phases)]
        cpus = {each.group.device or self.device for each in self.phases} == {"cpu"}
        where = "GB on each CPU" if cpus else "GB on each device"
        rows = [[where, *parts, "sum"], *(_row(phase, parts) for phase in self.phases)]
        first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        numbers = ["  ".join(map(str.rjust, row[1:], widths)) for row in rows]
        if first + 2 + len(numbers[0]) <= width:
            table = [f"{row[0]:<{first}}  {text}" for row, text in zip(rows, numbers, strict=True)]
        elif len(numbers[0]) + 2 <= width:
            table = [line for row, text in zip(rows, numbers, strict=True) for line in (row[0], f"  {text}")]
        else:
            listed = (f"{row[0]}: {', '.join(map(' '.join, zip(rows[0][1:], row[1:], strict=True)))}" for row in rows[1:])
            table = [where, *(line for text in listed for line in wrap(text, width, indent="  "))]
        choices = [f"{name} {choice}." for each in self.phases for name, choice in each.choices.items()]
        return [*table, *(line for text in (*choices, *self.notes) for line in wrap(text, width))]

    def json(self) -> str:
        """Returns a JSON object, with bytes."""
        phases = [
            {
                "group": each.group.name,
                "devices": each.group.devices,
                "phase": each.name,
                "bytes": dict(each.parts),
                "sum": each.total,
                "choices": {name: asdict(choice) for name, choice in each.choices.items()},
            }
            for each in self.phases
        ]
        return json.dumps({"phases": phases, "notes": list(self.notes), "problem": self.problem}, indent=2)


def _row(phase: Phase, parts: Sequence[str]) -> list[str]:
    amounts = [*(phase.parts.get(part, 0.0) for part in parts), phase.total]
    return [f"{phase.group.name}={phase.group.devices}, {phase.name}", *(f"{amount / GB:.1f}" for amount in amounts)]


def _bytes(line: CommandLine, name: str) -> float | None:
    """Returns the value of the flag ``name`` in bytes; None if it was not given. Raises ``UserError`` for anything but a number."""
    if name not in line.own:
        return None
    text = line.value(name) or ""
    try:
        value = float(text) * GB
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e18:
        raise UserError(f"--{name} {text}: give a number of gigabytes, such as --{name} 80".replace(" :", ":"))
    return value


def _number(line: CommandLine, name: str, what: str) -> float | None:
    """Returns the value of a flag. Raises ``UserError`` for anything but a number above 0."""
    if name not in line.own:
        return None
    text = line.value(name) or ""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e12:
        raise UserError(f"--{name} {text}: give {what}".replace(" :", ":"))
    return value


def _span(line: CommandLine, name: str) -> tuple[float, float] | None:
    if name not in line.own:
        return None
    text = line.value(name) or ""
    try:
        low, high = map(float, text.split(".."))
    except ValueError:
        low, high = math.nan, math.nan
    if not 0 < low <= high:
        raise UserError(f"--{name} {text}: give LOW..HIGH, such as --{name} 20..400".replace(" :", ":"))
    return low, high


def _memory_here(device: DeviceKind) -> float | None:
    """Returns the bytes of the first GPU of this machine; None: there is none, or CPUs are meant."""
    import torch

    from rlhf_host.internals import available_memory

    return available_memory(torch.device("cuda", 0)) if device == "cuda" and torch.cuda.is_available() else None
