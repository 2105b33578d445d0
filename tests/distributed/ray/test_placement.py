"""Placement: what a text means, where every role goes, and why a cluster cannot hold it."""

import pytest

from rlhf_host.distributed.ray.placement import (
    Block,
    Node,
    asked,
    cpu_shares,
    describe,
    parse_placement,
    plan_placement,
    rank_order,
    refuse_apart,
    shortage,
    unsaid,
)
from rlhf_host.errors import UserError
from rlhf_host.records.needs import Needs, Output

ROLES = ["actor", "reference", "critic"]


def plan(*texts, roles=ROLES, **settings):
    return plan_placement(parse_placement(texts), roles, **settings)


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("actor=1", Block(("actor",), 1)),
        ("actor+reference+rollout=4", Block(("actor", "reference", "rollout"), 4)),
        ("critic=2x4", Block(("critic",), 4, nodes=2)),
        ("actor + rollout = 8 : gpu", Block(("actor", "rollout"), 8, kind="gpu")),
        ("rollout=3:cpu:spread", Block(("rollout",), 3, kind="cpu", strategy="SPREAD")),
        ("rollout=3:strict_pack", Block(("rollout",), 3, strategy="STRICT_PACK")),
        ("reward-model=1", Block(("reward",), 1)),  # as its flags are spelled
        ("my_role=1", Block(("my_role",), 1)),
    ],
)
def test_a_text_is_roles_devices_and_words(text, block):
    assert parse_placement([text]) == [block]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["actor"], "is not ROLE\\+ROLE=DEVICES"),
        (["actor=four"], "is not ROLE\\+ROLE=DEVICES"),
        (["actor=2x"], "is not ROLE\\+ROLE=DEVICES"),
        (["actor=0"], "asks for no device at all"),
        (["actor=0x4"], "asks for no device at all"),
        (["actor++critic=1"], "name each role once"),
        (["actor+actor=1"], "name each role once"),
        (["actor=1:gpus"], "'gpus' is not understood; did you mean 'gpu'"),
        (["actor=1:cpu:gpu"], "'gpu' is not understood"),
        (["actor=1", "critic+actor=2"], "actor is placed twice, in 'actor=1' and in 'critic\\+actor=2'"),
    ],
)
def test_what_is_no_placement_is_refused(texts, said):
    with pytest.raises(UserError, match=said):
        parse_placement(texts)


def test_without_a_placement_everything_shares_one_device():
    (place,) = plan()
    assert place.roles == ("actor", "reference", "critic")
    assert (place.devices, place.engines, place.shared) == (1, ((0,),), True)


def test_roles_named_together_share_devices_and_apart_do_not():
    actor, critic = plan("actor+reference+rollout=4", "critic=2")
    assert actor.roles == ("actor", "reference")
    assert (actor.bundles, actor.strategy, actor.engines, actor.shared) == (
        (1, 1, 1, 1),
        "PACK",
        ((0,), (1,), (2,), (3,)),
        True,
    )
    assert (critic.roles, critic.devices, critic.sampled, critic.shared) == (("critic",), 2, (), False)


def test_what_no_block_names_goes_where_the_actor_is():
    actor, rollout = plan("actor=2", "rollout=3")
    assert actor.roles == ("actor", "reference", "critic")
    assert (rollout.roles, len(rollout.engines), rollout.shared) == ((), 3, False)


def test_without_the_actor_the_rest_has_a_device_of_its_own():
    rest, critic = plan("critic=2")
    assert (rest.roles, rest.devices, rest.sampled) == (("actor", "reference"), 1, ("rollout",))
    assert critic.devices == 2


def test_nodes_times_devices_are_one_bundle_on_each_of_different_nodes():
    (place,) = plan("actor+rollout+reference+critic=2x4:gpu")
    assert (place.kind, place.bundles, place.strategy) == ("gpu", (4, 4), "STRICT_SPREAD")
    assert [place.bundle_of(device) for device in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_the_devices_of_a_parallel_engine_are_in_one_bundle():
    (place,) = plan("actor+reference+critic+rollout=4", per_engine=2)
    assert place.bundles == (2, 2)
    assert place.engines == ((0, 1), (2, 3))


def test_engines_that_do_not_come_out_even_are_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"an engine takes 2 devices .* and 3 do not divide by 2"):
        plan("rollout=3", per_engine=2)
    with pytest.raises(UserError, match=r"an engine takes 4 devices .* and 2 on each node do not divide by 4"):
        plan("rollout=2x2", per_engine=4)


