"""docs/algorithms.md points to tests that are there, and tells the options that are there."""

import re
from pathlib import Path

import pytest
from rlhf_plugin_distill import SDPO, Distill, OnPolicyDistill
from rlhf_plugin_dpo import CDPO, CPO, DPO, IPO, TPO
from rlhf_plugin_group_methods import GMPO, LUSPO, OPO, OTB, VESPO, GiGPO, MaxRL
from rlhf_plugin_grpo import GDPO, GRPO, DrGRPO
from rlhf_plugin_kto import KTO
from rlhf_plugin_kto.dro import DRO
from rlhf_plugin_off_policy import TIS, IcePop, OffPolicyMask, SequenceMask, SequenceTruncate
from rlhf_plugin_off_policy.m2po import M2PO
from rlhf_plugin_online_dpo import OnlineDPO
from rlhf_plugin_online_dpo.a2po import A2PO
from rlhf_plugin_online_dpo.rivals import XPO, NashMD
from rlhf_plugin_online_dpo.spin import SPIN
from rlhf_plugin_ppo import PPO
from rlhf_plugin_raft import RAFT
from rlhf_plugin_reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rlhf_plugin_remax import ReMax
from rlhf_plugin_reward_model_training import ProcessRewardModel, RewardModel
from rlhf_plugin_rloo import RLOO
from rlhf_plugin_sft import SFT

from rlhf_host import functional as F

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "algorithms.md"
PLUGINS = {
    "ppo": PPO,
    "reinforce_pp": ReinforcePP,
    "reinforce_pp_baseline": ReinforcePPBaseline,
    "rloo": RLOO,
    "grpo": GRPO,
    "dr_grpo": DrGRPO,
    "gdpo": GDPO,
    "sft": SFT,
    "dpo": DPO,
    "cdpo": CDPO,
    "ipo": IPO,
    "cpo": CPO,
    "tpo": TPO,
    "kto": KTO,
    "dro_v": DRO,
    "rm": RewardModel,
    "prm": ProcessRewardModel,
    "distill": Distill,
    "on_policy_distill": OnPolicyDistill,
    "sdpo": SDPO,
    "maxrl": MaxRL,
    "opo": OPO,
    "otb": OTB,
    "remax": ReMax,
    "gigpo": GiGPO,
    "raft": RAFT,
    "online_dpo": OnlineDPO,
    "xpo": XPO,
    "nash_md": NashMD,
    "spin": SPIN,
    "a2po": A2PO,
    "tis": TIS,
    "icepop": IcePop,
    "sequence_truncate": SequenceTruncate,
    "sequence_mask": SequenceMask,
    "off_policy_mask": OffPolicyMask,
    "m2po": M2PO,
}


def tables() -> list[tuple[list[str], list[list[str]]]]:
    """Header and rows of each table of the page."""
    found: list[tuple[list[str], list[list[str]]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((lines[0], lines[2:]))
    return found


def options() -> dict[str, dict[str, str]]:
    """Name of a plugin or loss → its options → the default told, or an empty string."""
    cells = {}
    for header, rows in tables():
        column = next((i for i, title in enumerate(header) if title in ("own options", "options")), None)
        cells |= {row[0].strip("`"): row[column] for row in rows if column is not None}
    told = {}
    for name, cell in cells.items():
        base = re.match(r"those of `(\w+)`,? ?", cell)
        whole = f"{cells[base[1]]}, {cell[base.end() :]}" if base else cell
        told[name] = dict(re.findall(r"`(\w+)`(?: ([\w.-]+))?", whole))
    return told


def test_every_row_of_differences_names_tests_that_are_there():
    names = {path.stem for path in HERE.glob("test_*.py")}
    names |= {name for path in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    rows = [row for header, rows in tables() if header[-1] == "`-k`" for row in rows]
    assert len(rows) > 40
    assert [row[0] for row in rows if not re.findall(r"`\w+`", row[-1])] == []
    named = [word for row in rows for word in re.findall(r"`(\w+)`", row[-1])]
    assert [word for word in named if not any(word in name for name in names)] == []


@pytest.mark.parametrize(("name", "plugin"), [("gmpo", GMPO), ("luspo", LUSPO), ("vespo", VESPO)])
def test_the_options_of_an_algorithm_with_a_loss_of_its_own_are_those_of_two_rows(name, plugin):
    fields = plugin.Options.model_fields
    told = options()[name] | options()["gmpo`, `luspo`, `vespo"]
    assert set(told) == set(fields)
    assert_defaults(told, fields)


@pytest.mark.parametrize("name", PLUGINS)
def test_the_options_of_a_plugin_are_those_of_its_row(name):
    fields = PLUGINS[name].Options.model_fields
    shared = F.PolicyLossOptions.model_fields if issubclass(PLUGINS[name].Options, F.PolicyLossOptions) else {}
    assert set(options()[name]) == set(fields) - set(shared)
    assert_defaults(options()[name], fields)


def test_the_policy_losses_and_their_options_are_those_of_the_page():
    told = {name: found for name, found in options().items() if name in F.policy_losses}
    assert set(told) == set(F.policy_losses)
    together = {name: default for found in told.values() for name, default in found.items()}
    assert set(together) == set(F.PolicyLossOptions.model_fields) - {"loss", "aggregation", "entropy_coef"}
    assert_defaults(together, F.PolicyLossOptions.model_fields)


def assert_defaults(told, fields):
    for name, default in told.items():
        known = fields[name].default
        assert default == "" or (default == known if isinstance(known, str) else float(default) == known), name
