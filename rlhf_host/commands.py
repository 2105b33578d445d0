"""Public names for writing commands of ``rlhf``, in any distribution. Imports no torch.

A command is a ``click.Command`` that an entry point in the group ``rlhf.commands`` names. ``rlhf --help`` shows the first
sentence of its docstring, under the text of ``HELP_GROUP`` in its module; neither is imported for the help. ``NAME.OTHER`` is
the command ``rlhf NAME OTHER``, where ``NAME`` is made by ``@click.group(cls=CommandGroup)``.
"""

from __future__ import annotations

from rlhf_host.cli.lazy import CommandGroup
from rlhf_host.cli.main import main
from rlhf_host.cli.plugin_names import complete_plugin, deadline_option, kind_option, matching
from rlhf_host.cli.plugins import wrap
from rlhf_host.command import rlhf, tool
from rlhf_host.directories import new_directory, write_file
from rlhf_host.errors import asks_to_stop, first_line, near_matches, visible
from rlhf_host.phases import phase
from rlhf_host.plugins.child import ChildFailed, answers
from rlhf_host.plugins.reach import unreachable
from rlhf_host.scratch import Scratch

__all__ = [
    "ChildFailed",
    "CommandGroup",
    "Scratch",
    "answers",
    "asks_to_stop",
    "complete_plugin",
    "deadline_option",
    "first_line",
    "kind_option",
    "main",
    "matching",
    "near_matches",
    "new_directory",
    "phase",
    "rlhf",
    "tool",
    "unreachable",
    "visible",
    "wrap",
    "write_file",
]
