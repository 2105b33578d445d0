"""Language models as judges: of each answer, of a group at once, by criteria of the row, or of pairs."""

from rlhf_plugin_llm_judge.reward import LLMJudge
from rlhf_plugin_llm_judge.rubrics import Rubrics
from rlhf_plugin_llm_judge.ruler import Ruler
from rlhf_plugin_llm_judge.tournament import Tournament

__all__ = ["LLMJudge", "Rubrics", "Ruler", "Tournament"]
