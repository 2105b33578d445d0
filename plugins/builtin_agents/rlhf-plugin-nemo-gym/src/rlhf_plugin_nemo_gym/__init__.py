"""Environments of NeMo Gym, over HTTP."""

from rlhf_plugin_nemo_gym.agent import NemoGym
from rlhf_plugin_nemo_gym.rows import NemoGymRows

__all__ = ["NemoGym", "NemoGymRows"]
