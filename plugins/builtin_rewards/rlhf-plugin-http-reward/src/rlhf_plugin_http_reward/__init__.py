"""Reward servers that speak OpenRLHF's remote reward protocol."""

from rlhf_plugin_http_reward.reward import HttpReward

__all__ = ["HttpReward"]
