"""The time and the cost of a run, before it starts: from its settings to a prediction."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_host import UserError
from rlhf_host.commands import phase
from rlhf_host.internals import RunTraits, TaskData, read_inputs, refusals
from rlhf_host.settings import RunConfig, merge_needs, write_yaml
from rlhf_plan.answers import Lengths, of_limits, of_path
from rlhf_plan.cpu_time import timed_on_cpu
from rlhf_plan.dry_steps import dry_steps
from rlhf_plan.gpu_time import LINK_GBS, computed_on_gpus, gpu_named
from rlhf_plan.prediction import Prediction
from rlhf_plan.spans import Span, short

PROMPTS = 20
"""Prompts of which answers are sampled with ``--measure-answers``."""
HOST_ERROR = 0.5
"""Share by which the host's own seconds may differ on the machine of the run."""
TINY = {"algo": {"name": "rloo"}, "roles": {"actor": {"model": "quickstart"}}, "data": {"sources": [{"path": "arithmetic"}]}}
"""A run whose seconds are nearly all the host's own."""
FEW, MANY = 32, 256
"""Trajectories of its dry steps: the difference is what more of them take."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Words of the command line beside settings."""

    gpu: str | None = None
    answers: Path | None = None
    measure: bool = False
    prompt_tokens: float | None = None
    link: tuple[float, float] = LINK_GBS


def predict(config: RunConfig, manager: Any, asked: Asked) -> Prediction:
    """Predicts the seconds of a run.

    Raises:
        UserError: something that decides them is unknown.
    """
    needs = merge_needs(manager)
    if not any(need.name == "actor" for need in needs.roles):
        raise UserError("no algorithm is chosen, so there is no run to time: give --algo NAME")
    if reasons := list(refusals(config, RunTraits.of(config), needs)):
        raise UserError("\n".join(reasons))
    if not needs.samples and (asked.answers or asked.measure):
        raise UserError("--answers and --measure-answers: this run samples nothing, its rows have their answers")
    if asked.gpu is not None:
        gpu_named(asked.gpu)
    lengths = _lengths(config, asked) if needs.samples else None
    inputs = None
    if asked.gpu is None or asked.prompt_tokens is None or (config.train.steps is None and not needs.samples):
        inputs = read_inputs(config.model_copy(deep=True), {}, manager, needs)
    steps = config.train.steps or (100 if inputs is None else inputs.data.steps(config))
    tasks = inputs.data if inputs is not None and isinstance(inputs.data, TaskData) else None
    if asked.gpu is None:
        phase("Timing dry steps on this CPU")
        timed = timed_on_cpu(config, needs, lengths)
        parts, notes, devices, cpu = dict(timed.parts), [*timed.notes], 1, timed.cpu
        device = f"{os.cpu_count()} CPU cores of this machine"
    else:
        prompt = _prompt(asked, tasks)
        computed = computed_on_gpus(config, manager, needs, asked.gpu, lengths, prompt, asked.link)
        phase("Timing the host's own seconds on this CPU")
        rows = config.train.batch_size * (config.rollout.n if needs.samples else 1)
        host = _host(rows)
        parts, notes, devices, cpu = dict(computed.parts) | {"host": host}, [*computed.notes], computed.devices, None
        if lengths is not None:
            notes.insert(0, lengths.source)
        notes.insert(
            1, f"rows of {prompt:.0f} tokens before their answers" if needs.samples else f"rows of {prompt:.0f} tokens"
        )
        notes.append(f"the host's own seconds are those of dry steps on this CPU, with an error of {100 * HOST_ERROR:.0f} %")
        notes.append("without start, checkpoints, rewards that compute, and restarts")
        device = f"{devices} × {asked.gpu}"
    sampling = parts["sampling"]
    if config.async_depth:
        notes.append("sampling ahead: the range begins where it is hidden behind training")
        hidden = min(sampling.low, parts["passes"].low)
        parts["sampling"] = Span(sampling.low - hidden, sampling.middle, sampling.high)
    evaluations = Span(0, 0, 0)
    if tasks is not None and tasks.held_out is not None:
        answers, times = len(tasks.held_out) * config.eval.n, _evaluations(config, steps)
        low, high = batches_of(answers, config.train.batch_size * config.rollout.n)
        evaluations = sampled_again(sampling, times * low, times * high)
        notes.append(
            f"evaluations sample {times * answers:,} answers, each as long as in training. The range is {short(times * low)} to"
            f" {short(times * high)} times the sampling of a step: an engine may answer a large batch in the time of a small one"
        )
    elif config.eval.data.sources:
        notes.append("without evaluations: what held-out rows take is not known")
    span = None if lengths is None else lengths.mean
    return Prediction(parts, steps, evaluations, devices, device, notes, cpu, span)


