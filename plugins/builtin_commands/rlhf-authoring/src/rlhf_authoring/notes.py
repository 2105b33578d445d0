"""Lines that ``rlhf plugins show`` has of the certificates in the lists that come with the host."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_host.installed import PluginInfo, normalised


def note(info: PluginInfo) -> Iterator[str]:
    """What is certified of an installed plugin, compared with what is installed."""
    from rlhf_authoring.certificates import told
    from rlhf_authoring.index import shipped

    for index in shipped():
        for entry in index.distributions:
            for plugin in entry.plugins if normalised(entry.name) == normalised(info.distribution) else ():
                if plugin.certificate is not None and (plugin.kind, plugin.name) == (info.kind, info.name):
                    yield told(plugin.certificate, plugin, entry.name, info)
