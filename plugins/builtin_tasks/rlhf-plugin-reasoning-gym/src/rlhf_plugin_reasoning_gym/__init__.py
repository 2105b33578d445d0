"""Every data set of reasoning-gym, as tasks and as their reward."""

from rlhf_plugin_reasoning_gym.levels import ReasoningGymLevels
from rlhf_plugin_reasoning_gym.reward import ReasoningGymReward
from rlhf_plugin_reasoning_gym.tasks import ReasoningGym

__all__ = ["ReasoningGym", "ReasoningGymLevels", "ReasoningGymReward"]
