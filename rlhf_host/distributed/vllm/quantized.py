"""Weights that vLLM keeps in 8 bits: the ways of rounding, and the proof that layers multiply with what a sync brought.

Activations are quantized too, per token, as they come (W8A8). Embeddings, heads, norms and experts keep the engine's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.quantization.online.base import _ONLINE_LINEAR_METHODS
from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod, OnlineLinearBase, _is_tp_sharded
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    amax_for_tp_weight_quant,
    kInt8StaticChannelSym,
    weight_amax,
)
from vllm.model_executor.utils import replace_parameter

from rlhf_host.errors import RunError

PROBED = 8
"""Number of inputs of each layer whose weights are read back after a load."""
CLOSE = 1.1 * 2.0**-7
"""Relative difference of a weight that was read back. Layers answer in 16 bits, and vLLM's int8 kernel for CPUs drops bits twice,
2^-7 in all. Steps of float8 are larger, and so are those of int8 up to code 61; beyond, a code may be taken for the next.
"""
TIE = 2.0**-20
"""Relative distance from the middle of two steps within which either is right: dividing and multiplying differ there."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """A way of rounding the weights of a linear layer ``[N, K]``: ``w ≈ scale · code``, with a scale for each output ``N``."""

    largest: float
    """The largest code, that of ``max |w|``."""
    floats: bool
    """Codes are those of float8_e4m3fn; otherwise whole numbers."""
    least: float
    """Smallest ``max |w|`` that is used, so that an output whose weights are 0 has a scale."""

    def scale(self, layer: nn.Module, weight: Tensor) -> Tensor:
        """Returns the scales, float32 ``[N, 1]``; devices that share the inputs of a layer agree on them."""
        most = weight_amax(weight, dim=-1, keepdim=True)
        most = amax_for_tp_weight_quant(most, _is_tp_sharded(layer, reduces_output_dim=False))
        return most.float().clamp_min(self.least) / self.largest

    def code(self, scaled: Tensor) -> Tensor:
        """Returns ``w / scale``, rounded, in float32."""
        scaled = scaled.float().clamp(-self.largest, self.largest)
        return scaled.to(torch.float8_e4m3fn).float() if self.floats else scaled.round()


INT8 = Rounding(127.0, floats=False, least=1e-9)


class Int8OnlineLinearMethod(OnlineLinearBase):
    """Linear layers whose weights are rounded to int8 as they load, one scale for each output, for vLLM's own int8 kernels."""

    activation_quant_key = None

    def create_weights(self, layer: nn.Module, *arguments: Any, **attributes: Any) -> None:
        super().create_weights(layer, *arguments, **attributes)
        self.kernel = init_int8_linear_kernel(
            is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name=type(self).__name__
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight = layer.weight
        # Kept: on CPUs oneDNN reads the scales where they were made, and a reload copies them elsewhere and frees these.
        self.scale = scale = INT8.scale(layer, weight)
        replace_parameter(layer, "weight", INT8.code(weight / scale).to(torch.int8))
        replace_parameter(layer, "weight_scale", scale)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = None
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.kernel.apply_weights(layer, x, bias)


_ONLINE_LINEAR_METHODS.setdefault(kInt8StaticChannelSym, Int8OnlineLinearMethod)

ROUNDINGS: dict[type, Rounding] = {
    Fp8PtpcOnlineLinearMethod: Rounding(448.0, floats=True, least=1 / 512),
    Int8OnlineLinearMethod: INT8,
}
"""vLLM's method for a layer → how it rounds."""


class ReadBack:
    """Compares what quantized layers multiply with, in whatever form their kernels keep it, with the weights that came last.

    A layer's answer to an input of one 1 and zeros is a column of its weights. Some columns are compared, other ones after each
    load: a step of the optimizer moves some of any column's weights to another code.
    """

    def __init__(self, model: nn.Module):
        self.layers = {name: layer for name, layer in model.named_modules() if type(_method(layer)) in ROUNDINGS}
        self._expected: dict[str, tuple[Tensor, Tensor]] = {}
        """Layer → columns ``[P]``, and their weights, ``[2, N, P]``: two near a tie, else twice the same."""
        self._drawn = torch.Generator()
        for name, layer in self.layers.items():
            method = _method(layer)
            method.process_weights_after_loading = partial(self._process, method.process_weights_after_loading, name)

    def _process(self, process: Callable[[nn.Module], None], name: str, layer: Any) -> None:
        """Notes what is expected, while the layer has its weights in the engine's own type."""
        weight, rounding = layer.weight.detach(), ROUNDINGS[type(_method(layer))]
        columns = torch.randint(weight.shape[1], (PROBED,), generator=self._drawn).to(weight.device)
        scale = rounding.scale(layer, weight)
        scaled = weight[:, columns] / scale
        self._expected[name] = columns, torch.stack([rounding.code(scaled * near) for near in (1 - TIE, 1 + TIE)]) * scale
        process(layer)

    def check(self) -> None:
        """Raises ``RunError`` for a layer that multiplies with other weights than came since the last check."""
        expected, self._expected = self._expected, {}
        for name, layer in self.layers.items():
            if name not in expected:
                raise RunError(f"no weights came for {name}, which is quantized")
            columns, wanted = expected[name]
            inputs = torch.zeros(PROBED, layer.input_size_per_partition, dtype=layer.orig_dtype, device=columns.device)
            inputs[torch.arange(PROBED, device=columns.device), columns] = 1
            found, kind = _method(layer).apply(layer, inputs).T.float(), torch.finfo(layer.orig_dtype)
            # Below its smallest normal number a type has steps of one size: small codes of float8 are there in float16.
            wrong = int((~((found - wanted).abs() <= CLOSE * wanted.abs() + kind.smallest_normal * kind.eps).any(0)).sum())
            if wrong:
                raise RunError(
                    f"{name} does not multiply with the weights that came, quantized: {wrong} of {found.numel()} that were read"
                    " back differ"
                )


def _method(layer: nn.Module) -> Any:
    return getattr(layer, "quant_method", None)
