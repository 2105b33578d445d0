"""Text games of TextArena, by self-play or against a frozen opponent."""

from rlhf_plugin_textarena.agent import TextArena
from rlhf_plugin_textarena.tasks import TextArenaTasks

__all__ = ["TextArena", "TextArenaTasks"]
