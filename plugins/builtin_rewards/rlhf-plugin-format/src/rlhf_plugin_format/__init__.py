"""Has the answer the form that was asked for?"""

from rlhf_plugin_format.reward import Format

__all__ = ["Format"]
