"""A model that is not trained, split by ZeRO stage 3."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from torch import Tensor

from rlhf_host.distributed.deepspeed.backend import Passes
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.deepspeed.setup import configuration, enter_group, library
from rlhf_host.distributed.deepspeed.sharded_weights import DTYPES, split_as_read
from rlhf_host.distributed.split.packed import run_through
from rlhf_host.errors import UserError
from rlhf_host.protocols import BackendStart, Tensors


class DeepSpeedFrozen:
    """A role's DeepSpeed engine without an optimizer. Weights keep their types, so passes compute as they would over the whole
    model.
    """

    exact = True

    def __init__(self, options: DeepSpeed.Options, start: BackendStart):
        device = start.device or next(start.model.parameters()).device
        deepspeed = library(device)
        enter_group(start.ranks, device)
        kinds, head = {weight.dtype for weight in start.model.parameters()}, start.head
        precision = next((name for name, dtype in DTYPES.items() if kinds == {dtype}), "fp32")
        if precision == "fp16" and device.type == "cpu":
            raise UserError(
                f"DeepSpeed splits no float16 weights on CPUs, as {start.role.model!r} has: set its dtype to bfloat16"
            )
        exact = {"zero_quantized_weights": False, "zero_quantized_gradients": False}
        options = options.model_copy(update={"precision": precision, "offload_optimizer": "none", **exact})
        settings = configuration(options, start.role)
        with contextlib.redirect_stdout(sys.stderr):
            if start.weights is not None:
                head = split_as_read(deepspeed, start, settings, precision)
            passes = Passes(start.compute)
            self._engine, *_ = deepspeed.initialize(model=passes, config=settings)
        self._head = passes.head
        for parameter in head:
            deepspeed.zero.register_external_parameter(passes.head, parameter)

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return run_through(self._engine, compute, *inputs)

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return run_through(self._head, compute, *inputs)
