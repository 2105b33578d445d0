"""One role trained by DeepSpeed: passes, steps, checkpoints and weights in pieces."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_host.backends.torch_backend import decayed_groups, gradient_norm, learning_rate
from rlhf_host.backends.weights import chunked, in_buckets, named_weights
from rlhf_host.distributed.deepspeed.checkpoints import SHAPE, TAG, convert, data_only, read_shape
from rlhf_host.distributed.deepspeed.plugin import DeepSpeed
from rlhf_host.distributed.deepspeed.setup import configuration, enter_group, library, on_device, refuse_splits
from rlhf_host.distributed.deepspeed.sharded_weights import split_as_read
from rlhf_host.distributed.split.gathered import merged_units, named_buffers
from rlhf_host.distributed.split.packed import run_through
from rlhf_host.distributed.split.parking import Parking, Parks, distinct, tensors_in
from rlhf_host.distributed.split.shards import deal, saved_bytes, share_writer
from rlhf_host.errors import RunError, UserError, in_one_line
from rlhf_host.models.adapters import has_adapters, merged_weights
from rlhf_host.models.loading import copy_model
from rlhf_host.models.quantized import is_quantized
from rlhf_host.protocols import BackendStart, Buckets, StepResult, Tensors, Writer
from rlhf_host.records.torch_files import OTHER, more_than_data

SHARDS = ("ds_tensor", "ds_secondary_tensor")
"""Attributes of a parameter that hold this process's piece of it; others of DeepSpeed's belong to the optimizer."""
COPIED_BYTES = 2**28
"""Size of the pieces in which a model is gathered to be saved."""


class DeepSpeedBackend(Parks):
    """One role's DeepSpeed engine.

    DeepSpeed averages gradients over ranks, and losses are shares of the whole batch's: each loss is multiplied by the number
    of ranks, so that the average is the sum. At the start, every rank has the same whole model, of which stage 3 keeps a piece, or
    stage 3 reads its pieces. torch's default process group must be that of ``start.ranks``.
    """

    def __init__(self, plugin: DeepSpeed, start: BackendStart):
        self.device = start.device or next(start.model.parameters()).device
        options = on_device(plugin.options, self.device)
        self.options, self.ranks, self.model, self.role = options, start.ranks, start.model, start.role
        self.total_updates = start.total_updates
        self.updates = 0
        self.lr = start.role.peak_lr
        self.exact = options.precision == "fp32"
        self._parking = Parking(self.device)
        adapts, quantized = has_adapters(self.model), is_quantized(self.model)
        plugin.refuse(self.device.type, self.ranks.size, adapts=adapts, quantized=quantized)
        refuse_splits(options, self.ranks, self.model)
        deepspeed = library(self.device)
        enter_group(self.ranks, self.device)
        settings, head = configuration(options, self.role), start.head
        if start.weights is not None:
            with contextlib.redirect_stdout(sys.stderr):
                head = split_as_read(deepspeed, start, settings, options.precision)
        passes = Passes(start.compute)
        self._head = passes.head
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        with contextlib.redirect_stdout(sys.stderr):
            self.engine, *_ = deepspeed.initialize(model=passes, optimizer=self._optimizer(deepspeed), config=settings)
        if options.autotp_size > 1:
            self.engine.first_dataloader_check.remove()  # would send the first pass's function to other ranks
        if options.zero_stage == 3:
            for parameter in head:
                deepspeed.zero.register_external_parameter(passes.head, parameter)

    def run_pass(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        self._refuse_away()
        return run_through(self.engine, compute, *inputs)

    def run_head(self, compute: Callable[..., Tensors], *inputs: Tensor) -> Tensors:
        return run_through(self._head, compute, *inputs)

    def _optimizer(self, deepspeed: Any) -> torch.optim.Optimizer:
        groups = decayed_groups(self.parameters, self.role.weight_decay, _dims)
        settings: dict[str, Any] = {"lr": self.role.peak_lr, "betas": self.role.betas, "eps": self.role.adam_eps}
        if self.options.optimizer == "torch":
            return torch.optim.AdamW(groups, fused=True, **settings)
        on_cpu = self.device.type == "cpu" or self.options.offload_optimizer == "cpu"
        kind = deepspeed.ops.adam.DeepSpeedCPUAdam if on_cpu else deepspeed.ops.adam.FusedAdam
        return kind(groups, **settings, **({"adamw_mode": True} if on_cpu else {"adam_w_mode": True}))

    @property
    def _averaged(self) -> int:
        """Number of processes that DeepSpeed averages gradients over. With AutoTP those of one rank count once."""
        return self.ranks.size if self.ranks.slices is None else self.ranks.processes

    def backward(self, loss: Tensor, last: bool = True) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self._averaged, scale_wrt_gas=False)

    def step(self) -> StepResult:
        """Clips, then makes a step, unless a gradient is not finite: then weights and schedule do not change."""
        self._refuse_away()
        rate = learning_rate(self.role, self.updates, self.total_updates, self.lr)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        # At stage 0 DeepSpeed neither reports the norm nor looks at it.
        norm = float(gradient_norm(self.parameters)) if self.options.zero_stage == 0 else None
        if norm is not None and not math.isfinite(norm):
            self.discard()
            return StepResult(norm, rate, applied=False)
        self.engine.step()
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        applied = bool(self.engine.was_step_applied())
        if not applied:
            self.discard()  # in 16 bits with optimizer state in CPU memory DeepSpeed keeps what has overflowed
        self.updates += applied
        return StepResult(norm, rate, applied=applied)

    def discard(self) -> None:
        """Drops gradients as DeepSpeed does after an overflow, but without touching the loss scale."""
        self._refuse_away()
        optimizer = self.engine.optimizer
        if self.options.zero_stage == 0:
            self.engine.zero_grad()
            return
        optimizer.zero_grad(set_to_none=True)
        if self.options.zero_stage == 3:
            optimizer._pre_step()
        elif hasattr(optimizer, "averaged_gradients"):  # not with bf16 at stage 1, which has an optimizer of its own
            optimizer.micro_step_id = -1
            for gradients in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
                gradients.update(dict.fromkeys(gradients))
        if self.options.offload_optimizer == "cpu":
            optimizer.reset_cpu_buffers()

    @property
    def _shape(self) -> dict[str, Any]:
        return self.options.model_dump(include={"zero_stage", "precision", "autotp_size"}) | {"ranks": self.ranks.size}

    def save(self, directory: Path) -> None:
        """Writes DeepSpeed's own checkpoint, a file per rank, at once: training waits for its writer."""
        state = {"updates": self.updates, "universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
        with self._here():
            self.engine.save_checkpoint(str(directory), tag=TAG, client_state=state)
        if self._first:
            (directory / SHAPE).write_text(json.dumps(self._shape))

    def load(self, directory: Path) -> None:
        """Loads a checkpoint. Raises ``UserError`` if another backend or precision wrote it, or if it holds more than data.

        Another number of ranks is accepted, and stage 1 for 2 or 2 for 1: the checkpoint is then converted to DeepSpeed's
        universal form, which takes its size once more on the disk. If AutoTP splits layers, nothing may differ.
        """
        self._refuse_away()
        saved = read_shape(directory)
        for name in self._fixed(saved):
            if saved.get(name) != self._shape[name]:
                raise UserError(
                    f"{directory} was written with {name} {saved.get(name)}, this run has {self._shape[name]}: resume with the same"
                )
        optimizer = self.engine.optimizer
        settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        try:
            with data_only():
                if saved == self._shape or self.options.zero_stage == 0:
                    path, state = self.engine.load_checkpoint(str(directory), tag=TAG)
                else:
                    path, state = self._load_converted(directory)
        except pickle.UnpicklingError as error:
            raise more_than_data(directory) from error
        except (UserError, RunError):
            raise
        except Exception as error:
            raise RunError(f"DeepSpeed cannot read {directory}: {in_one_line(error)[:500]}; {OTHER}") from error
        if path is None:
            raise RunError(f"DeepSpeed found no checkpoint in {directory}")
        # What this run's configuration says, not the one that wrote the checkpoint.
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        if hasattr(optimizer, "clip_grad"):
            optimizer.clip_grad = self.role.max_grad_norm
        self.updates = int(state["updates"])

    def _fixed(self, saved: dict[str, Any]) -> list[str]:
        """Returns the properties of a checkpoint that must be this run's."""
        if self.options.autotp_size > 1:
            return list(self._shape)
        alike = {saved.get("zero_stage"), self.options.zero_stage} <= {1, 2}
        return ["precision", "autotp_size"] if alike else ["zero_stage", "precision", "autotp_size"]

    def _load_converted(self, directory: Path) -> tuple[Any, Any]:
        converted = directory / ".universal"
        problem: str | None = None
        if self.ranks.rank == 0:
            shutil.rmtree(converted, ignore_errors=True)
            try:
                convert(directory / TAG, converted / TAG)
            except pickle.UnpicklingError:
                problem = ""
            except Exception as error:
                problem = in_one_line(error)
        problem = self.ranks.gather(problem)[0]
        if problem == "":
            raise more_than_data(directory)
        if problem is not None:
            raise RunError(f"{directory} cannot be converted for {self.ranks.size} ranks: {problem}")
        self.engine._config.load_universal_checkpoint = True
        try:
            loaded = self.engine.load_checkpoint(str(converted), tag=TAG)
        finally:
            self.engine._config.load_universal_checkpoint = False
            self.ranks.gather(None)
            if self.ranks.rank == 0:
                shutil.rmtree(converted, ignore_errors=True)
        # Stage 3 gives all groups one and the same counter, which every group's step then advances.
        for state in self.engine.optimizer.optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"] = state["step"].clone()
        return loaded

    def save_model(self, directory: Path) -> Writer | None:
        """Copies the model to host memory, every process its share, of which it writes a file; an adapter is rank 0's alone."""
        model: Any = self.model
        with self._here():
            if has_adapters(model):
                with self._whole(self.parameters):
                    return copy_model(model, directory) if self._first else None
            owners = deal(saved_bytes(model), dist.get_world_size())
            mine = {name for name, owner in owners.items() if owner == dist.get_rank()}
            buckets = self._buckets(COPIED_BYTES, mine.__contains__)
            share = {name: tensor.to("cpu", copy=True) for bucket in buckets for name, tensor in bucket if name in mine}
            if dist.get_world_size() == 1:
                return copy_model(model, directory, share)
            return share_writer(model, directory, share, self.ranks)

    def weights(self, bucket_bytes: int, everywhere: bool = False) -> Buckets:
        """Yields all weights in buckets; if they are in pieces, one bucket is whole at a time."""
        with self._here():
            yield from self._buckets(bucket_bytes, lambda name: everywhere or self._first)

    def _buckets(self, bucket_bytes: int, keeps: Callable[[str], bool]) -> Buckets:
        if self.options.autotp_size > 1:
            return in_buckets(_joined(self.model), bucket_bytes)
        if self.options.zero_stage == 3:
            return self._fetched(bucket_bytes, keeps)
        return in_buckets(named_weights(self.model), bucket_bytes)

    def _fetched(self, bucket_bytes: int, keeps: Callable[[str], bool]) -> Buckets:
        """Fetches weights under stage 3: all ranks together, of which this one keeps those with such a name."""
        names: dict[Any, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        units = merged_units(self.model, names)
        for piece in chunked(units, lambda unit: sum(each.ds_numel * each.element_size() for each in unit), bucket_bytes):
            parameters = [parameter for unit in piece for parameter in unit]
            with self._whole(parameters):
                # One copy under every name of a parameter.
                kept = [(names[each][0], each.detach()) for each in parameters if any(map(keeps, names[each]))]
                copies = [(name, weight.clone()) for name, weight in merged_weights(self.model, kept)]
            others = {names[each][0]: names[each][1:] for each in parameters}
            yield [(other, weight) for name, weight in copies for other in (name, *others.get(name, ()))]
        if buffers := named_buffers(self.model):
            yield [(name, buffer) for name, buffer in buffers if keeps(name)]

    def _whole(self, parameters: list[Any]) -> contextlib.AbstractContextManager[Any]:
        """Makes these weights whole on every rank, inside the block."""
        if self.options.zero_stage < 3:
            return contextlib.nullcontext()
        import deepspeed

        gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(parameters)
        return gathered

    @property
    def _first(self) -> bool:
        """True if this process writes for all; with AutoTP several processes have rank 0."""
        return dist.get_rank() == 0

    def _held(self) -> Iterator[Tensor]:
        """Returns weights and optimizer state, or the latter alone (``offload_while_sampling``)."""
        if self.options.zero_stage == 3:
            self.engine.optimizer.empty_partition_cache()
        parameters = list(self.model.parameters())
        weights = [[each.data, *(vars(each).get(shard) for shard in SHARDS)] for each in parameters]
        optimizer = self.engine.optimizer
        states = [vars(each) for each in (optimizer, getattr(optimizer, "optimizer", None), *parameters) if each is not None]
        spared = distinct(tensors_in(weights)) if self.options.offload_while_sampling == "optimizer" else {}
        found = tensors_in([weights, states])
        return (tensor for tensor in found if tensor.untyped_storage().data_ptr() not in spared)


def _dims(weight: Any) -> int:
    """Returns the number of dimensions of a parameter, which may be split already."""
    return len(getattr(weight, "ds_shape", weight.shape))


class Passes(nn.Module):
    """Model for DeepSpeed: its pass is the function it is called with."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.head = _Head()

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


class _Head(nn.Module):
    """Module where the head's weights are used; they are its external parameters."""

    def forward(self, compute: Callable[[Tensor], Tensor], places: Tensor) -> Tensor:
        return compute(places)


def _joined(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a model that AutoTP has split, one module's at a time."""
    from deepspeed.module_inject.layers import GatherReplacedLayerParams

    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix, recurse=False))
        with GatherReplacedLayerParams(list(own.values()), module):
            copies = [(name, parameter.detach().clone()) for name, parameter in own.items()]
        yield from copies
    yield from named_buffers(model)
