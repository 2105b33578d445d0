"""Episodes in a contained shell, and tasks in directories."""

from rlhf_plugin_shell.agent import ShellAgent
from rlhf_plugin_shell.harbor import HarborTasks
from rlhf_plugin_shell.lines import ShellLines

__all__ = ["HarborTasks", "ShellAgent", "ShellLines"]