def test_roles_of_the_house_that_this_run_does_not_need_are_passed_over():
    (place,) = plan("actor+reference+rollout=2", roles=["actor"])
    assert place.roles == ("actor",)


def test_roles_that_nobody_knows_or_needs_are_refused():
    with pytest.raises(UserError, match="no chosen plugin knows the role 'actr'; did you mean 'actor'"):
        plan("actr=2")
    with pytest.raises(UserError, match=r"placement critic=2: no chosen plugin needs critic; .* actor, rollout"):
        plan("critic=2", roles=["actor"])


def test_the_kind_of_devices_is_the_cluster_s_unless_said():
    actor, critic = plan("actor=1", "critic=1:cpu", default_kind="gpu")
    assert (actor.kind, critic.kind) == ("gpu", "cpu")


@pytest.mark.parametrize(
    ("text", "devices", "kinds"),
    [
        (["actor=1", "rollout=1"], {"actor": "cuda"}, ("gpu", "gpu")),  # engines follow the actor
        (["actor=1", "rollout=1:cpu"], {"actor": "cuda:0"}, ("gpu", "cpu")),
        (["actor=1", "critic=1"], {"actor": "cuda", "critic": "cpu"}, ("gpu", "cpu")),
        (["actor=1:gpu", "critic=1"], {"actor": "cpu"}, ("gpu", "cpu")),
        ([], {"actor": "cpu"}, ("cpu",)),
    ],
)
def test_the_kind_is_what_the_placement_or_the_role_says(text, devices, kinds):
    plans = [
        plan_placement(parse_placement(text), ["actor", "critic"], devices=devices, default_kind=kind)
        for kind in ("cpu", "gpu")
    ]
    assert [tuple(place.kind for place in places) for places in plans] == [kinds, kinds]
    assert unsaid(*plans) == []


def test_places_whose_kind_nobody_says():
    as_cpu, as_gpu = plan("actor=1", "critic=1:cpu"), plan("actor=1", "critic=1:cpu", default_kind="gpu")
    assert [place.name for place in unsaid(as_cpu, as_gpu)] == ["actor+reference+rollout"]


def test_what_a_cluster_is_asked_for_in_words():
    places = plan("actor+reference+critic=2x4:gpu", "rollout=2:cpu")
    assert asked(places) == "2 × 4 GPUs with 4 CPUs (actor+reference+critic, STRICT_SPREAD) and 2 × 1 CPU (rollout, PACK)"
    assert [place.size for place in places] == ["2x4", "2"]


# --- what a cluster can hold --------------------------------------------------------------------


def lacking(places, *nodes):
    return shortage(places, [Node(*node) for node in nodes], remedy="join a larger cluster")


def test_a_shortage_shows_the_sum():
    places = plan("actor+reference+rollout=4", "critic=2")
    assert lacking(places, ("a", 4), ("b", 1)) == (
        "the placement needs 6 CPUs (actor+reference+rollout 4 + critic 2), and the cluster has 5 (a 4, b 1):"
        " ask for less, or join a larger cluster"
    )
    assert lacking(places, ("a", 4), ("b", 2)) is None


def test_processes_on_gpus_take_a_cpu_each():
    places = plan("actor+reference+critic+rollout=2:gpu")
    assert lacking(places, ("a", 8, 1)).startswith(
        "the placement needs 2 GPUs (actor+reference+critic+rollout 2), and the cluster has 1"
    )
    assert lacking(places, ("a", 1, 2)).startswith("the placement needs 2 CPUs")
    assert lacking(places, ("a", 2, 2)) is None


def test_nodes_that_are_too_small_are_no_nodes():
    places = plan("actor+reference+critic+rollout=2x4:gpu")
    said = lacking(places, ("a", 64, 6), ("b", 64, 2))
    assert "needs 2 different nodes with 4 GPUs, and the cluster has room for 1 (a 6, b 2)" in said
    assert lacking(places, ("a", 64, 4), ("b", 64, 4)) is None


