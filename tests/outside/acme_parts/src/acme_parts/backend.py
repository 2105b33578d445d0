"""The backend ``sgd``: plain gradient descent."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlhf_host import UserError
from rlhf_host.protocols import Backend, BackendStart, BackendTraits, Buckets, StepResult, Tensors


class Sgd:
    """No momentum, no state but the number of the update."""

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        scale: float = Field(1.0, gt=0, description="factor of every learning rate")
        pretend_sharded: bool = Field(False, description="say that weights are in pieces")

    def __init__(self, options: Options):
        self.options = options

    @property
    def traits(self) -> BackendTraits:
        return BackendTraits(sharded=self.options.pretend_sharded)

    def start(self, start: BackendStart) -> Backend:
        return Descent(self.options.scale, start)


class Descent:
    exact = True

    def __init__(self, scale: float, start: BackendStart):
        self.model: Any = start.model
        self.role, self.ranks, self.total, self.scale = start.role, start.ranks, start.total_updates, scale
        self.lr, self.updates = start.role.peak_lr, 0
        self.trained = [weight for weight in self.model.parameters() if weight.requires_grad]

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Any) -> Tensors:
        return compute(*inputs)

    run_head = run_pass

    def backward(self, loss: Any, last: bool = True) -> None:
        loss.backward()

    def step(self) -> StepResult:
        import torch

        from rlhf_host.backends.torch_backend import learning_rate

        rate = learning_rate(self.role, self.updates, self.total, self.lr)
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in self.trained]
        self.ranks.sum_(gradients)
        norm = float(torch.nn.utils.get_total_norm(gradients))
        self.discard()
        if not math.isfinite(norm):
            return StepResult(norm, rate, applied=False)
        clip = min(1.0, self.role.max_grad_norm / (norm + 1e-6)) if self.role.max_grad_norm > 0 else 1.0
        with torch.no_grad():
            for weight, gradient in zip(self.trained, gradients, strict=True):
                weight.sub_(gradient, alpha=rate * self.scale * clip)
        self.updates += 1
        return StepResult(norm, rate, applied=True)

    def discard(self) -> None:
        for weight in self.trained:
            weight.grad = None

    def save(self, directory: Path) -> None:
        if self.ranks.rank == 0:
            (directory / "sgd.json").write_text(json.dumps({"updates": self.updates}))

    def load(self, directory: Path) -> None:
        if not (directory / "sgd.json").exists():
            raise UserError(f"{directory} was not written by the backend sgd")
        self.updates = json.loads((directory / "sgd.json").read_text())["updates"]

    def save_model(self, directory: Path) -> None:
        if self.ranks.rank == 0:
            self.model.save_pretrained(directory)

    def weights(self, bucket_bytes: int) -> Buckets:
        from rlhf_host.backends.weights import in_buckets, named_weights

        return in_buckets(named_weights(self.model), bucket_bytes)

    def offload(self) -> None:
        pass

    def reload(self) -> None:
        pass
