"""Facts about a run's trained roles, and those that depend on them, on which all of its processes agree. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.protocols import BackendTraits
from rlhf_host.records.needs import Needs, RoleNeed

SAME = ("model", "revision", "dtype", "quantize", "attn_implementation", "device")
"""Settings that roles with one model have in common."""


@dataclass(frozen=True, slots=True)
class RoleView:
    """A frozen role that needs no model of its own, because it computes with that of the trained role ``source``: under another
    adapter, or as it is (``RoleNeed.follows``).
    """

    source: str
    adapter: str = ""
    """Name of the adapter inside the model."""
    start: str | None = None
    """Directory of the adapter; None: it has none."""
    live: bool = False
    """True if its weights are those that are trained, adapter and all."""


def role_views(roles: Iterable[tuple[RoleNeed, RoleConfig]]) -> dict[str, RoleView]:
    """Returns the views by the role's name. A setting left at ``auto`` is as in the other role.

    Raises ``UserError`` for a role that cannot follow its source.
    """
    roles = list(roles)
    trained = {need.name: (need, own) for need, own in roles if need.trainable}
    views = {}
    for need, own in roles:
        source, other = trained.get(need.source or "", (None, None))
        if need.follows is not None:
            _refuse_follower(need, own, source, other)
        if source is None or other is None or need.trainable or need.generates or need.head != source.head or need.moves:
            continue
        if need.follows is not None:
            views[need.name] = RoleView(source.name, live=True)
        elif other.adapts and _same(own, other):
            views[need.name] = RoleView(source.name, f"of_{need.name}".replace(".", "_"), own.adapter)
    return views


def _same(own: RoleConfig, other: RoleConfig) -> bool:
    return all(getattr(own, name) in ("auto", getattr(other, name)) for name in SAME)


def _refuse_follower(need: RoleNeed, own: RoleConfig, source: RoleNeed | None, other: RoleConfig | None) -> None:
    """Raises ``UserError`` if the role's weights cannot follow those of its source."""
    assert need.follows is not None
    if source is None or other is None:
        raise UserError(
            f"the role {need.name} follows {need.source}, so they have to be in one place, and {need.source} has to be trained:"
            f" name both together in --placement, as in {need.source}+{need.name}=DEVICES"
        )
    if need.head != source.head:
        raise UserError(
            f"the role {need.name} has a {need.head} head and follows {source.name}, which has a {source.head} head"
        )
    if need.follows.live and not _same(own, other):
        raise UserError(f"the role {need.name} is {source.name} itself: leave its {', '.join(SAME)} out")
    if need.moves and (own.quantize or own.dtype in ("bfloat16", "float16")):
        raise UserError(
            f"the role {need.name} follows {source.name} in small steps, which only 32 bits hold: leave its quantize and dtype out"
        )


def in_backend(need: RoleNeed, settings: RoleConfig, traits: BackendTraits, processes: int) -> bool:
    """Returns True if a backend with these traits has the role: it trains it, or splits it over ``processes``."""
    return need.trainable or (traits.splits_frozen and processes > 1 and not settings.quantize and not need.moves)


def saved_roles(needs: Needs) -> list[RoleNeed]:
    """Returns the roles whose weights a checkpoint has: those that are trained, and those that move with them."""
    return [need for need in needs.roles if need.trainable or need.moves]


def models_of(needs: Needs, saved: Callable[[str], Path]) -> dict[str, Path]:
    """Returns the models with which a run goes on from a checkpoint, by role.

    Args:
        saved: role → its directory in the checkpoint.
    """
    live = {need.name: need.source for need in needs.roles if need.follows is not None and need.follows.live and need.source}
    return {need.name: saved(need.name) for need in saved_roles(needs)} | {name: saved(source) for name, source in live.items()}


def check_state(directory: Path, needs: Needs) -> None:
    """Raises ``UserError`` if a checkpoint's roles are not those that this run trains."""
    saved, trained = (
        sorted(path.name for path in directory.iterdir()),
        sorted(need.name for need in needs.roles if need.trainable),
    )
    if saved != trained:
        then, now = ", ".join(saved), ", ".join(trained)
        raise UserError(f"the checkpoint trains {then}, this run {now}: resume with the algorithm it was started with")
