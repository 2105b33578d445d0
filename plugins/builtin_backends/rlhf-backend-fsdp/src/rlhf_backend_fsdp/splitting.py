"""A model split by FSDP2, and its tensors made whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from rlhf_backend_fsdp.experts import expert_mesh, keep_own
from rlhf_host import RunError, UserError
from rlhf_host.protocols import BackendStart, Buckets, Ranks

OTHERWISE = "choose --backend deepspeed, or --backend torch"


class Passes(nn.Module):
    """The root that FSDP2 splits: its pass is the function it is called with."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return compute(*inputs)


@dataclass(frozen=True)
class Spread:
    """A weight that is spread over ranks by its rows: those along each dimension of ``mesh`` share, in their order, what one along
    the dimension before has, or hold copies of it.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    def around(self, piece: Tensor) -> DTensor:
        """Returns the whole tensor of which this process has a piece."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(piece, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)

    def piece(self, tensor: Tensor) -> Tensor:
        """Returns this process's part of a whole tensor."""
        for dimension, placement in enumerate(self.placements):
            if placement.is_shard():
                pieces, number = tensor.chunk(self.mesh.size(dimension)), self.mesh.get_local_rank(dimension)
                tensor = pieces[number] if number < len(pieces) else tensor[:0]
        return tensor


def precision_on(device: torch.device, precision: str) -> str:
    """Returns the precision that is used on a device."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def mesh_of(device: torch.device, ranks: Ranks, shard: int | None) -> DeviceMesh:
    """Returns the ranks, of which neighbours split a copy of the weights.

    Raises:
        UserError: their number does not allow it.
    """
    if ranks.processes % (shard := shard or ranks.processes):
        raise UserError(f"backend.shard {shard} does not divide the {ranks.processes} ranks of the role's group")
    if not dist.is_initialized():
        if ranks.processes > 1:
            raise RunError("the ranks have not joined a process group")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != ranks.processes:
        raise UserError(
            f"backend 'fsdp' is set up for {ranks.processes} processes, but torch's process group has {dist.get_world_size()}"
        )
    if shard == ranks.processes:
        return init_device_mesh(device.type, (shard,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (ranks.processes // shard, shard), mesh_dim_names=("copies", "shard"))


def split(
    start: BackendStart, mesh: DeviceMesh, precision: str, device: torch.device, *, offload: bool, expert_parallel: int = 1
) -> tuple[Any, dict[str, Spread]]:
    """Splits the weights of a model, block by block, and reads them if they are still in their files. Returns the root, through
    which its passes go, and how each weight of ``start.model`` is spread. Only ``start.compute`` is split, and the model's modules
    have its weights.

    Args:
        device: where passes compute.
        expert_parallel: number of neighbouring ranks that share the experts of each layer.

    Raises:
        UserError: the model has no blocks, weights that several of them share, a twin that keeps weights elsewhere, or experts that
            cannot be shared.
    """
    blocks = _blocks(start.model, start.compute)
    _join(start.model, start.compute)
    on_gpu = mesh.device_type == "cuda"
    settings: dict[str, Any] = {
        # Masks and positions are left as they are: the residual stream has the type of the embeddings.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if precision == "bf16" else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if offload else OffloadPolicy(),
    }
    root = Passes(start.compute)
    apart: DeviceMesh | None = None
    layers: dict[str, Any] = {}
    if expert_parallel > 1:
        apart = expert_mesh(mesh, expert_parallel)
        layers = keep_own(start.compute, apart)
        for layer in layers.values():
            fully_shard(layer, mesh=apart["copies", "pieces"] if mesh.ndim > 1 else apart["pieces"], **settings)
    for block in reversed(blocks):  # those inside others first
        fully_shard(block, mesh=mesh, **settings)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, **settings)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    spreads = {}
    for name, weight in start.model.named_parameters():
        assert isinstance(weight, DTensor)
        spreads[name] = Spread(weight.device_mesh, weight.placements, weight.shape)
        if apart is not None and name.rpartition(".")[0] in layers:
            rows = weight.shape[0] * expert_parallel
            spreads[name] = Spread(apart, (Replicate(), Shard(0), Shard(0)), torch.Size([rows, *weight.shape[1:]]))
    if start.weights is not None:
        _fill(root, start.model, spreads, start.weights(), torch.device("cpu") if offload else device)
    return root, spreads


def gather_no_more(root: nn.Module) -> None:
    """Gives up what is left whole of the last pass."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def _fill(root: nn.Module, model: nn.Module, spreads: dict[str, Spread], buckets: Buckets, device: torch.device) -> None:
    """Gives a split model whose parameters are on ``meta`` this process's pieces of them.

    Args:
        buckets: all of the weights, whole, by their names in ``model``.
        device: where the pieces are.
    """
    root._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    weights: dict[str, Any] = dict(model.named_parameters())
    for bucket in buckets:
        while bucket:  # so that none is held while the next ones are read
            name, tensor = bucket.pop()
            piece = spreads[name].piece(tensor)
            if len(piece):
                weights[name].to_local().copy_(piece)
            del tensor, piece


def _blocks(model: Any, compute: nn.Module) -> list[nn.Module]:
    kinds, name = set(getattr(model, "_no_split_modules", None) or ()), type(model).__name__
    blocks = {place: module for place, module in compute.named_modules() if type(module).__name__ in kinds}
    if not blocks:
        raise UserError(f"{name} names no blocks by which backend fsdp could split it (_no_split_modules): {OTHERWISE}")
    homes: dict[nn.Parameter, tuple[str, str]] = {}
    for place, weight in compute.named_parameters(remove_duplicate=False):
        home = max((block for block in blocks if place.startswith(f"{block}.")), key=len, default="")
        first, known = homes.setdefault(weight, (place, home))
        if known != home:
            raise UserError(
                f"{name}: {first} and {place} are one weight in two blocks, which FSDP2 does not split: {OTHERWISE}"
            )
    return list(blocks.values())


def _join(model: nn.Module, twin: nn.Module) -> None:
    """Lets a model's modules hold the weights of its twin's: what splitting puts there is then in both."""
    if twin is model:
        return
    parts = dict(twin.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        part = parts.get(name)
        same = part is not None and part._parameters.keys() == module._parameters.keys()
        if part is None or not same or any(part._parameters[own] is not weight for own, weight in module._parameters.items()):
            kind = type(twin).__name__
            raise UserError(f"the kernels' {kind} does not hold the weights of {name or 'the model'} there: set --kernels none")
        vars(module)["_parameters"] = part._parameters


def whole(tensor: DTensor, device: torch.device) -> Tensor:
    """Returns a split tensor as a whole, on every rank. Collective."""
    if tensor.device != device:  # pieces in CPU memory are gathered over the devices
        local = tensor.to_local().to(device)
        tensor = Spread(tensor.device_mesh, tensor.placements, tensor.shape).around(local)
    return tensor.full_tensor()
