"""Facts about a run's trained roles on which all of its processes agree. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_host.config.schema import RoleConfig
from rlhf_host.errors import UserError
from rlhf_host.protocols import BackendTraits
from rlhf_host.records.needs import Needs, RoleNeed


@dataclass(frozen=True, slots=True)
class AdapterView:
    """A frozen role that needs no model of its own, because only its adapter differs from the role ``source``, which trains an
    adapter.
    """

    source: str
    adapter: str
    """Name of the adapter inside the model."""
    start: str | None
    """Directory of the adapter; None: it has none."""


def adapter_views(roles: Iterable[tuple[RoleNeed, RoleConfig]]) -> dict[str, AdapterView]:
    """Returns the views by the role's name. A setting left at ``auto`` is as in the other role."""
    trained = {need.name: (need, own) for need, own in roles if need.trainable and (own.adapter or own.lora.rank)}
    views = {}
    for need, own in roles:
        source, other = trained.get(need.source or "", (None, None))
        if source is None or other is None or need.trainable or need.generates or need.head != source.head:
            continue
        same = ("model", "revision", "dtype", "quantize", "attn_implementation", "device")
        if all(getattr(own, name) in ("auto", getattr(other, name)) for name in same):
            views[need.name] = AdapterView(source.name, f"of_{need.name}".replace(".", "_"), own.adapter)
    return views


def in_backend(need: RoleNeed, settings: RoleConfig, traits: BackendTraits, processes: int) -> bool:
    """Returns True if a backend with these traits has the role: it trains it, or splits it over ``processes``."""
    return need.trainable or (traits.splits_frozen and processes > 1 and not settings.quantize)


def check_state(directory: Path, needs: Needs) -> None:
    """Raises ``UserError`` if a checkpoint's roles are not those that this run trains."""
    saved, trained = (
        sorted(path.name for path in directory.iterdir()),
        sorted(need.name for need in needs.roles if need.trainable),
    )
    if saved != trained:
        then, now = ", ".join(saved), ", ".join(trained)
        raise UserError(f"the checkpoint trains {then}, this run {now}: resume with the algorithm it was started with")