def test_bundles_do_not_straddle_nodes():
    places = plan("actor+reference+critic=1:cpu", "rollout=4:gpu", per_engine=2)
    assert "needs 2 bundles of 2 GPUs, and the cluster has room for 1 (a 3, b 1)" in lacking(places, ("a", 8, 3), ("b", 8, 1))
    assert lacking(places, ("a", 8, 2), ("b", 8, 2)) is None


def test_strict_pack_wants_one_node():
    places = plan("actor+reference+critic+rollout=3:strict_pack")
    assert "needs 3 bundles on one node of 1 CPU, and the cluster has room for 2" in lacking(places, ("a", 2), ("b", 2))
    assert lacking(places, ("a", 3), ("b", 1)) is None


def test_frozen_roles_that_generate_have_engines_beside_their_workers():
    roles, sampled = ["actor", "opponent"], ("rollout", "opponent")
    (alone,) = plan(roles=roles, sampled=sampled)
    assert (alone.roles, alone.sampled, alone.engines) == (("actor", "opponent"), ("rollout", "opponent"), ((0,),))
    placed = plan("actor=1", "rollout=2", "opponent=4", roles=roles, sampled=sampled, per_engine=2)
    assert [(place.sampled, place.bundles, place.engines, place.shared) for place in placed] == [
        ((), (1,), (), False),
        (("rollout",), (2,), ((0, 1),), False),
        (("opponent",), (2, 2), ((0, 1), (2, 3)), True),
    ]
    said = "actor on 1 CPU, rollout on 2 CPUs (1 engine), opponent on 4 CPUs (2 engines of opponent)"
    assert describe(placed) == said
    with pytest.raises(UserError, match=r"an engine takes 2 devices .*, opponent has engines here, and 3 do not divide by 2"):
        plan("actor=1", "rollout=2", "opponent=3", roles=roles, sampled=sampled, per_engine=2)
    (nothing,) = plan(roles=roles, sampled=sampled, per_engine=None)
    assert (nothing.sampled, nothing.engines) == ((), ())


def test_a_placement_in_words():
    assert describe(plan("actor+rollout=2", "critic=1")) == "actor+reference+rollout on 2 CPUs (2 engines), critic on 1 CPU"


def test_a_whole_vocabulary_is_compared_in_one_place():
    roles = ["actor", "teacher"]
    whole = Needs(outputs=(Output("distribution", role="teacher"),))
    refuse_apart(plan(roles=roles), whole)
    refuse_apart(plan("actor+teacher=2", "rollout=1", roles=roles), whole)
    apart = plan("actor=2", "teacher=1", "rollout=1", roles=roles)
    refuse_apart(apart, Needs(outputs=(Output("distribution", role="teacher", top=8), Output("logprobs", role="teacher"))))
    with pytest.raises(
        UserError, match=r"'teacher' is compared with the actor over the whole vocabulary.*actor\+teacher=DEVICES"
    ):
        refuse_apart(apart, whole)


def test_ranks_are_in_the_order_of_machines_and_their_gpus():
    nodes = ["b", "a", "b", "a", "c", "b"]
    gpus = [["10"], ["1"], ["2"], ["0"], ["GPU-5f"], ["9"]]
    order = rank_order(nodes, gpus)
    assert [(nodes[i], *gpus[i]) for i in order] == [
        ("b", "2"), ("b", "9"), ("b", "10"), ("a", "0"), ("a", "1"), ("c", "GPU-5f"),
    ]  # fmt: skip
    assert rank_order(["a", "b", "a", "b"], [[]] * 4) == [0, 2, 1, 3], "without GPUs processes keep their order"
    assert rank_order(["a"] * 16, [[str(n)] for n in range(16)]) == list(range(16))


def test_a_machine_s_cpus_are_divided_among_its_workers():
    assert cpu_shares(["a", "a", "b", "a"], {"a": 16, "b": 8}) == [5, 5, 8, 5]
    assert cpu_shares(["a"] * 4, {"a": 2}) == [1] * 4
