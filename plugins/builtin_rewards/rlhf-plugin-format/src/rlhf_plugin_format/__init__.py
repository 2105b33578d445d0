"""Reward for answers in the required form."""

from rlhf_plugin_format.reward import Format

__all__ = ["Format"]
