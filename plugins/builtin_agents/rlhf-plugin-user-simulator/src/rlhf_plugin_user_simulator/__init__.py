"""A second model plays a user with a goal, and the policy talks to it."""

from rlhf_plugin_user_simulator.agent import UserSimulator

__all__ = ["UserSimulator"]
