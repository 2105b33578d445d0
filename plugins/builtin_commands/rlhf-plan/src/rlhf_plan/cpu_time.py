"""The time of a run on this machine's CPU, from dry steps of models with few layers."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_host import UserError
from rlhf_host.internals import RunTraits, machine_memory, meta_model, role_flag, role_settings
from rlhf_host.settings import RoleConfig, RunConfig
from rlhf_plan.answers import Lengths
from rlhf_plan.dry_steps import Timed, dry_steps, unheard
from rlhf_plan.items import GB
from rlhf_plan.short_models import Layers, layers_of, weights_of_short, write_short
from rlhf_plan.spans import Span

ERROR = 0.2
"""Share by which a prediction may be wrong at either end, beside the lengths of answers: ``benchmarks/predicted_time.py``."""
LONGEST = 48
"""Tokens of the longest answers of dry steps: what longer ones take follows from their slope."""
LEAST_ROWS = 32
"""Rows that dry steps have where the run has as many: decoding few takes longer per row."""
MOST_WORK = 1e12
"""Operations of a dry step beyond which it has fewer prompts than the run."""
BYTES = 20
"""Bytes of each weight in dry steps: itself, its gradient, two moments, and a copy while it is read."""
ADAM_NUMBERS = 1 << 22
"""Weights of the optimizer's step that is timed."""


@dataclass(frozen=True, slots=True)
class Short:
    """A model of the run, of which few layers are timed."""

    role: str
    settings: RoleConfig
    head: Any
    layers: Layers
    trained: bool


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Parts of a step, and what was assumed."""

    parts: Mapping[str, Span]
    cpu: Span
    """CPU seconds of a step."""
    evaluated: float
    """Seconds to sample and score one answer of an evaluation."""
    notes: Sequence[str]


def timed_on_cpu(config: RunConfig, needs: Any, lengths: Lengths | None) -> CpuTime:
    """Times dry steps.

    Args:
        lengths: None: nothing is sampled.

    Raises:
        UserError: a run whose time on a CPU cannot be predicted.
    """
    _refuse(config, needs)
    shorts = _shorts(config, needs)
    prompts, whole = _prompts(config, shorts, lengths)
    threads = torch.get_num_threads()
    caps = [None] if lengths is None else _caps(lengths)
    points: list[tuple[float, dict[str, float]]] = []
    for cap in caps:
        points.append(_at(config, shorts, prompts, cap))
    # Behind the runs, which it would slow: OpenMP's threads wait less eagerly where a second group of them exists.
    optimizer = _optimizer_seconds(config, shorts, threads)
    factor = whole / prompts

    def at(part: str, tokens: float) -> float:
        (x, first), *more = points
        if not more:
            return factor * first[part]
        [(y, second)] = more
        slope = max(0.0, second[part] - first[part]) / max(y - x, 1e-9)
        return factor * max(0.0, first[part] + slope * (tokens - x))

    mean = Span(0, 0, 0) if lengths is None else lengths.mean
    parts = {}
    for part in (part for part in points[0][1] if part != "cpu"):
        ends = mean
        if lengths is not None and part == "sampling":
            ends = Span(mean.low, (mean.middle + max(mean.middle, lengths.longest)) / 2, max(mean.high, lengths.longest))
        parts[part] = Span(at(part, ends.low), at(part, ends.middle), at(part, ends.high)).around(ERROR)
    wall = sum(at(part, mean.middle) for part in parts)
    cpu = Span.total(parts.values()).times(at("cpu", mean.middle) / wall)  # as busy as the dry steps
    passes = parts["passes"]
    share = min(1.0, optimizer / passes.middle) if passes.middle else 0.0
    parts = {
        "sampling": parts["sampling"],
        "passes": passes.times(1 - share),
        "optimizer": passes.times(share),
        "sync": parts["sync"],
        "host": parts["host"],
    }
    rows = max(1, config.train.batch_size * config.rollout.n)
    return CpuTime(parts, cpu, parts["sampling"].middle / rows, _notes(config, shorts, prompts, whole, caps, lengths))


def _refuse(config: RunConfig, needs: Any) -> None:
    traits = RunTraits.of(config)
    if config.from_trajectories is not None:
        raise UserError("--time with --from-trajectories: only runs that sample, or train on a data set, are predicted")
    if traits.runtime.remote:
        raise UserError(
            f"--time on CPUs is for --runtime local: processes of the runtime {config.runtime.name} take the cores from each other"
        )
    if needs.samples and traits.engine.takes != "module":
        raise UserError(
            f"--time: the rate of the engine {config.engine.name} is unknown, because it computes outside of this process;"
            " time it with rlhf rollout, or choose --engine transformers"
        )
    if adapted := [name for name, role in config.roles.items() if role.adapter is not None]:
        raise UserError(
            f"--time: {adapted[0]} goes on with an adapter, which fits no model of few layers; give --lora.rank in its place"
        )


def _shorts(config: RunConfig, needs: Any) -> list[Short]:
    found = []
    for need in needs.roles:
        if need.name != "actor" and (need.name not in config.roles or config.roles[need.name].model is None):
            continue  # it has the actor's model
        settings = role_settings(config.roles, need, None, needs)
        found.append(Short(need.name, settings, need.head, layers_of(settings, need.head), need.trainable))
    return found


def _prompts(config: RunConfig, shorts: Sequence[Short], lengths: Lengths | None) -> tuple[int, int]:
    """Returns the prompts, or rows, of a dry step and those of the run's."""
    weights = sum(weights_of_short(short.settings, short.head, short.layers.depths()[-1]) for short in shorts)
    available, needed = machine_memory().get("MemAvailable"), BYTES * weights
    if available is not None and needed > 0.7 * available:
        depth = shorts[0].layers.depths()[-1]
        raise UserError(
            f"--time: {depth} layers of {shorts[0].settings.model} need {needed / GB:.0f} GB on this CPU, where"
            f" {available / GB:.0f} GB are free: --gpu NAME computes the time on a GPU"
        )
    size, samples = config.train.batch_size, config.rollout.n if lengths is not None else 1
    tokens = 256 if lengths is None else 128 + min(LONGEST, lengths.mean.high)
    most = max(MOST_WORK / (8 * weights * tokens), LEAST_ROWS)
    return min(size, math.ceil(most / samples)), size


