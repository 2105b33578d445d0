"""One role trained under FSDP2: passes, steps, checkpoints and weights in pieces."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlhf_backend_fsdp import FSDP, QUANTIZED, checkpoints
from rlhf_backend_fsdp.splitting import gather_no_more, mesh_of, precision_on, split, whole
from rlhf_host import UserError
from rlhf_host.backends import (
    arguments_of,
    chunked,
    copy_model,
    decayed_groups,
    has_adapters,
    is_quantized,
    learning_rate,
    make_optimizer,
    merged_weights,
)
from rlhf_host.distributed import (
    Parking,
    Parks,
    deal,
    merged_units,
    named_buffers,
    run_through,
    saved_bytes,
    share_writer,
)
from rlhf_host.protocols import BackendStart, Buckets, StepResult, Tensors, Writer

COPIED_BYTES = 2**28
"""Size of the pieces in which a model is gathered to be saved."""


class FSDPBackend(Parks):
    """One role's split model, and an optimizer over this process's pieces of it.

    Losses are shares of the whole batch's, so gradients are summed over ranks. At the start, every rank has the same whole model,
    or reads its pieces. torch's default process group must be that of ``start.ranks``.
    """

    def __init__(self, options: FSDP.Options, start: BackendStart):
        self.options, self.ranks, self.model, self.role = options, start.ranks, start.model, start.role
        self.total_updates, self.updates, self.lr = start.total_updates, 0, start.role.peak_lr
        self.device = start.device or next(start.model.parameters()).device
        self.precision = precision_on(self.device, options.precision)
        self.exact = self.precision == "fp32"
        self._parking = Parking(self.device)
        if is_quantized(self.model):
            raise UserError(QUANTIZED)
        mesh = mesh_of(self.device, self.ranks, options.shard)
        self._copies = self.ranks.processes // mesh.size(-1)
        # Checkpoints are written on a thread of their own, beside passes: their collectives need a group of their own.
        self._writers = dist.new_group(backend="gloo")
        self._names: dict[str, list[str]] = {}
        """A weight's first name → all of them."""
        for names in _names(self.model):
            self._names[names[0]] = names
        self._passes, self._spreads = split(
            start,
            mesh,
            self.precision,
            self.device,
            offload=options.offload == "cpu",
            expert_parallel=options.expert_parallel,
        )
        self._weights: dict[str, Any] = dict(self.model.named_parameters())
        self._pieces = {name: nn.Parameter(_piece(each)) for name, each in self._weights.items() if each.requires_grad}
        """This process's pieces of what is trained: the optimizer sees plain tensors."""
        groups = decayed_groups(list(self._pieces.values()), self.role.weight_decay)
        self._arguments = arguments_of(options.optimizer_args)
        self.optimizer = make_optimizer(options.optimizer, self._arguments, groups, self.role, self.lr, set())
        for piece in self._pieces.values() if options.optimizer == "AdamW" and not self._arguments else ():
            averages = {name: torch.zeros_like(piece) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[piece] = {"step": torch.zeros((), device=piece.device), **averages}

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        self._refuse_away()
        results = run_through(self._passes, compute, *inputs)
        if not torch.is_grad_enabled():
            self._split()  # no backward pass will
        return results

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return compute(*inputs)  # its weights are whole during a pass, like all that are in no block

    def backward(self, loss: Tensor, last: bool = True) -> None:
        loss.backward()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clips, then makes a step, unless a gradient is not finite: then weights and schedule do not change."""
        self._refuse_away()
        self._split()
        rate = learning_rate(self.role, self.updates, self.total_updates, self.lr)
        for name, piece in self._pieces.items():
            weight = self._weights[name]
            piece.data, piece.grad = _piece(weight), None if weight.grad is None else _piece(weight.grad)
        gradients = [piece.grad for piece in self._pieces.values() if piece.grad is not None]
        norm = self._norm(gradients)
        if not math.isfinite(norm):
            self.discard()
            return StepResult(norm, rate, applied=False)
        if self.role.max_grad_norm > 0 and (factor := self.role.max_grad_norm / (norm + 1e-6)) < 1.0:
            for gradient in gradients:
                gradient.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        self.discard()
        return StepResult(norm, rate, applied=True)

    def _norm(self, gradients: list[Tensor]) -> float:
        """Returns the norm of all ranks' pieces together."""
        squared = nn.utils.get_total_norm(gradients).double().square().reshape(1).to(self.device)
        self.ranks.sum_([squared])
        return math.sqrt(float(squared) / self._copies)

    def discard(self) -> None:
        for weight in (*self._weights.values(), *self._pieces.values()):
            weight.grad = None

    def save(self, directory: Path) -> Writer:
        """Copies the optimizer's state to host memory. What it returns is collective, in a group of its own."""
        with self._here():
            state = {name: checkpoints.host_copy(tensor) for name, tensor in self._state().items()}
        return checkpoints.writer(directory, state, self._shape | {"updates": self.updates}, self._writers)

    def load(self, directory: Path) -> None:
        """Loads a checkpoint, of any number of ranks. Raises ``UserError`` if another backend, precision or model wrote it, or if
        it holds more than data.
        """
        self._refuse_away()
        checkpoints.check_shape(directory, self._shape)
        if self.options.optimizer != "AdamW" or self._arguments:
            self._make_state(checkpoints.names(directory))
        self.updates = checkpoints.load(directory, self._state(), self._shape, self._writers)

    @property
    def _shape(self) -> dict[str, Any]:
        return {"precision": self.precision, "optimizer": self.options.optimizer}

    def _state(self) -> dict[str, Tensor]:
        """Returns the optimizer's state by names. Averages are split as their weights are."""
        state: dict[str, Tensor] = {}
        for name, piece in self._pieces.items():
            for key, value in self._kept(piece):
                state[f"{name}:{key}"] = self._spreads[name].around(value) if value.dim() else value
        return state

    def _kept(self, piece: Tensor) -> list[tuple[str, Tensor]]:
        """Returns the state of a piece; an optimizer without momentum, say, has None for it."""
        return [(key, value) for key, value in self.optimizer.state.get(piece, {}).items() if isinstance(value, Tensor)]

    def _make_state(self, saved: Collection[str]) -> None:
        """Makes, of what is saved, the state that the optimizer makes in its first step, to be read into."""
        other = nn.Parameter(torch.zeros(2, 3))
        other.grad = torch.ones_like(other)
        groups = [{"params": [other], "weight_decay": 0.0}]
        first = make_optimizer(self.options.optimizer, self._arguments, groups, self.role, self.lr, set())
        first.step()
        for name, piece in self._pieces.items():
            for key, value in first.state[other].items():
                if f"{name}:{key}" in saved and isinstance(value, Tensor):
                    self.optimizer.state[piece][key] = torch.zeros_like(piece) if value.dim() else torch.zeros_like(value)

    def save_model(self, directory: Path) -> Writer | None:
        """Copies the model to host memory, every process its share, of which it writes a file; an adapter is rank 0's alone."""
        model: Any = self.model
        with self._here():
            self._split()
            if has_adapters(model):
                with self._whole(list(self._pieces)):
                    return copy_model(model, directory) if self.ranks.process == 0 else None
            sizes = saved_bytes(model)
            owners = deal(sizes | {name: self._nbytes(name) for name in sizes.keys() & self._spreads}, self.ranks.processes)
            mine = {name for name, owner in owners.items() if owner == self.ranks.process}
            buckets = self._buckets(COPIED_BYTES, mine.__contains__)
            share = {name: tensor.to("cpu", copy=True) for bucket in buckets for name, tensor in bucket if name in mine}
        if self.ranks.processes == 1:
            return copy_model(model, directory, share)
        return share_writer(model, directory, share, self.ranks)

    def weights(self, bucket_bytes: int, everywhere: bool = False) -> Buckets:
        """Yields all weights in buckets, of which one is whole at a time."""
        with self._here():
            yield from self._buckets(bucket_bytes, lambda name: everywhere or self.ranks.process == 0)

    def _buckets(self, bucket_bytes: int, keeps: Callable[[str], bool]) -> Buckets:
        """Gathers weights: all ranks together, of which this one keeps those with such a name."""
        self._split()
        first = {weight: name for name, weight in self._weights.items()}
        units = [[first[weight] for weight in unit] for unit in merged_units(self.model, first)]
        for piece in chunked(units, lambda unit: sum(map(self._nbytes, unit)), bucket_bytes):
            names = [name for unit in piece for name in unit]
            with self._whole(names) as copies:
                kept = [(name, copies[name]) for name in names if any(map(keeps, self._names[name]))]
                bucket = list(merged_weights(self.model, kept))
            yield [(other, weight) for name, weight in bucket for other in (name, *self._names.get(name, ())[1:])]
            del copies, kept, bucket  # before the next ones are gathered
        if buffers := named_buffers(self.model):
            yield [(name, buffer) for name, buffer in buffers if keeps(name)]

    def _nbytes(self, name: str) -> int:
        """Returns the size of a whole weight."""
        return self._spreads[name].shape.numel() * self._weights[name].element_size()

    @contextlib.contextmanager
    def _whole(self, names: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        """Puts whole copies in the places of these weights, inside the block, and gives them by name. Collective."""
        copies = {name: whole(self._spreads[name].around(_piece(self._weights[name])), self.device) for name in names}
        try:
            for name, copy in copies.items():
                self._put(name, nn.Parameter(copy, requires_grad=self._weights[name].requires_grad))
            yield copies
        finally:
            for name in names:
                self._put(name, self._weights[name])

    def _put(self, name: str, weight: nn.Parameter) -> None:
        for each in self._names[name]:
            owner, _, own = each.rpartition(".")
            self.model.get_submodule(owner)._parameters[own] = weight

    def _split(self) -> None:
        """Gives up what is left whole of the last pass."""
        gather_no_more(self._passes)

    def _held(self) -> list[Tensor]:
        """Returns weights and optimizer state, or the latter alone (``offload_while_sampling``)."""
        self._split()
        weights = [] if self.options.offload_while_sampling == "optimizer" else map(_piece, self._weights.values())
        averages = (value for piece in self._pieces.values() for _, value in self._kept(piece) if value.dim())
        return [*weights, *averages]


def _names(model: nn.Module) -> list[list[str]]:
    """Returns the names of every weight."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(name)
    return list(names.values())


def _piece(tensor: Any) -> Tensor:
    """Returns this process's piece of a split tensor; it has the same memory."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()
