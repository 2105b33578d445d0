"""The auxiliary loss that keeps the experts of a model evenly used (Switch Transformer, arXiv:2101.03961, eq. 4 to 6).

The model's own function computes it, over all tokens of a pass but padding. A prompt that several rows share counts once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_host.errors import UserError
from rlhf_host.models.layouts import Layout
from rlhf_host.models.precision import evaluation

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
"""Names that configurations use for the number of experts, and for the number of experts per token."""


class Balance:
    """Loss of the routers, computed from their logits in passes.

    Args:
        coef: coefficient of the loss.
        function: ``load_balancing_loss_func`` of the model's module.
    """

    def __init__(self, coef: float, function: Callable[..., Any], experts: int, chosen: int):
        self.coef = coef
        self._function, self._experts, self._chosen = function, experts, chosen
        self._loss: Tensor | None = None

    def take(self, outputs: Sequence[Any], layouts: Sequence[Layout]) -> None:
        """Stores the router logits of one pass over these layouts."""
        layers = [torch.cat(each) for each in zip(*(output.router_logits for output in outputs), strict=True)]
        mask = None
        if any(layout.rows is None for layout in layouts):
            mask = torch.cat([_real(layout) for layout in layouts])
        self._loss = self._function(tuple(layers), self._experts, self._chosen, mask)

    def loss(self) -> Tensor:
        """Returns the loss of the last pass, with its gradient. Nothing is kept."""
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss.float()


def balance_of(model: Any, coef: float | None) -> Balance | None:
    """Returns the object that computes the loss, if the loss is wanted.

    Args:
        coef: default: that of the model's configuration, if this asks for the loss (``output_router_logits``).

    Raises:
        UserError: the loss is wanted but the model has none.
    """
    config = model.config.get_text_config()
    if coef is None:
        wanted = getattr(config, "output_router_logits", False)
        coef = float(getattr(config, "router_aux_loss_coef", 0.0)) if wanted else 0.0
    if coef == 0:
        return None
    function = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts, chosen = (
        next((value for name in names if (value := getattr(config, name, None))), 0) for names in (EXPERTS, CHOSEN)
    )
    problem = f"{type(model).__name__} has no auxiliary loss of its routers"
    if function is not None and experts and chosen:
        balance = Balance(coef, function, int(experts), int(chosen))
        if next(model.parameters()).is_meta or _agrees(balance, model):  # an outline has no loss to compare
            return balance
        problem = f"the auxiliary loss of {type(model).__name__} cannot be computed from its decoder's outputs"
    raise UserError(f"router_aux_loss_coef is {coef:g}, and {problem}: set it to 0")


def _agrees(balance: Balance, model: Any) -> bool:
    """Returns True if the loss equals the one that the whole model returns."""
    ids = torch.arange(1, 9, device=next(model.parameters()).device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad(), evaluation(model):
        output = model(input_ids=ids, use_cache=False, output_router_logits=True)
        if getattr(output, "aux_loss", None) is None or not output.router_logits:
            return False
        balance.take([output], [Layout(ids, ids[0], torch.tensor([ids.numel() - 1], device=ids.device))])
    return bool(torch.isclose(balance.loss(), torch.as_tensor(output.aux_loss).float(), rtol=1e-2))


def _real(layout: Layout) -> Tensor:
    """Returns ``[places]`` bool: True where there is no padding."""
    if layout.rows is not None:
        return torch.ones(layout.input_ids.numel(), dtype=torch.bool, device=layout.input_ids.device)
    rows, width = layout.input_ids.shape
    places = torch.arange(rows * width, device=layout.input_ids.device).view(rows, width)
    return (places <= layout.last[:, None]).flatten()
