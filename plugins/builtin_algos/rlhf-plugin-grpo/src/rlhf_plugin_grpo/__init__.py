"""GRPO, Dr. GRPO and GDPO: a completion is judged against the others of its group, without a critic."""

from rlhf_plugin_grpo.dr_grpo import DrGRPO
from rlhf_plugin_grpo.gdpo import GDPO
from rlhf_plugin_grpo.grpo import GRPO

__all__ = ["GDPO", "GRPO", "DrGRPO"]
