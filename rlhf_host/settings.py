"""The settings of a run, for commands of other distributions: the command line that gives them, the files, the checks.

``@click.command(cls=SettingsCommand, ...)`` makes a command whose flags are settings; its function gets a ``CommandLine``.
"""

from __future__ import annotations

from rlhf_host.cli.configured import CommandLine, SettingsCommand
from rlhf_host.cli.eval import evaluated, judged_by, use_model
from rlhf_host.config.check import check
from rlhf_host.config.flags import Text, coerce
from rlhf_host.config.load import read_config
from rlhf_host.config.resolve import Resolved, merge_needs, resolve
from rlhf_host.config.schema import DataConfig, DataSource, PluginChoice, RoleConfig, RolloutConfig, RunConfig, TrainConfig
from rlhf_host.config.tree import MANY, SINGLE, Names
from rlhf_host.config.yaml_file import Located, plain, read_yaml, write_yaml
from rlhf_host.plugins.hints import UnknownName
from rlhf_host.plugins.selection import parse_choice, split_names

__all__ = [
    "MANY",
    "SINGLE",
    "CommandLine",
    "DataConfig",
    "DataSource",
    "Located",
    "Names",
    "PluginChoice",
    "Resolved",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "SettingsCommand",
    "Text",
    "TrainConfig",
    "UnknownName",
    "check",
    "coerce",
    "evaluated",
    "judged_by",
    "merge_needs",
    "parse_choice",
    "plain",
    "read_config",
    "read_yaml",
    "resolve",
    "split_names",
    "use_model",
    "write_yaml",
]