def _caps(lengths: Lengths) -> list[int | None]:
    high = min(LONGEST, math.ceil(max(2.0, lengths.mean.high, lengths.longest)))
    return [max(1, high // 2), high]


def _at(config: RunConfig, shorts: Sequence[Short], prompts: int, cap: int | None) -> tuple[float, dict[str, float]]:
    """Returns the mean length of answers, and the seconds of each part with whole models."""
    with tempfile.TemporaryDirectory() as place:

        def dry(deep: Short | None) -> Timed:
            models = {}
            for short in shorts:
                depth = short.layers.depths()[-1 if short is deep else 0]
                path = Path(place) / f"{short.role}-{depth}"
                if not path.exists():
                    with unheard():
                        write_short(short.settings, short.head, depth, path)
                models[short.role] = str(path)
            return dry_steps(config, models, prompts=prompts, tokens=cap)

        first = dry(None)
        total = {**first.seconds, "cpu": first.cpu}
        for short in shorts:
            few, *more = short.layers.depths()
            if not more:
                continue
            second = dry(short)
            ratio = (short.layers.count - few) / (more[0] - few)
            for part, base in {**first.seconds, "cpu": first.cpu}.items():
                deeper = second.cpu if part == "cpu" else second.seconds[part]
                total[part] += ratio * max(0.0, deeper - base)
    return first.tokens, total


def _optimizer_seconds(config: RunConfig, shorts: Sequence[Short], threads: int) -> float:
    """Returns the seconds of the optimizer's steps, by one over as many numbers as fit into no cache."""
    torch.set_num_threads(threads)  # runs leave this thread one
    weight = torch.nn.Parameter(torch.zeros(ADAM_NUMBERS))
    weight.grad = torch.ones(ADAM_NUMBERS)
    adam = torch.optim.AdamW([weight], foreach=True)
    adam.step()
    began = time.perf_counter()
    adam.step()
    each = (time.perf_counter() - began) / ADAM_NUMBERS
    trained = 0
    for short in (short for short in shorts if short.trained):
        outline = meta_model(short.settings, head=short.head, trainable=True, weights=False)
        trained += sum(one.numel() for one in outline.parameters() if one.requires_grad)
    return each * trained * config.train.updates_per_batch


def _notes(
    config: RunConfig, shorts: Sequence[Short], prompts: int, whole: int, caps: Sequence[int | None], lengths: Lengths | None
) -> list[str]:
    notes = [] if lengths is None else [lengths.source]
    for short in shorts:
        few, *more = short.layers.depths()
        of = f"{role_flag(short.role)}: {short.layers.count} layers"
        notes.append(f"{of}, timed with {few} and with {more[0]}" if more else f"{of}, all timed")
    if prompts < whole:
        notes.append(f"dry steps have {prompts} of the {whole} prompts of a step: the others take as long")
    if lengths is not None:
        if max(lengths.mean.high, lengths.longest) > LONGEST:
            notes.append(f"answers of {caps[0]} and {caps[-1]} tokens are timed: each token of a longer one takes as long")
        notes.append("rewards are drawn by chance in dry steps: the seconds of the run's own are not in the sum")
        if config.agent.name != "single_turn" or config.agents:
            notes.append("an episode has one answer here: plus the environment's time, and that of further turns")
    notes.append(f"an error of {100 * ERROR:.0f} % at either end; without start, checkpoints and other load of the machine")
    return notes
