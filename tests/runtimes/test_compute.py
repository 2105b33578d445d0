"""The one thread that computes: order, errors, and how many threads its operators use."""

import asyncio
import threading

import pytest
import torch

from rlhf_host.runtimes.compute import Inline, OneThread


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    compute = OneThread(2)
    yield compute
    compute.close()
    torch.set_num_threads(before)


def test_work_is_done_in_order_on_a_thread_of_its_own(one_thread):
    done = []
    futures = [one_thread.submit(lambda n=n: done.append((n, threading.current_thread().name))) for n in range(20)]
    for future in futures:
        future.result(10)
    assert done == [(n, "rlhf-compute") for n in range(20)]


def test_its_operators_use_the_threads_they_were_given_and_the_callers_use_one(one_thread):
    assert one_thread.submit(torch.get_num_threads).result(10) == 2
    assert torch.get_num_threads() == 1


def test_a_second_one_has_as_many_threads_as_the_first(monkeypatch):
    monkeypatch.setattr(OneThread, "found", 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for _ in range(2):
            compute = OneThread()
            assert compute.submit(torch.get_num_threads).result(10) == 2
            compute.close()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [OneThread, Inline])
def test_errors_go_to_who_asked_and_the_next_work_is_done(kind):
    def explode():
        raise ZeroDivisionError

    compute = kind()
    with pytest.raises(ZeroDivisionError):
        compute.submit(explode).result(10)
    assert compute.submit(lambda: 3).result(10) == 3
    compute.close()


def test_work_that_nobody_wants_any_more_is_left_out(one_thread):
    begun, go, done = threading.Event(), threading.Event(), []
    one_thread.submit(lambda: (begun.set(), go.wait(10)))
    begun.wait(10)
    unwanted = one_thread.submit(lambda: done.append("unwanted"))
    assert unwanted.cancel()
    go.set()
    one_thread.submit(lambda: done.append("wanted")).result(10)
    assert done == ["wanted"]


def test_inline_work_is_done_here_and_an_interrupt_passes_through():
    assert Inline().submit(threading.current_thread).result() is threading.current_thread()

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Inline().submit(interrupt)


def test_whoever_awaits_work_that_stops_an_iteration_hears_of_it():
    async def work():
        await asyncio.wait_for(asyncio.wrap_future(Inline().submit(lambda: next(iter(())))), 5)

    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(work())
