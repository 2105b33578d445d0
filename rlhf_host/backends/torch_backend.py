"""An optimizer over one process or several, and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.backends.optimizers import ADAMW, MUON, arguments_of, make_optimizer, outside_blocks
from rlhf_host.backends.weights import in_buckets, named_weights
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.models.dtypes import master_of
from rlhf_host.models.loading import copy_model, host_copy
from rlhf_host.models.masters import renew
from rlhf_host.protocols import BackendStart, Buckets, StepResult, Tensors, Writer
from rlhf_host.records.torch_files import OTHER, load_data


def learning_rate(role: RoleConfig, update: int, total_updates: int, peak: float) -> float:
    """Returns the rate of update ``update`` (from 0): linear warm-up to ``peak``, then the schedule down to
    ``min_lr_ratio·peak``.
    """
    if update < role.warmup_steps:
        return peak * (update + 1) / role.warmup_steps
    if role.schedule == "constant":
        return peak
    span = max(1, total_updates - role.warmup_steps)
    progress = min(1.0, (update - role.warmup_steps) / span)
    shape = 1.0 - progress if role.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (role.min_lr_ratio + (1.0 - role.min_lr_ratio) * shape)


def decayed_groups(
    parameters: list[nn.Parameter], weight_decay: float, dims: Callable[[nn.Parameter], int] = nn.Parameter.dim
) -> list[dict[str, Any]]:
    """Returns optimizer groups. Norms and biases are vectors and are never decayed.

    Args:
        dims: number of dimensions of a parameter, where a process does not hold it whole.
    """
    decayed = [p for p in parameters if dims(p) > 1]
    plain = [p for p in parameters if dims(p) <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Returns the norm of all gradients together, before clipping."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


class TorchBackend:
    """Backend for ``start.model``, whose trainable parameters are fp32, or have fp32 masters: bf16 weights would lose small
    updates.
    """

    def __init__(self, start: BackendStart, optimizer: str = ADAMW, arguments: Sequence[str] = ()):
        self.ranks, self.model, self.role, self.total_updates = start.ranks, start.model, start.role, start.total_updates
        self.updates = 0
        self.lr = start.role.peak_lr
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.parameters: list[Any] = [master_of(parameter) for parameter in trained]
        self._rounded = [parameter for parameter in trained if master_of(parameter) is not parameter]
        self._adding, self.exact = False, not self._rounded
        for parameter in self._rounded:
            parameter.register_post_accumulate_grad_hook(self._add)
        groups = decayed_groups(self.parameters, self.role.weight_decay)
        outside = set(map(master_of, outside_blocks(self.model))) if optimizer == MUON else set()
        self.optimizer = make_optimizer(optimizer, arguments_of(arguments), groups, self.role, self.lr, outside)

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return compute(*inputs)

    run_head = run_pass

    def backward(self, loss: Tensor, last: bool = True) -> None:
        self._adding = True
        loss.backward()
        self._adding = False

    def _add(self, weight: Any) -> None:
        """Adds a gradient in 16 bits to that of the master, in float32, as soon as a backward pass has it: all of them together
        would be another copy of the model.
        """
        if self._adding:
            gradient, master, weight.grad = weight.grad, weight.master, None
            master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)

    def step(self) -> StepResult:
        """Clips, then makes a step, unless a gradient is not finite: then weights and schedule do not change."""
        rate = learning_rate(self.role, self.updates, self.total_updates, self.lr)
        self._sum_gradients()
        norm_tensor = gradient_norm(self.parameters)
        norm = float(norm_tensor)
        if not math.isfinite(norm):
            self.discard()
            return StepResult(norm, rate, applied=False)
        if self.role.max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self.parameters, self.role.max_grad_norm, norm_tensor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        renew(self._rounded)
        self.updates += 1
        self.discard()
        return StepResult(norm, rate, applied=True)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        self._sum_gradients()
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and (gradient := master_of(weight).grad) is not None:
                yield name, gradient

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _sum_gradients(self) -> None:
        if self.ranks.processes == 1:
            return
        # A parameter that no rank used keeps no gradient, so that the optimizer leaves it alone.
        used = torch.tensor([p.grad is not None for p in self.parameters], dtype=torch.int32, device=self.parameters[0].device)
        self.ranks.sum_([used])
        summed = [p for p, count in zip(self.parameters, used.tolist(), strict=True) if count]
        for parameter in summed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.ranks.sum_([p.grad for p in summed if p.grad is not None])

    def save(self, directory: Path) -> Writer | None:
        if self.ranks.process:
            return None
        state = {"optimizer": host_copy(self.optimizer.state_dict()), "updates": self.updates}
        return partial(torch.save, state, directory / "optimizer.pt")

    def load(self, directory: Path) -> None:
        if not (path := directory / "optimizer.pt").exists():
            raise UserError(f"{directory} was not written by the torch backend: resume with the backend it was started with")
        state = load_data(path, {"optimizer": dict, "updates": int})
        settings = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} is of another optimizer: {' '.join(str(error).split())}; {OTHER}") from error
        for parameter, kept in self.optimizer.state.items():
            if (average := kept.get("exp_avg")) is not None and average.shape != parameter.shape:
                shapes = f"{list(average.shape)} in place of {list(parameter.shape)}"
                raise UserError(f"{path} is of another model: it has averages of shape {shapes}; {OTHER}")
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)  # what this run's configuration says, not the one that wrote the checkpoint
        self.updates = int(state["updates"])

    def save_model(self, directory: Path) -> Writer | None:
        return None if self.ranks.process else copy_model(self.model, directory)  # type: ignore[arg-type]

    def weights(self, bucket_bytes: int, everywhere: bool = False) -> Buckets:
        return in_buckets(named_weights(self.model), bucket_bytes)

    def offload(self) -> None:
        """Does nothing: everything stays on the device."""

    def reload(self) -> None:
        """Reverses ``offload``."""
