"""The settings of a run, for commands of other distributions: the command line that gives them, the files, the checks.

``@click.command(cls=SettingsCommand, ...)`` makes a command whose flags are settings; its function gets a ``CommandLine``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.lazily import lazily

if TYPE_CHECKING:
    from rlhf_host.cli.configured import CommandLine as CommandLine
    from rlhf_host.cli.configured import SettingsCommand as SettingsCommand
    from rlhf_host.cli.eval import evaluated as evaluated
    from rlhf_host.cli.eval import judged_by as judged_by
    from rlhf_host.cli.eval import use_model as use_model
    from rlhf_host.config.check import check as check
    from rlhf_host.config.flags import Flag as Flag
    from rlhf_host.config.flags import Text as Text
    from rlhf_host.config.flags import coerce as coerce
    from rlhf_host.config.load import read_config as read_config
    from rlhf_host.config.resolve import merge_needs as merge_needs
    from rlhf_host.config.resolve import resolve as resolve
    from rlhf_host.config.schema import DataConfig as DataConfig
    from rlhf_host.config.schema import DataSource as DataSource
    from rlhf_host.config.schema import PluginChoice as PluginChoice
    from rlhf_host.config.schema import RoleConfig as RoleConfig
    from rlhf_host.config.schema import RolloutConfig as RolloutConfig
    from rlhf_host.config.schema import RunConfig as RunConfig
    from rlhf_host.config.schema import TrainConfig as TrainConfig
    from rlhf_host.config.tree import MANY as MANY
    from rlhf_host.config.tree import SINGLE as SINGLE
    from rlhf_host.config.tree import Names as Names
    from rlhf_host.config.yaml_file import Located as Located
    from rlhf_host.config.yaml_file import plain as plain
    from rlhf_host.config.yaml_file import read_yaml as read_yaml
    from rlhf_host.config.yaml_file import write_yaml as write_yaml
    from rlhf_host.plugins.hints import UnknownName as UnknownName
    from rlhf_host.plugins.selection import parse_choice as parse_choice
    from rlhf_host.plugins.selection import split_names as split_names

__getattr__, __dir__, __all__ = lazily(__name__)
