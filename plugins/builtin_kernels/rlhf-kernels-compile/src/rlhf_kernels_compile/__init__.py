"""Decoder blocks compiled by ``torch.compile``, used where they are measured to be faster than the plain path."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rlhf_kernels import choose

from rlhf_host import functional
from rlhf_host.protocols import Traits, Use

if TYPE_CHECKING:
    from torch import nn


class CompileOptions(BaseModel):
    """Arguments of ``torch.compile``."""

    model_config = ConfigDict(extra="forbid")

    backend: Literal["inductor", "aot_eager", "eager"] = Field(
        "inductor", description="what compiles; aot_eager and eager only trace, to find faults"
    )
    mode: Literal["default", "max-autotune-no-cudagraphs"] = Field(
        "default", description="of inductor; max-autotune-no-cudagraphs tries several kernels for each product"
    )

    @model_validator(mode="after")
    def _only_inductor_has_modes(self) -> CompileOptions:
        if self.mode != "default" and self.backend != "inductor":
            raise ValueError(f"backend {self.backend} has no mode {self.mode}: leave mode out, or set backend to inductor")
        return self


class CompiledBlocks:
    """Blocks compiled by torch.compile, where measured to be faster; only with `--kernels compile`."""

    Options = CompileOptions
    traits = Traits(only_by_name=True)
    choose = staticmethod(partial(choose, faster=True))

    def __init__(self, options: CompileOptions) -> None:
        self.options = options

    def unsuited(self, model: nn.Module, use: Use) -> str | None:
        from rlhf_kernels_compile.suited import unsuited

        return unsuited(model, use, self.options.backend)

    def twin(self, model: nn.Module, use: Use) -> nn.Module:
        """Returns the model's modules around its parameters, with compiled blocks."""
        from rlhf_kernels_compile.blocks import compile_blocks

        return compile_blocks(functional.twin(model), self.options.backend, self.options.mode)
