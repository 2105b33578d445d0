"""Reward for code that works: runs the policy's programs, contained."""

from rlhf_plugin_code_exec.reward import CodeExec

__all__ = ["CodeExec"]
