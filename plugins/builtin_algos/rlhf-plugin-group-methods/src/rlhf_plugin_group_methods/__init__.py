"""Relatives of GRPO: other baselines (MaxRL, OPO, OTB, GiGPO), and other losses (GMPO, LUSPO, VESPO)."""

from rlhf_plugin_group_methods.gigpo import GiGPO
from rlhf_plugin_group_methods.gmpo import GMPO
from rlhf_plugin_group_methods.luspo import LUSPO
from rlhf_plugin_group_methods.maxrl import MaxRL
from rlhf_plugin_group_methods.opo import OPO
from rlhf_plugin_group_methods.otb import OTB
from rlhf_plugin_group_methods.vespo import VESPO

__all__ = ["GMPO", "LUSPO", "OPO", "OTB", "VESPO", "GiGPO", "MaxRL"]
