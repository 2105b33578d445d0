"""The time of a run on GPUs, computed from counted passes and data sheets. Nothing of it was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_host import UserError
from rlhf_host.commands import near_matches
from rlhf_host.internals import RunTraits, meta_model, role_settings, runtime_plugin, runtime_start
from rlhf_host.protocols import Grouping
from rlhf_host.settings import RunConfig
from rlhf_plan.answers import Lengths
from rlhf_plan.counted_passes import Operation, count
from rlhf_plan.footprint import footprint
from rlhf_plan.phases import plain
from rlhf_plan.spans import Span


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet's figures."""

    tflops: float
    """TFLOP/s of dense products in bfloat16."""
    tbs: float
    """TB/s of memory."""
    source: str


GPUS = {
    "A100": Gpu(312, 2.039, "NVIDIA A100 80GB SXM data sheet"),
    "H100": Gpu(989, 3.35, "NVIDIA H100 SXM data sheet"),
    "H200": Gpu(989, 4.8, "NVIDIA H200 SXM data sheet"),
    "B200": Gpu(2250, 8.0, "NVIDIA HGX B200 data sheet"),
    "L40S": Gpu(362, 0.864, "NVIDIA L40S data sheet"),
    "RTX4090": Gpu(165, 1.008, "NVIDIA Ada whitepaper"),
}
REACHED = {"fast": (0.75, 0.92), "slow": (0.4, 0.6)}
"""Shares of the data sheet that products and copies reach. ``benchmarks/gpu_roofline.py`` has 0.66 and 0.87, which met the one pass
that was measured within 5 %."""
LAUNCH_S = {"fast": 4e-6, "slow": 14e-6}
"""Shortest time from one operation to the next: a full queue, and one that Python fills. Engines of their own play graphs."""
LINK_GBS = (20.0, 400.0)
"""GB/s between devices: 200 Gbit/s of a network card with losses, NVLink 4 in one direction (450) with losses."""
LOGIT_BYTES = {"fast": 32, "slow": 112}
"""Bytes moved for each logit that is trained on: benchmarks/gpu_roofline.json, with kernels in Triton and without."""
OPTIMIZER_BYTES = 30
"""Bytes for each trained number: weight, gradient and two moments read, three written, and the copy in 16 bits."""
ENGINE_SLOWER = 3.0
"""An engine that schedules by itself takes up to so many times what its reads and products need."""
WAYS = ("fast", "slow")


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Parts of a step, without the host's own seconds, and what was assumed."""

    parts: Mapping[str, Span]
    devices: int
    notes: Sequence[str]


def gpu_named(name: str) -> Gpu:
    """Raises ``UserError`` for one whose data sheet is not here."""
    known = {key.lower(): gpu for key, gpu in GPUS.items()}
    if (gpu := known.get(name.lower().replace(" ", "").replace("-", ""))) is None:
        raise UserError(f"--gpu {name}: no data sheet of it is here; there are {', '.join(GPUS)}{near_matches(name, GPUS)}")
    return gpu


