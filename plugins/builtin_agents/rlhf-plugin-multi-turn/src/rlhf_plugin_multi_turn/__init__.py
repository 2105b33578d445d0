"""Episodes of several turns: tools, another try, and environments from files."""

from rlhf_plugin_multi_turn.agent import MultiTurn
from rlhf_plugin_multi_turn.file_agent import FileAgent
from rlhf_plugin_multi_turn.retry import Retry

__all__ = ["FileAgent", "MultiTurn", "Retry"]
