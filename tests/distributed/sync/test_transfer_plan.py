"""Who sends to whom, and how, on invented devices."""

from __future__ import annotations

from rlhf_host.distributed.sync.transfer_plan import Place, Route, plan_transfers


def gpus(*numbers, machine="a", sends=True):
    return [Place(machine, "cuda", f"{machine}{number}", sends) for number in numbers]


def cpus(count, machine="a"):
    return [Place(machine, "cpu") for _ in range(count)]


def every_bucket_arrives_once(routes, engines):
    for number in range(engines):
        mine = [route for route in routes if number in route.receivers]
        for bucket in range(12):
            assert sum(bucket % route.shares == route.share for route in mine) == 1


def test_eight_together_are_eight_pairs():
    routes = plan_transfers(gpus(*range(8)), gpus(*range(8)))
    assert routes == tuple(Route("ipc", rank, (rank,)) for rank in range(8))


def test_four_apart_with_tensor_parallelism_are_one_group_of_five():
    (route,) = plan_transfers(gpus(0), gpus(1, 2, 3, 4))
    assert route == Route("nccl", 0, (0, 1, 2, 3))


def test_every_gpu_of_the_first_machine_sends_a_share():
    trainer = [*gpus(0, 1), *gpus(0, 1, machine="b")]
    routes = plan_transfers(trainer, gpus(0, 1, 2, machine="c"))
    assert routes == (Route("nccl", 0, (0, 1, 2), 0, 2), Route("nccl", 1, (0, 1, 2), 1, 2))
    every_bucket_arrives_once(routes, 3)


def test_a_mixture_has_pairs_and_groups():
    engines = [*gpus(0, 5), *gpus(0, machine="b")]
    routes = plan_transfers(gpus(0, 1), engines)
    assert routes == (Route("ipc", 0, (0,)), Route("nccl", 0, (1, 2), 0, 2), Route("nccl", 1, (1, 2), 1, 2))
    every_bucket_arrives_once(routes, 3)


def test_gpus_of_two_machines_are_not_mixed_up():
    """Their names may be the same: then the machine decides."""
    trainer = [Place("a", "cuda", "0"), Place("b", "cuda", "0")]
    assert plan_transfers(trainer, [Place("b", "cuda", "0")]) == (Route("ipc", 1, (0,)),)
    assert plan_transfers(trainer[:1], [Place("b", "cuda", "0")]) == (Route("nccl", 0, (0,)),)


def test_cpus_go_through_main_memory_with_the_reason():
    assert plan_transfers(cpus(2), cpus(2)) == (Route("gloo", 0, (0, 1), reason="the engine takes weights on cpu"),)
    assert [route.kind for route in plan_transfers(cpus(2), cpus(2), "host")] == ["host"]
    (route,) = plan_transfers(cpus(1), gpus(0, 1))
    assert (route.kind, route.reason) == ("gloo", "the trainer's rank 0 computes on cpu")


def test_only_those_that_nccl_refuses_go_through_main_memory():
    routes = plan_transfers(gpus(0), [*gpus(1, 1, 2), *cpus(1)])
    assert routes == (
        Route("nccl", 0, (2,)),
        Route("gloo", 0, (0, 1), reason="several processes of engines are on one GPU, which NCCL refuses"),
        Route("gloo", 0, (3,), reason="the engine takes weights on cpu"),
    )
    every_bucket_arrives_once(routes, 4)


def test_a_rank_without_whole_weights_sends_nothing():
    trainer = [*gpus(0), *gpus(1, sends=False)]
    routes = plan_transfers(trainer, gpus(0, 1, 2))
    assert [(route.kind, route.sender, route.receivers) for route in routes] == [
        ("ipc", 0, (0,)),
        ("nccl", 0, (2,)),
        ("gloo", 0, (1,)),
    ]
    assert "never has whole weights" in routes[2].reason


def test_two_engines_on_one_ranks_gpu_read_the_same_memory():
    assert plan_transfers(gpus(0), gpus(0, 0)) == (Route("ipc", 0, (0, 1)),)


def test_routes_travel_as_plain_values():
    for route in plan_transfers(gpus(0, 1), [*gpus(0, 4), *cpus(1)]):
        assert Route.from_plain(route.to_plain()) == route
