"""The installed server through which programs ask the policy of an episode."""

from __future__ import annotations

from rlhf_host.errors import PluginError
from rlhf_host.plugins.catalogue import offered
from rlhf_host.plugins.discovery import PluginInfo, discover


def find_server() -> PluginInfo:
    """Returns it, from metadata alone. Raises ``PluginError``, which says what to do, where there is none that can be used, or
    more than one."""
    servers = [info for info in discover(disabled=True) if info.kind == "server"]
    enabled = [info for info in servers if info.status != "disabled"]
    if len(enabled) == 1 and enabled[0].status == "ok":
        return enabled[0]
    if len(enabled) == 1:
        raise PluginError(f"{enabled[0]}: {enabled[0].problem}")
    if enabled:
        names = " or ".join(f"{info.distribution}:{info.name}" for info in enabled)
        raise PluginError(f"{' and '.join(map(str, enabled))} are both installed: leave one out (--disable {names})")
    if servers:
        raise PluginError(f"the {servers[0]} is disabled: {servers[0].problem}")
    lines = " or ".join(dict.fromkeys(offer.line for offer in offered()["server"].values()))
    raise PluginError(f"no policy server is installed; {lines}")
