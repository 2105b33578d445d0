"""Public names for writing commands of ``rlhf``, in any distribution. Imports no torch.

A command is a ``click.Command`` that an entry point in the group ``rlhf.commands`` names. ``rlhf --help`` shows the first
sentence of its docstring, under the text of ``HELP_GROUP`` in its module; neither is imported for the help. ``NAME.OTHER`` is
the command ``rlhf NAME OTHER``, where ``NAME`` is made by ``@click.group(cls=CommandGroup)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.cli.lazy import CommandGroup as CommandGroup
    from rlhf_host.cli.main import main as main
    from rlhf_host.cli.plugin_names import complete_plugin as complete_plugin
    from rlhf_host.cli.plugin_names import kind_option as kind_option
    from rlhf_host.cli.plugin_names import matching as matching
    from rlhf_host.cli.plugins import wrap as wrap
    from rlhf_host.command import rlhf as rlhf
    from rlhf_host.command import tool as tool
    from rlhf_host.directories import new_directory as new_directory
    from rlhf_host.directories import write_file as write_file
    from rlhf_host.errors import asks_to_stop as asks_to_stop
    from rlhf_host.errors import first_line as first_line
    from rlhf_host.errors import near_matches as near_matches
    from rlhf_host.errors import visible as visible
    from rlhf_host.phases import phase as phase
    from rlhf_host.plugins.reach import unreachable as unreachable
    from rlhf_host.scratch import Scratch as Scratch

__getattr__, __dir__, __all__ = lazily(__name__)