def batches_of(answers: int, rows: int) -> tuple[float, float]:
    """Returns how many times the sampling of a step of so many ``rows`` an evaluation takes, at least and at most.

    At one end, a batch takes as long as its answers have tokens, whatever their number; at the other, each answer takes as long as
    in a step.
    """
    share = answers / rows
    return min(1.0, share), max(1.0, share)


def sampled_again(sampling: Span, low: float, high: float) -> Span:
    """Returns the seconds of ``low`` to ``high`` times the sampling of a step."""
    ends = low * sampling.low, high * sampling.high
    return Span(ends[0], math.sqrt(ends[0] * ends[1]), ends[1])


def _lengths(config: RunConfig, asked: Asked) -> Lengths:
    most = config.rollout.max_new_tokens
    if asked.measure:
        return _sampled(config)
    return of_limits(most) if asked.answers is None else of_path(asked.answers, most)


def _sampled(config: RunConfig) -> Lengths:
    """Returns the lengths of answers to a few prompts, which ``rlhf rollout`` samples in a process of its own, without rewards."""
    with tempfile.TemporaryDirectory() as place:
        settings, output = Path(place) / "run.yaml", Path(place) / "answers.jsonl"
        tree = config.model_dump(mode="json", by_alias=True)
        for name in ("algo", "reward", "with", "tracker", "run_dir", "name", "eval"):
            tree.pop(name, None)
        settings.write_text(write_yaml(tree), "utf-8")
        words = ["rollout", "--config", str(settings), "--rollouts", str(PROMPTS), "--rollout.n", "1", "--output", str(output)]
        phase(f"Sampling answers to {PROMPTS} prompts")
        done = subprocess.run([sys.executable, "-m", "rlhf_host", *words], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"--measure-answers: rlhf rollout failed: {(done.stderr.strip() or done.stdout).splitlines()[-1]}")
        lengths = of_path(output, config.rollout.max_new_tokens)
    return Lengths(lengths.mean, lengths.longest, lengths.source.replace(str(output), f"{PROMPTS} prompts"))


def _prompt(asked: Asked, tasks: TaskData | None) -> float:
    if asked.prompt_tokens is not None:
        return asked.prompt_tokens
    lengths = [len(task.prompt_ids or ()) for task in tasks.tasks.tasks[:1000]] if tasks is not None else []
    if not lengths:
        raise UserError("--time on GPUs: the tokens of a prompt, or of a row, are unknown: give --prompt-tokens N")
    return statistics.fmean(lengths)


def _evaluations(config: RunConfig, steps: int) -> int:
    settings = config.eval
    regular = steps // settings.every if settings.every else 0
    last = settings.at_end and not (settings.every and steps % settings.every == 0)
    return settings.at_start + regular + last


def _host(rows: int) -> Span:
    """Returns the host's own seconds of a step, from dry steps of the tiny model that comes with it."""
    seconds = []
    for prompts in (FEW, MANY):
        tree = TINY | {"rollout": {"n": 4, "max_new_tokens": 4}, "train": {"threads": 1}}
        config = RunConfig.model_validate(tree)
        seconds.append(dry_steps(config, {}, prompts=prompts // 4, tokens=4).seconds["host"])
    each = max(0.0, seconds[1] - seconds[0]) / (MANY - FEW)
    value = seconds[0] + each * (rows - FEW)
    return Span(max(0.0, value), max(0.0, value), max(0.0, value)).around(HOST_ERROR)
