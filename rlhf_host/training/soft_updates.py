"""Weights of frozen roles that move towards those of a trained role (``RoleNeed.follows``)."""

from __future__ import annotations

import torch
from torch import nn

from rlhf_host.backends.weights import stored_weights
from rlhf_host.errors import UserError
from rlhf_host.models.adapters import BASE, adapter_layers
from rlhf_host.models.masters import renew
from rlhf_host.protocols import Buckets

BUCKET_BYTES = 2**28
"""Size of the pieces in which the trained weights are gathered."""


def refuse_different(follower: str, model: nn.Module, source: str, other: nn.Module) -> None:
    """Raises ``UserError`` for two models whose weights have other names or shapes."""
    own, theirs = (_shapes(each) for each in (model, other))
    if different := sorted(own.items() ^ theirs.items()):
        raise UserError(
            f"the role {follower} follows {source}, and their models differ, as in {different[0][0]}: leave {follower}.model out,"
            " or give a model of the same shape"
        )


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of all weights, under the names that they have once adapters are merged. They may have no memory yet."""
    parts = [part for _, layer in adapter_layers(model) for part in layer.named_parameters()]
    own = {weight for name, weight in parts if not name.startswith("base_layer.")}
    added = {name for name, weight in model.named_parameters(remove_duplicate=False) if weight in own}
    weights = stored_weights(model).items()
    return {name.replace(BASE, ""): tuple(weight.shape) for name, weight in weights if name not in added}


@torch.no_grad()
def follow(model: nn.Module, weights: Buckets, share: float) -> None:
    """Moves a model's weights in place, ``w ← w + share·(w_source − w)``; what is no floating point number becomes the source's.

    Args:
        model: it has all of its weights.
        weights: all weights of the source, under every name.
    """
    own, moved = stored_weights(model), set[int]()
    for bucket in weights:
        for name, weight in bucket:
            target = own[name]
            if target.data_ptr() in moved:  # tied: it comes under every name
                continue
            moved.add(target.data_ptr())
            weight = weight.to(target.device, target.dtype)
            target.lerp_(weight, share) if target.is_floating_point() else target.copy_(weight)
    renew(model.parameters())
