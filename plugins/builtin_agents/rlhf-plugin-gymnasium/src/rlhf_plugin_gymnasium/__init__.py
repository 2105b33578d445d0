"""Environments of gymnasium, as text."""

from rlhf_plugin_gymnasium.agent import Gymnasium
from rlhf_plugin_gymnasium.tasks import GymnasiumTasks

__all__ = ["Gymnasium", "GymnasiumTasks"]
