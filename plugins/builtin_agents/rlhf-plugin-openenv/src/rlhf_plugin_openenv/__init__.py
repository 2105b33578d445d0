"""OpenEnv environments, over their WebSocket."""

from rlhf_plugin_openenv.agent import OpenEnv

__all__ = ["OpenEnv"]
