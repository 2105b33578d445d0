"""Plugins that are installed or could be, their distributions, libraries and exact versions. Importing this loads no torch.

``discover`` lists installed plugins from their metadata, and ``offered`` those that the shipped lists name. ``find_all`` finds
what a name means, ``load`` and ``build`` import it here, and ``look_inside`` in a process of its own. ``pinned`` states versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.plugins.about import about
    from rlhf_host.plugins.catalogue import OTHERS, OURS, Offer, offered
    from rlhf_host.plugins.discovery import GROUPS, HOOKED, HOST, PROTOCOLS, PluginInfo, discover, normalised
    from rlhf_host.plugins.libraries import missing_library
    from rlhf_host.plugins.options import describe_options, options_model
    from rlhf_host.plugins.recommended import recommended
    from rlhf_host.plugins.requirements import OTHER_BUILDS, extras_of_host, installed_distributions, pinned
    from rlhf_host.plugins.selection import build, find, find_all, load, load_command, read_options
    from rlhf_host.plugins.verify import look_inside, verify

_HOME = {
    **dict.fromkeys(("GROUPS", "HOOKED", "HOST", "PROTOCOLS", "PluginInfo", "discover", "normalised"), "discovery"),
    **dict.fromkeys(("OTHERS", "OURS", "Offer", "offered"), "catalogue"),
    **dict.fromkeys(("build", "find", "find_all", "load", "load_command", "read_options"), "selection"),
    **dict.fromkeys(("OTHER_BUILDS", "extras_of_host", "installed_distributions", "pinned"), "requirements"),
    **dict.fromkeys(("look_inside", "verify"), "verify"),
    "about": "about",
    **dict.fromkeys(("describe_options", "options_model"), "options"),
    "missing_library": "libraries",
    "recommended": "recommended",
}
"""Name → its module in ``rlhf_host.plugins``, imported when the name is first asked for."""

__all__ = [
    "GROUPS",
    "HOOKED",
    "HOST",
    "OTHERS",
    "OTHER_BUILDS",
    "OURS",
    "PROTOCOLS",
    "Offer",
    "PluginInfo",
    "about",
    "build",
    "describe_options",
    "discover",
    "extras_of_host",
    "find",
    "find_all",
    "installed_distributions",
    "load",
    "load_command",
    "look_inside",
    "missing_library",
    "normalised",
    "offered",
    "options_model",
    "pinned",
    "read_options",
    "recommended",
    "verify",
]

__getattr__, __dir__ = lazily(__name__, {name: f"rlhf_host.plugins.{home}" for name, home in _HOME.items()})
