"""Memory that DeepSpeed needs on each device, by its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhf_host.protocols import TrainedModel, TrainingMemory

if TYPE_CHECKING:
    from rlhf_host.distributed.deepspeed.plugin import DeepSpeed

LIVE = 10**9
"""Default of ``stage3_max_live_parameters``: numbers that are whole at the same time."""
ALL_REDUCED = 5 * 10**8
"""Numbers that stage 0 reduces at once."""


def memory_of(options: DeepSpeed.Options, model: TrainedModel) -> TrainingMemory:
    """Returns bytes per device. They were counted with one rank and with two, on CPUs (``test_counted.py`` of ``rlhf-plan``).

    Stages 1 and 2 split optimizer state, which has the weights in float32 as well, and stage 2 also gradients. In float32 a
    rank's share of the gradients is copied for a step. Stage 3 splits everything and keeps the gradients' memory between steps.
    In 16 bits stage 1 has an optimizer of its own, which keeps gradients in float32 beside those of passes.
    """
    stage, ranks = options.zero_stage, max(1, model.processes // options.autotp_size)
    parts = options.autotp_size * (ranks if stage == 3 else 1)
    narrow = width_of(options, model) == 2
    trained = model.trained / options.autotp_size
    weights = (2 * model.numbers if narrow else model.bytes) / parts
    if stage == 0:
        flat = 4 * min(model.trained, ALL_REDUCED) if ranks > 1 else 0
        return TrainingMemory(weights=weights, gradients=4 * trained + flat, optimizer=8 * trained)
    buffer = (2 if narrow else 4) * min(options.reduce_bucket_size, model.trained)
    share = trained / ranks
    gradients, between = {
        1: (6 * trained, 4 * trained) if narrow else (max(4 * trained, 8 * share), 0.0),
        2: (4 * share if narrow else 8 * share, 0.0),
        3: (8 * share, 4 * share),
    }[stage]
    optimizer, gathered = 12 * share, 0.0
    if stage == 3:
        zero: dict[str, Any] = options.extra.get("zero_optimization", {})
        live = max(zero.get("stage3_max_live_parameters", LIVE), 2 * model.block + model.outside)
        gathered = (2 if narrow else 4) * min(model.numbers, live)
        weights += (
            0 if options.zero_hpz_partition_size == 1 else gathered and 2 * model.numbers / options.zero_hpz_partition_size
        )
    if options.offload_optimizer == "cpu" and model.device != "cpu":
        optimizer = between = 0.0
        gradients = 0.0 if stage > 1 else gradients
    if options.offload_param == "cpu" and model.device != "cpu":
        weights = 0.0
    left = weights if options.offload_while_sampling == "optimizer" else 0.0
    return TrainingMemory(
        weights=weights,
        gradients=gradients + buffer,
        optimizer=optimizer,
        between=between,
        gathered=gathered,
        stays=None if model.device == "cpu" else left,
        width=2 if narrow else None,
    )


def width_of(options: DeepSpeed.Options, model: TrainedModel) -> int:
    """Returns the bytes of a weight in passes."""
    if options.precision == "auto":
        return 2 if options.zero_stage == 3 and model.device == "cuda" else 4
    return 4 if options.precision == "fp32" else 2
