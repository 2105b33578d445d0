"""verl's FSDP: what is split over which ranks, in which types, and what waits in CPU memory."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_translate.options import Given, Option, Outcome, Table, Unknown, always, lost, same, to
from rlhf_translate.shared import FSDP
from rlhf_translate.verl import groups

_TYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


def options(place: str, strategy: str, ranks: Callable[[Given], float], *, samples: bool) -> Table:
    """Returns the options of FSDP.

    Args:
        place: beginning of their names.
        strategy: the option that chooses FSDP.
        ranks: number of processes that train.
        samples: True if engines sample on the same devices.
    """

    def is_fsdp2(given: Given) -> bool:
        return given[strategy].value == "fsdp2"

    def chosen(option: Option, given: Given) -> Outcome:
        if option.value in groups.BACKENDS:
            return groups.in_place_of(option.value)
        if option.value not in ("fsdp", "fsdp2"):
            return lost("backends here: torch, deepspeed, fsdp")
        return to(FSDP, "" if option.value == "fsdp2" else "the same numbers are split, by FSDP2")

    def away(option: Option, given: Given) -> Outcome:
        """Handles weights and optimizer state that are in CPU memory while the trainer does not compute."""
        if option.is_off:
            return same("off; where engines sleep, --backend.offload-while-sampling says what makes room for them")
        if not samples:
            return lost(
                "nothing samples on the same devices, so weights stay there; --backend.offload cpu keeps them in CPU memory"
            )
        if is_fsdp2(given) and given.is_on(f"{place}offload_policy"):
            return same("offload_policy counts")
        weights = given.is_on(f"{place}param_offload")
        return to(
            {**FSDP, "backend.offload_while_sampling": "all" if weights else "optimizer"}, "if engines sleep (engine.sleep)"
        )

    def in_cpu_memory(option: Option, given: Given) -> Outcome:
        if option.is_off:
            return same("off, as it is here")
        if not is_fsdp2(given):
            return same("FSDP1 does not read it there")
        return to({**FSDP, "backend.offload": "cpu"})

    def shard(option: Option, given: Given) -> Outcome:
        if option.is_off or (option.number or -1) <= 0:
            return same("all ranks split one copy, as they do here")
        try:
            all_ranks = ranks(given)
        except Unknown:
            all_ranks = 0.0
        if 0 < all_ranks <= (option.number or 0):
            return same("not below the number of ranks: all split one copy, as they do here")
        return to({**FSDP, "backend.shard": option.value})

    return {
        strategy: chosen,
        f"{place}strategy": lambda option, given: same(f"{strategy} counts"),
        f"{place}grad_offload": always("gradients stay with the optimizer"),
        f"{place}param_offload": away,
        f"{place}optimizer_offload": away,
        f"{place}offload_policy": in_cpu_memory,
        f"{place}reshard_after_forward": _given_up,
        f"{place}fsdp_size": shard,
        f"{place}model_dtype": _of_weights,
        f"{place}dtype": _of_passes,
        f"{place}mixed_precision": lambda option, given: (
            same("not set") if option.is_off else lost("only a mapping with param_dtype is known")
        ),
        f"{place}mixed_precision.param_dtype": _of_passes,
        f"{place}mixed_precision.reduce_dtype": _of_sums,
        f"{place}mixed_precision.buffer_dtype": _of_buffers,
    }


def _given_up(option: Option, given: Given) -> Outcome:
    """Handles what becomes of a block's weights after its forward pass."""
    if not option.is_off:
        return same("a block's weights are given up after its forward pass, as they are here")
    return lost(
        "a block's weights are always given up after its forward pass; with --backend deepspeed --backend.zero-stage 2 none are"
    )


def _of_weights(option: Option, given: Given) -> Outcome:
    if option.is_off:
        return same("float32, as it is here")
    known = {**_TYPES, "fp16": "float16", "float16": "float16"}
    if option.value in known:
        return to({"actor.dtype": known[option.value]})
    return lost("types here: float32, bfloat16, float16")


def _of_passes(option: Option, given: Given) -> Outcome:
    if (kind := _TYPES.get(option.value)) is None:
        return lost("the weights of passes are bf16 or fp32")
    return to({**FSDP, "backend.precision": _PRECISIONS[kind]})


def _of_sums(option: Option, given: Given) -> Outcome:
    return same("float32, as it is here") if _TYPES.get(option.value) == "float32" else lost("gradients are summed in float32")


def _of_buffers(option: Option, given: Given) -> Outcome:
    return same("as the model has them") if _TYPES.get(option.value) == "float32" else lost("buffers have the model's types")
