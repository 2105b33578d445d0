"""Compiles every kernel as its launches ask for it, for GPUs that need not be there. Arguments: their compute capabilities."""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from rlhf_kernels_triton import kernels, ops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64"}
compiled: list[str] = []


class Compiler:
    """In place of a kernel: a launch compiles it and computes nothing."""

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return self.compile

    def compile(self, *arguments: Any, num_warps: int = 4, **options: Any) -> None:
        given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | options
        fixed = {(self.kernel.arg_names.index(name),): value for name, value in options.items()}
        signature = {name: "constexpr" if name in options else kind(given[name]) for name in self.kernel.arg_names}
        for capability in map(int, sys.argv[1:]):
            source = ASTSource(self.kernel, signature, fixed)
            triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
        compiled.append(self.kernel.__name__)


def kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def main() -> None:
    for name in ("_norm", "_norm_backward", "_rotary", "_swiglu", "_swiglu_backward", "_logprobs", "_logprobs_backward"):
        setattr(kernels, name, Compiler(getattr(kernels, name)))
    x, low, weight = torch.zeros(8, 2048), torch.zeros(8, 2048, dtype=torch.bfloat16), torch.zeros(2048)
    y, total, rstd = ops.rms_norm(x, low, weight, 1e-6, 0.0, True, torch.bfloat16)
    ops.rms_norm_backward(y, total, x, weight, rstd, 0.0, True, torch.bfloat16, True)
    q, k = (torch.zeros(2, 4, heads, 128, dtype=torch.bfloat16).transpose(1, 2) for heads in (16, 2))
    ops.rotary(q, k, torch.zeros(2, 4, 128), torch.zeros(2, 4, 128), False, torch.bfloat16)
    ops.swiglu(low, low)
    ops.swiglu_backward(low, low, low)
    z, targets = torch.zeros(3, 9001, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    logprobs, entropy, lses = ops.token_logprobs(z, targets, 1.0, 20.0, 0.7, True)
    ops.token_logprobs_backward(z, targets, lses, entropy, logprobs, entropy, 1.0, 20.0, 0.7)
    print(*compiled)


if __name__ == "__main__":
    main()
