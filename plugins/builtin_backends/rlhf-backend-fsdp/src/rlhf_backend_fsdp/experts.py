"""Experts that are split over ranks: each computes its own for the tokens of all, which are exchanged (expert parallelism).

Known are layers with the interface that transformers has for other implementations of its experts: weights of which each row is of
one expert, and ``forward(hidden_states, top_k_index, top_k_weights)``, which gives the weighted sum of what a token's experts give.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rlhf_host import RunError, UserError

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names that configurations use for the number of experts."""
_EXPERTS = re.compile("expert", re.IGNORECASE)
ADVICE = "set backend.expert_parallel to 1"


def expert_layers(model: Any) -> dict[str, Any]:
    """Returns the layers of experts that can be split, by their names. A model without experts has none.

    Raises:
        UserError: the model has experts that cannot be split.
    """
    name = type(model).__name__
    layers = {place: module for place, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    for place, module in layers.items():
        odd = [own for own, weight in module.named_parameters() if "." in own or weight.shape[0] != module.num_experts]
        if place.endswith(".base_layer"):
            raise UserError(
                f"{name}: experts with adapters of their own cannot be split: {ADVICE}, or leave them out of lora.targets"
            )
        if odd or any(True for _ in module.buffers()):
            raise UserError(f"{name}: {odd[0] if odd else 'a buffer'} of {place} is not of one expert a row; {ADVICE}")
    if not layers and has_experts(model):
        raise UserError(
            f"{name} has experts, but not by transformers' interface for them, so backend fsdp cannot split them: {ADVICE}"
        )
    return layers


def has_experts(model: Any) -> bool:
    """Returns True if the configuration or a module speaks of experts."""
    config = model.config.get_text_config()
    if any(isinstance(value := getattr(config, name, None), int) and value > 1 for name in _COUNTS):
        return True
    return any(_EXPERTS.search(f"{place} {type(module).__name__}") for place, module in model.named_modules())


def refuse_count(model: Any, count: int) -> None:
    """Raises ``UserError`` if so many ranks cannot split the experts of a model."""
    for place, module in expert_layers(model).items():
        if module.num_experts % count:
            raise UserError(
                f"backend.expert_parallel {count} does not divide the {module.num_experts} experts of {type(model).__name__}"
                f" ({place}): choose a divisor"
            )


def expert_mesh(mesh: DeviceMesh, count: int) -> DeviceMesh:
    """Returns the ranks in three dimensions: ``copies`` of the weights; ``experts``, the neighbours that share a layer's; and
    ``pieces``, the ranks with the same experts, which split these further.

    Args:
        mesh: ranks, of which those of the last dimension split a copy of the weights.

    Raises:
        UserError: their number does not allow it.
    """
    if (shard := mesh.size(-1)) % count:
        raise UserError(f"backend.expert_parallel {count} does not divide the {shard} ranks that split a copy of the weights")
    ranks = mesh.mesh.view(-1, shard // count, count).transpose(1, 2).contiguous()
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=("copies", "experts", "pieces"))


def keep_own(model: Any, mesh: DeviceMesh) -> dict[str, Any]:
    """Leaves in every layer only the experts of this process, and lets the layer send tokens where their experts are. Returns the
    layers by their names.

    Args:
        model: has whole weights, or all of them on ``meta``.
        mesh: of ``expert_mesh``.
    """
    count, number, group = mesh.size(1), mesh.get_local_rank("experts"), mesh.get_group("experts")
    refuse_count(model, count)
    layers = expert_layers(model)
    for module in layers.values():
        own = module.num_experts // count
        for name, weight in module.named_parameters():
            piece = weight.detach()[number * own : (number + 1) * own].clone()
            module._parameters[name] = nn.Parameter(piece, requires_grad=weight.requires_grad)
        module.num_experts = own
        module.forward = partial(_exchanged, partial(type(module).forward, module), own, group)
    return layers


def _exchanged(compute: Any, own: int, group: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns ``[tokens, H]``, what the layer gives, computed where each expert is. Collective in ``group``.

    Args:
        compute: forward of this process's experts.
        own: their number.
        hidden_states: ``[tokens, H]``.
        top_k_index: ``[tokens, k]``, numbers of experts among all.
        top_k_weights: ``[tokens, k]``.
    """
    ranks, chosen = dist.get_world_size(group), top_k_index.shape[-1]
    experts = top_k_index.reshape(-1)
    counts = torch.bincount(experts, minlength=ranks * own)  # of tokens that go to each expert
    if len(counts) > ranks * own:
        raise RunError(f"a router chose expert {len(counts) - 1} of {ranks * own}: {ADVICE}")
    incoming = torch.empty_like(counts)  # by sender, then by expert
    dist.all_to_all_single(incoming, counts, group=group)
    sent, received = counts.view(ranks, own).sum(1).tolist(), incoming.view(ranks, own).sum(1).tolist()
    order = experts.argsort(stable=True)
    rows = _Exchange.apply(hidden_states[order // chosen], sent, received, group)
    numbers = torch.arange(own, device=experts.device).repeat(ranks).repeat_interleave(incoming)
    # The backward pass goes through the experts on every rank, also where no token has arrived: other ranks wait in it.
    if not (total := len(rows)):
        rows, numbers = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), numbers.new_zeros(1)
    results = compute(rows, numbers[:, None], rows.new_ones(len(rows), 1))[:total]
    back = _Exchange.apply(results, received, sent, group)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    back = back[places].view(*top_k_index.shape, hidden_states.shape[-1])
    return (back * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


class _Exchange(torch.autograd.Function):
    """Rows that go to other ranks, and whose gradients come back."""

    @staticmethod
    def forward(context: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:  # type: ignore[override]
        context.sizes, context.group = (sent, received), group
        return _swap(rows, sent, received, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        sent, received = context.sizes
        return _swap(gradient, received, sent, context.group), None, None, None


def _swap(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Returns the rows that came, in the order of their ranks, for those that go.

    Args:
        rows: in the order of the ranks they go to.
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
