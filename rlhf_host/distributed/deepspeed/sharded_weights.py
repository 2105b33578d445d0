"""ZeRO stage 3 of a model whose weights are still in their files: split block by block, as they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_host.protocols import BackendStart

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def split_as_read(deepspeed: Any, start: BackendStart, settings: dict[str, Any], precision: str) -> tuple[nn.Parameter, ...]:
    """Gives a model whose parameters are on ``meta`` its weights, of which every rank keeps its piece.

    Args:
        settings: DeepSpeed's configuration.
        precision: of passes. DeepSpeed wants the weights of a model that is split already in this type.

    Returns:
        The parameters of ``start.head``, which are others now.
    """
    assert start.weights is not None
    model, homes = start.model, dict[nn.Parameter, list[tuple[nn.Module, str]]]()
    for module in {*model.modules(), *start.compute.modules()}:
        for own, weight in module._parameters.items():
            if weight is not None:
                homes.setdefault(weight, []).append((module, own))
    heads = {weight: name for name, weight in model.named_parameters() if any(weight is each for each in start.head)}

    def split(weights: list[nn.Parameter]) -> None:
        # The group of a second copy is made once per process (zero_hpz_partition_size).
        copies = deepspeed.utils.groups._get_zero_param_intra_parallel_group()
        deepspeed.zero.Init(module=nn.ParameterList(weights), config_dict_or_path=settings, zero_param_parallel_group=copies)

    for bucket in start.weights():
        weights = []
        while bucket:  # so that none is held while the next ones are read
            name, tensor = bucket.pop()
            absent = model.get_parameter(name)
            placed = tensor.to(start.device, DTYPES.get(precision, absent.dtype))
            weights.append(nn.Parameter(placed, requires_grad=absent.requires_grad))
            for module, own in homes[absent]:
                module._parameters[own] = weights[-1]
            del tensor, placed
        split(weights)
    rest = [weight for weight in model.parameters() if not hasattr(weight, "ds_id")]
    for weight in rest:
        weight.data = weight.data.to(DTYPES.get(precision, weight.dtype))
    split(rest)
    return tuple(model.get_parameter(heads[weight]) for weight in start.head)
