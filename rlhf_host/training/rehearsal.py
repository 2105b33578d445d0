"""Checks of a run before its models are loaded: what models, backend and engine would refuse, and whether the weights fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_host.config.schema import RoleConfig, RunConfig
from rlhf_host.data.codec import ChatCodec
from rlhf_host.data.templates import for_chat
from rlhf_host.errors import UserError
from rlhf_host.models.available_memory import available_memory
from rlhf_host.models.balance import balance_of
from rlhf_host.models.loading import choose_device, load_tokenizer, sizes
from rlhf_host.models.meta_model import meta_model, weights_of
from rlhf_host.models.pictures import base_of
from rlhf_host.plugins.manager import PluginManager
from rlhf_host.protocols import BackendTraits, Checking, RuntimeStart
from rlhf_host.records.needs import AlgoNeeds, Needs, RoleNeed
from rlhf_host.training.batching import refuse_large_answers
from rlhf_host.training.role_settings import role_settings
from rlhf_host.training.trained_roles import role_views
from rlhf_host.training.vocabularies import check_vocabularies

GB = 1e9


def check_inputs(config: RunConfig, manager: PluginManager, needs: Needs, tokenizer: Any) -> None:
    """Raises ``UserError`` for roles, settings and plugins that do not go together, as far as settings and configuration files
    tell.

    Args:
        tokenizer: the actor's.
    """
    own = {need.name: role_settings(config.roles, need, None, needs) for need in needs.roles}
    roles = {"actor": config.roles["actor"], **own}
    check_vocabularies(roles, needs, tokenizer)
    if needs.samples and AlgoNeeds.of(needs).unit_rows and config.from_trajectories is None:
        refuse_large_answers(config, sizes(config.roles["actor"])[1], prompt=1)
    for data in (config.data, config.eval.data) if needs.samples else ():
        ChatCodec(for_chat(tokenizer, data), data.template, tool_format=config.rollout.tool_format)
    check_plugins(config, manager, roles, tokenizer)


def check_plugins(config: RunConfig, manager: PluginManager, roles: Mapping[str, RoleConfig], tokenizer: Any) -> None:
    """Raises ``PluginError`` for everything that a plugin refuses."""
    settings, tokenizers = config.model_dump(), _Tokenizers(roles, {"actor": tokenizer})
    for key in manager.names("check_run"):
        manager.call(key, "check_run", config=settings, tokenizers=tokenizers)


@dataclass
class _Tokenizers(Mapping[str, Any]):
    """Role → its tokenizer, loaded on first use."""

    roles: Mapping[str, RoleConfig]
    loaded: dict[str, Any]

    def __getitem__(self, role: str) -> Any:
        if role not in self.loaded:
            self.loaded[role] = load_tokenizer(self.roles[role])
        return self.loaded[role]

    def __iter__(self) -> Iterator[str]:
        return iter({"actor": None, **self.roles})

    def __len__(self) -> int:
        return len(list(self))


def rehearse(start: RuntimeStart, *, remote: bool, pictured: bool = False) -> tuple[list[str], dict[str, Any]]:
    """Checks each role of a run that trains, as far as settings and the files beside its weights tell.

    Args:
        remote: the roles will be in other processes, whose devices are not known.
        pictured: rows have pictures.

    Returns:
        Lines for people about what was checked, and the outline of each role's model, None where there is none.

    Raises:
        UserError: something that the run would refuse after loading, or weights that cannot fit.
    """
    devices = {} if remote else {name: choose_device(role.device) for name, role in start.roles.items()}
    for spec in filter(None, (start.backend, start.engine)):
        plugin = spec.build()
        if isinstance(plugin, Checking):
            plugin.check(start, {name: device.type for name, device in devices.items()})
    backend: Any = start.backend.build()
    lines, held, outlines = [], defaultdict[Any, list[_Share]](list), {}
    views = role_views([(need, start.roles[need.name]) for need in start.needs.roles])
    for need in start.needs.roles:
        role = start.roles[need.name]
        model = outlines[need.name] = meta_model(role, head=need.head, trainable=need.trainable)
        if model is None:
            lines.append(f"role {need.name}: {role.model} cannot be checked before its weights are loaded")
            continue
        if pictured and (need.trainable or need.head == "lm"):  # a reward model may be asked texts alone
            try:
                base_of(model)
            except UserError as error:
                raise UserError(f"role {need.name}, {role.model}: {error}; give it a model that sees") from error
        if need.trainable:
            balance_of(model, role.router_aux_loss_coef)
        if need.name not in views:
            held[devices.get(need.name)].append(_share(need, role, model, backend.traits))
    return lines + [line for device, shares in held.items() for line in _compared(device, shares)], outlines


@dataclass(frozen=True)
class _Share:
    """Minimum bytes of a role."""

    role: str
    count: int
    """Number of its weights."""
    weights: float
    state: float
    """Bytes of gradients and optimizer; not counted for adapters, which are small."""

    def __str__(self) -> str:
        text = f"{self.role}: {self.count / GB:.2f}·10⁹ numbers, {self.weights / GB:.1f} GB"
        return text + (f", and {self.state / GB:.1f} GB of gradients and optimizer" if self.state else "")


def _share(need: RoleNeed, role: RoleConfig, model: Any, backend: BackendTraits) -> _Share:
    weights = list(weights_of(role, model))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return _Share(
        need.name,
        sum(weight.numel() for weight, _ in weights),
        sum(weight.numel() * width for weight, width in weights),
        0 if role.adapts else backend.state_bytes * trained,
    )


def _compared(device: torch.device | None, shares: list[_Share]) -> Iterator[str]:
    """Yields lines about the memory that is needed and available. Raises ``UserError`` if the models cannot fit."""
    weights, state = sum(share.weights for share in shares), sum(share.state for share in shares)
    need, texts = weights + state, "; ".join(map(str, shares))
    if device is None or (there := available_memory(device)) is None:
        where = "the places that the roles get" if device is None else str(device)
        yield f"memory: {need / GB:.1f} GB at least ({texts}); the memory of {where} is unknown, so this is not checked"
        return
    if need > there:
        few = "keep frozen weights in fewer bits (dtype, quantize)"
        way = "train an adapter (--actor.lora.rank 16)" if state else few
        way += f" and {few}" if state and weights > there else ""
        raise UserError(
            f"the models do not fit: on {device} they need {need / GB:.1f} GB at least ({texts}), and it has {there / GB:.1f} GB:"
            f" {way}, or choose a smaller model or another place"
        )
    yield f"memory: {need / GB:.1f} GB at least ({texts}), of {there / GB:.1f} GB on {device}"
