"""Needs of plugins, together: each kind of plugin says what is its own, and nobody says what nobody would ask for."""

from __future__ import annotations

import pytest

from rlhf_host import AgentNeeds, AlgoNeeds, CorrectionNeeds, Follow, Needs, PluginError, RewardNeeds, RoleNeed, hookimpl
from rlhf_host.config.resolve import merge_needs
from rlhf_host.plugins.discovery import PluginInfo
from rlhf_host.plugins.manager import Loaded, PluginManager


def manager(*plugins):
    loaded = []
    for number, (kind, needs, *hooks) in enumerate(plugins):
        methods = {"needs": hookimpl(lambda self, needs=needs: needs() if callable(needs) else needs)}
        methods |= {name: hookimpl(lambda self: None) for name in hooks}
        info = PluginInfo(kind, f"p{number}", "made-up", "1.0", ">=0.10", "ok", "", "m:X")
        loaded.append(Loaded(kind, f"p{number}", info, type("Plugin", (), methods)()))
    return PluginManager(loaded)


def test_what_is_an_algorithm_s_own_stays_and_what_all_may_say_is_joined():
    found = merge_needs(
        manager(
            ("algo", AlgoNeeds("preference", unit_rows=True, separator="|")),
            ("extension", Needs(min_group_size=3, rewards=False)),
            ("agent", AgentNeeds(server=True, on_policy=True), "agent_reset"),
        )
    )
    assert (found.data, found.unit_rows, found.separator) == ("preference", True, "|")
    assert (found.min_group_size, found.rewards, found.on_policy) == (3, False, True)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (
            ("agent", AlgoNeeds(), "agent_reset"),
            "agent:p0 returns AlgoNeeds from needs, which is not for an agent: return AgentNeeds",
        ),
        (
            ("reward", AgentNeeds(), "score"),
            "reward:p0 returns AgentNeeds from needs, which is not for a reward: return RewardNeeds",
        ),
        (("tracker", RewardNeeds()), "tracker:p0 returns RewardNeeds from needs, which is not for a tracker: return Needs"),
        (("extension", AlgoNeeds()), "extension:p0 returns AlgoNeeds from needs, which is not for an extension: return Needs"),
        (("extension", RewardNeeds()), "extension:p0 returns RewardNeeds from needs, and has no score: return Needs"),
        (("extension", CorrectionNeeds()), "extension:p0 returns CorrectionNeeds from needs, and has no importance_weights"),
        (("algo", lambda: Needs(unit_rows=True)), "unexpected keyword argument 'unit_rows'"),
        (("algo", lambda: Needs(min_group_size=2.0)), "Needs: min_group_size is a number from 1, not 2.0"),
    ],
)
def test_needs_of_another_kind_are_refused(plugin, message):
    with pytest.raises(PluginError, match=message):
        merge_needs(manager(plugin))


def test_a_role_generates_if_one_plugin_says_so():
    role = RoleNeed("reference", generates=True, mixes=0.5)
    found = merge_needs(
        manager(("algo", AlgoNeeds(roles=(RoleNeed("reference"),))), ("agent", Needs(roles=(role,)), "agent_run"))
    )
    assert found.roles == (role,)
    with pytest.raises(PluginError, match="algo:p0 and agent:p1 need the role 'reference' differently"):
        merge_needs(
            manager(
                ("algo", AlgoNeeds(roles=(RoleNeed("reference", generates=True, mixes=0.25),))),
                ("agent", Needs(roles=(role,)), "agent_run"),
            )
        )
    with pytest.raises(PluginError, match=r"need the role 'reference' differently: .* follows another"):
        merge_needs(
            manager(
                ("algo", AlgoNeeds(roles=(RoleNeed("reference", follows=Follow(0.5)),))),
                ("agent", Needs(roles=(RoleNeed("reference", generates=True),)), "agent_run"),
            )
        )
