"""Any program that speaks OpenAI's API is an environment."""

from rlhf_plugin_openai_agent.agent import OpenAIAgent

__all__ = ["OpenAIAgent"]
