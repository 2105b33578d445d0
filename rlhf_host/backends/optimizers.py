"""Optimizers by name: those of ``torch.optim`` and of bitsandbytes, and Muon with AdamW for what is no matrix of a block."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_host.config.pairs import read_pairs
from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError, near_matches
from rlhf_host.models.heads import blocks_of

ADAMW, MUON = "AdamW", "Muon"
UNFIT = ("LBFGS", "SparseAdam", "Optimizer")
"""Classes of ``torch.optim`` that need a closure, sparse gradients, or are no optimizer."""
SETTINGS = {"betas": "betas", "eps": "adam_eps"}
"""Arguments of optimizers → settings of a role that they are."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Returns the class with this name in ``torch.optim``, or in bitsandbytes.

    Raises ``UserError`` for an unknown name, and where bitsandbytes is not installed.
    """
    own = {key: value for key, value in vars(torch.optim).items() if _is_optimizer(value) and key not in UNFIT}
    if name in own:
        return own[name]
    known = "" if name not in UNFIT else f": {name} cannot be used here"
    try:
        import bitsandbytes
    except ImportError as error:
        hint = near_matches(name, own) or "; those in 8 bits, such as AdamW8bit, are in bitsandbytes (pip install bitsandbytes)"
        raise UserError(f"backend.optimizer {name}: torch.optim has none of this name{known or hint}") from error
    others = {key: value for key, value in vars(bitsandbytes.optim).items() if _is_optimizer(value)}
    if name not in others:
        raise UserError(
            f"backend.optimizer {name}: neither torch.optim nor bitsandbytes.optim has one of this name"
            f"{known or _near(name, [*own, *others])}"
        )
    return others[name]


def _near(name: str, known: Sequence[str]) -> str:
    """Returns what a message suggests: the name in its own case, else names that are like it."""
    same = [each for each in known if each.casefold() == name.casefold()]
    return near_matches(same[0], same) if same else near_matches(name, known)


def check_optimizer(name: str, texts: Sequence[str], role: RoleConfig) -> None:
    """Raises ``UserError`` where ``make_optimizer`` would, without a model."""
    weight = nn.Parameter(torch.zeros(2, 2))
    make_optimizer(name, arguments_of(texts), [{"params": [weight], "weight_decay": role.weight_decay}], role, 1e-3, set())


def outside_blocks(model: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that are in no block of the model: embeddings, heads, the last norm."""
    inside = {weight for block in blocks_of(model).values() for weight in block.parameters()}
    return set(model.parameters()) - inside


def _is_optimizer(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)


def arguments_of(texts: Sequence[str]) -> dict[str, Any]:
    """Returns ``backend.optimizer_args`` as arguments. Raises ``UserError`` as ``read_pairs`` does."""
    return read_pairs(texts, "backend.optimizer_args", "momentum=0.9")


def make_optimizer(
    name: str,
    arguments: Mapping[str, Any],
    groups: list[dict[str, Any]],
    role: RoleConfig,
    lr: float,
    outside: set[nn.Parameter],
) -> torch.optim.Optimizer | Several:
    """Returns an optimizer of parameter groups, each with its ``weight_decay``.

    Args:
        arguments: for its constructor, beside the settings of the role.
        groups: as ``decayed_groups`` returns them.
        outside: parameters that are in no block: embeddings and heads, which Muon is not for.

    Raises:
        UserError: the name is unknown, or the optimizer lacks one of the arguments, or a setting that the role sets.
    """
    if name == ADAMW and not arguments:
        return torch.optim.AdamW(groups, lr=lr, betas=role.betas, eps=role.adam_eps, fused=True)
    kind: Any = optimizer_class(name)
    known = inspect.signature(kind.__init__).parameters
    fitting = {key for key, setting in SETTINGS.items() if key in known and _fits(known[key], role, setting)}
    of_roles = ("self", "params", "lr", "weight_decay", *fitting)
    if unknown := [key for key in arguments if key not in known or key in of_roles]:
        takes = ", ".join(key for key in known if key not in of_roles)
        raise UserError(
            f"backend.optimizer_args {unknown[0]}: {name} takes {takes}; rate, decay and betas are the role's settings"
        )
    if name == MUON:
        return _muon(kind, arguments, groups, role, lr, outside)
    usual = RoleConfig()
    for key, setting in SETTINGS.items():
        if key not in fitting and getattr(role, setting) != getattr(usual, setting):
            if key not in known:
                raise UserError(f"{setting} is set, and backend.optimizer {name} has no {key}: leave it out")
            form = json.dumps(known[key].default)
            raise UserError(
                f"{setting} is set, and {key} of backend.optimizer {name} is of another form: leave it out, and give"
                f" backend.optimizer_args {key}={form}, with values of yours"
            )
    if "weight_decay" not in known and role.weight_decay:
        raise UserError(f"weight_decay is set, and backend.optimizer {name} has none: leave it out")
    own = {key: getattr(role, SETTINGS[key]) for key in fitting}
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    if "weight_decay" not in known:
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    made: torch.optim.Optimizer = kind(groups, lr=lr, **own, **arguments)
    return made


def _fits(parameter: inspect.Parameter, role: RoleConfig, setting: str) -> bool:
    """Returns True unless the optimizer's own default is of another form, as Adafactor's two epsilons are, or three betas."""
    value, default = getattr(role, setting), parameter.default
    return not isinstance(default, tuple) or (isinstance(value, tuple) and len(value) == len(default))


def _muon(
    kind: Any,
    arguments: Mapping[str, Any],
    groups: list[dict[str, Any]],
    role: RoleConfig,
    lr: float,
    outside: set[nn.Parameter],
) -> Several:
    """Returns Muon for the matrices of blocks and AdamW for all others. Its step is scaled to the size of AdamW's
    (``match_rms_adamw``), so one learning rate serves both (arXiv:2502.16982, eq. 4).
    """
    matrices, others = list[dict[str, Any]](), list[dict[str, Any]]()
    for group in groups:
        for part, wanted in ((matrices, True), (others, False)):
            if chosen := [each for each in group["params"] if (each.dim() == 2 and each not in outside) is wanted]:
                part.append({**group, "params": chosen})
    if not matrices:
        raise UserError("backend.optimizer Muon is for matrices in blocks, and no trained parameter is one: choose another")
    scaled = {"adjust_lr_fn": "match_rms_adamw", **arguments}
    parts: list[torch.optim.Optimizer] = [kind(matrices, lr=lr, **scaled)]
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, betas=role.betas, eps=role.adam_eps, fused=True))
    return Several(parts)


class Several:
    """Optimizers of different parameters that step as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        return {weight: kept for part in self.parts for weight, kept in part.state.items()}

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` returned. Raises ``ValueError`` for the state of other optimizers."""
        if len(state.get("parts", ())) != len(self.parts):
            raise ValueError(f"it has {len(state.get('parts', ()))} parts, and this one {len(self.parts)}")
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)


def state_bytes(name: str, arguments: Mapping[str, Any]) -> float:
    """Returns the bytes that an optimizer keeps per trained number, by one step on a small matrix."""
    weight = nn.Parameter(torch.zeros(128, 64))
    weight.grad = torch.ones_like(weight)
    optimizer = make_optimizer(name, arguments, [{"params": [weight], "weight_decay": 0.0}], RoleConfig(), 1e-3, set())
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(value.nbytes for value in kept if value.numel() >= weight.numel()) / weight.numel()
