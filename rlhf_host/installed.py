"""Plugins that are installed or could be, their distributions, libraries and exact versions. Importing this loads no torch.

``discover`` lists installed plugins from their metadata, and ``offered`` those that the shipped lists name. ``find_all`` finds
what a name means, ``load`` and ``build`` import it. ``pinned`` states versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.plugins.about import about as about
    from rlhf_host.plugins.catalogue import OTHERS as OTHERS
    from rlhf_host.plugins.catalogue import OURS as OURS
    from rlhf_host.plugins.catalogue import Offer as Offer
    from rlhf_host.plugins.catalogue import install_line as install_line
    from rlhf_host.plugins.catalogue import offered as offered
    from rlhf_host.plugins.discovery import GROUPS as GROUPS
    from rlhf_host.plugins.discovery import HOOKED as HOOKED
    from rlhf_host.plugins.discovery import HOST as HOST
    from rlhf_host.plugins.discovery import PROTOCOLS as PROTOCOLS
    from rlhf_host.plugins.discovery import PluginInfo as PluginInfo
    from rlhf_host.plugins.discovery import discover as discover
    from rlhf_host.plugins.discovery import normalised as normalised
    from rlhf_host.plugins.libraries import missing_library as missing_library
    from rlhf_host.plugins.options import describe_options as describe_options
    from rlhf_host.plugins.options import options_model as options_model
    from rlhf_host.plugins.recommended import recommended as recommended
    from rlhf_host.plugins.requirements import OTHER_BUILDS as OTHER_BUILDS
    from rlhf_host.plugins.requirements import extras_of_host as extras_of_host
    from rlhf_host.plugins.requirements import pinned as pinned
    from rlhf_host.plugins.selection import build as build
    from rlhf_host.plugins.selection import find as find
    from rlhf_host.plugins.selection import find_all as find_all
    from rlhf_host.plugins.selection import load as load
    from rlhf_host.plugins.selection import load_command as load_command
    from rlhf_host.plugins.selection import read_options as read_options

__getattr__, __dir__, __all__ = lazily(__name__)
