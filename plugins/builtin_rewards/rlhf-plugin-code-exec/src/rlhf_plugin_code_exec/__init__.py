"""Does the code work? Programs of the policy's, contained."""

from rlhf_plugin_code_exec.reward import CodeExec

__all__ = ["CodeExec"]
