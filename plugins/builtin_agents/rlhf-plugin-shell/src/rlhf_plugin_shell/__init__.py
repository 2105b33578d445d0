"""Episodes in a shell, contained or elsewhere, and tasks in directories."""

from rlhf_plugin_shell.agent import ShellAgent
from rlhf_plugin_shell.harbor import HarborTasks
from rlhf_plugin_shell.harness import HarnessAgent
from rlhf_plugin_shell.lines import ShellLines

__all__ = ["HarborTasks", "HarnessAgent", "ShellAgent", "ShellLines"]