def computed_on_gpus(
    config: RunConfig, manager: Any, needs: Any, name: str, lengths: Lengths | None, prompt: float, link: tuple[float, float]
) -> GpuTime:
    """Computes the seconds of a step.

    Args:
        prompt: tokens of a prompt; of a whole row where nothing is sampled.
        link: GB/s between devices, from and to.

    Raises:
        UserError: a model that cannot be counted, or an engine whose rate is unknown.
    """
    gpu = gpu_named(name)
    start = runtime_start(config, manager, needs, None, 1, {})
    runtime = runtime_plugin(config)
    if not isinstance(runtime, Grouping):
        raise UserError("--time: the runtime does not tell which roles share devices (groups)")
    groups = runtime.groups(start)
    devices = sum(group.devices for group in groups)
    where = {role: group.devices for group in groups for role in group.roles}
    price: dict[str, Callable[[Operation], float]] = {way: _price(gpu, way) for way in WAYS}
    notes = [
        f"computed, not measured: operations counted on tensors without data, at {_shares('fast')} to {_shares('slow')} of"
        f" {gpu.tflops:g} TFLOP/s and {gpu.tbs:g} TB/s ({gpu.source})",
        "passes compute in 16 bits; attention that looks at a window is counted as if it saw everything",
    ]
    train, train_lengths = config.train, lengths.mean if lengths is not None else Span(0, 0, 0)
    rows = train.batch_size * (config.rollout.n if lengths is not None else 1)
    seconds = {way: dict.fromkeys(("sampling", "passes", "optimizer", "sync"), 0.0) for way in WAYS}
    numbers = 0
    for need in needs.roles:
        role = plain(role_settings(config.roles, need, None, needs))
        outline = meta_model(role, head=need.head, trainable=need.trainable, weights=False)
        if outline is None:
            raise UserError(f"no time can be predicted for {role.model!r}: it cannot be made from its config.json alone")
        trained = sum(each.numel() for each in outline.parameters() if each.requires_grad)
        count_of = sum(each.numel() for each in outline.parameters())
        text = outline.config.get_text_config()
        share = where.get(need.name, 1)
        for way, tokens in zip(WAYS, (train_lengths.low, train_lengths.high), strict=True):
            length = max(1, round(prompt + tokens))
            together = max(1, min(rows, train.max_tokens_per_microbatch // length))
            counted = count(role, need.head, together, length, backward=need.trainable)
            forward = counted.forward.total(price[way])
            backward = counted.backward.total(price[way]) if counted.backward is not None else 0.0
            again = {False: 0.0, True: 1.0, "auto": float(way == "slow")}.get(role.gradient_checkpointing, 1.0)
            batches = rows / together / share
            once = batches * (forward + _head(gpu, way, text, together * max(1.0, tokens or length), need.trainable, need.head))
            passes = train.epochs * (once + batches * (backward + again * forward)) if need.trainable else once
            if need.name == "actor" and needs.samples and config.old_logprobs_mode == "recompute":
                passes += once
            seconds[way]["passes"] += passes
            if need.trainable:
                gbs = link[1] if way == "fast" else link[0]
                moved = OPTIMIZER_BYTES * trained / share / (gpu.tbs * REACHED[way][1] * 1e12)
                seconds[way]["optimizer"] += train.updates_per_batch * moved
                if share > 1:
                    hidden = 0.0 if way == "fast" else 1.0
                    sent = (2 * 2 * count_of * math.ceil(batches) + 4 * trained) * (share - 1) / share
                    seconds[way]["passes"] += hidden * train.epochs * sent / gbs / 1e9
        if need.name == "actor":
            numbers = count_of
            if lengths is not None:
                _add_sampling(seconds, config, start, groups, role, outline, gpu, lengths, prompt, rows, notes)
    if devices > 1:
        notes.append(
            f"between devices {link[0]:g} to {link[1]:g} GB/s (--link-gbs LOW..HIGH): with the slower one nothing is hidden behind"
            " products, with the faster one all of it"
        )
    if lengths is not None and RunTraits.of(config).engine.takes != "module":
        for way in WAYS:
            rate = gpu.tbs * REACHED["fast"][1] * 1e12 if way == "fast" else link[0] * 1e9
            seconds[way]["sync"] = 2 * numbers / rate
    parts = {part: _span(seconds["fast"][part], seconds["slow"][part]) for part in seconds["fast"]}
    return GpuTime(parts, devices, notes)


def _add_sampling(
    seconds: Mapping[str, dict[str, float]],
    config: RunConfig,
    start: Any,
    groups: Sequence[Any],
    role: Any,
    outline: Any,
    gpu: Gpu,
    lengths: Lengths,
    prompt: float,
    rows: int,
    notes: list[str],
) -> None:
    traits = RunTraits.of(config).engine
    if config.engine.name not in ("transformers", "vllm"):
        raise UserError(
            f"--time: the rate of the engine {config.engine.name} is unknown: only transformers and vllm are computed; time it with"
            " rlhf rollout"
        )
    engines, parallel = max(1, sum(group.engines for group in groups)), traits.devices
    own = math.ceil(rows / engines)
    if traits.largest_batch is not None or traits.takes == "module":
        most = traits.largest_batch or getattr(start.engine.build().options, "max_batch_size", own)
        waves, own = math.ceil(own / most), min(own, most)
    else:
        waves = 1
    cached = footprint(outline, width=2, autocast=False).cached
    step = count(role, "lm", own, 1, backward=False)
    text = outline.config.get_text_config()
    for way, tokens in zip(WAYS, (lengths.mean.low, max(lengths.mean.high, lengths.longest)), strict=True):
        price = _price(gpu, way, graphs=traits.takes != "module")
        rate = gpu.tbs * REACHED[way][1] * 1e12
        of_cache = 2 * cached * own * (prompt + tokens / 2) / rate
        each = step.forward.total(price) + _head(gpu, way, text, own, False, "lm")
        prompts = own if way == "slow" else max(1, own // config.rollout.n)
        length = max(1, round(prompt))
        together = max(1, min(prompts, 16384 // length))
        first = prompts / together * count(role, "lm", together, length, backward=False).forward.total(price)
        slower = ENGINE_SLOWER if way == "slow" and traits.takes != "module" else 1.0
        seconds[way]["sampling"] = waves * slower * ((tokens * (each + of_cache)) + first) / parallel
    if traits.takes != "module":
        split = f", each of its {parallel} devices a part of it" if parallel > 1 else ""
        notes.append(f"the engine takes 1 to {ENGINE_SLOWER:g} times what its reads, products and launches need{split}")
    if config.agent.name != "single_turn" or config.agents:
        notes.append("an episode has one answer here: plus the environment's time, and that of further turns")


def _price(gpu: Gpu, way: str, *, graphs: bool = False) -> Callable[[Operation], float]:
    products, copies = REACHED[way]
    flops, bytes_ = gpu.tflops * products * 1e12, gpu.tbs * copies * 1e12
    launch = LAUNCH_S["fast" if graphs else way]
    return lambda one: max(one.flops / flops, one.bytes / bytes_, launch)


def _head(gpu: Gpu, way: str, config: Any, tokens: float, trained: bool, head: str) -> float:
    """Returns the seconds of the head at so many tokens; its logits are computed again for the backward pass."""
    if head != "lm":
        return 0.0
    products, copies = REACHED[way]
    logits = tokens * config.vocab_size
    flops = (8 if trained else 2) * logits * config.hidden_size
    moved = logits * (LOGIT_BYTES[way] if trained else LOGIT_BYTES[way] / 4) + 2 * config.vocab_size * config.hidden_size
    return max(flops / (gpu.tflops * products * 1e12), moved / (gpu.tbs * copies * 1e12))


def _shares(way: str) -> str:
    return " and ".join(f"{100 * share:.0f} %" for share in REACHED[way])


def _span(low: float, high: float) -> Span:
    low, high = min(low, high), max(low, high)
    return Span(low, math.sqrt(low * high), high)
