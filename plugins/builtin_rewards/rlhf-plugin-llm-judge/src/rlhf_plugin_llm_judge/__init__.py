"""A language model as judge."""

from rlhf_plugin_llm_judge.reward import LLMJudge

__all__ = ["LLMJudge"]
