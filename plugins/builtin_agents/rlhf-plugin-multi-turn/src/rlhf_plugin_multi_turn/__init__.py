"""Agents of several turns: with tools, or with a second try."""

from rlhf_plugin_multi_turn.agent import MultiTurn
from rlhf_plugin_multi_turn.retry import Retry

__all__ = ["MultiTurn", "Retry"]
