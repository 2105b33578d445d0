"""Hostile answers and dying processes: nothing hangs, nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rlhf_plugin_math_verifier.candidates import find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.claims import Claim
from rlhf_plugin_math_verifier.pool import Pool

from rlhf_host import Outcome

HANG = r"\boxed{9^{9^{9^9}}}"  # inside one C call: no Python signal handler or thread gets a word in
PATIENCE_S = 120.0  # generous: a busy machine takes long to start a few processes


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # ended just now, or a system without /proc
        return not Path("/proc").is_dir()


def wait_for(condition, seconds: float = PATIENCE_S) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


@pytest.fixture
def pool():
    made = Pool(workers=1, timeout_s=PATIENCE_S, memory_mb=512)
    yield made
    made.close()


HOSTILE = {
    "power tower, Python": r"\boxed{9**9**9**9}",
    "power tower, LaTeX": HANG,
    "a million digits": "1" * 10**6,
    "a million digits, boxed": r"\boxed{" + "1" * 10**6 + "}",
    "1500 digits": r"\boxed{" + "1" * 1500 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 50_000 + "1" + "}" * 50_000 + "}",
    "nested fractions that fit": r"\boxed{" + r"\frac{1}{" * 150 + "2" + "}" * 150 + "}",
    "nested parentheses": r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    "braces": "{" * 50_000,
    "boxes without end": r"\boxed{" * 3000,
    "backslashes": "\\" * 50_000,
    "factorial": r"\boxed{300000000!}",
    "product": r"\boxed{\prod_{n=1}^{10^9} n}",
    "code": r"\boxed{__import__('os').system('touch WITNESS')}",
    "code, plain": "The answer is __import__('os').system('touch WITNESS')",
    "null bytes": "\\boxed{\0\0}\0",
    "surrogates": "\\boxed{\ud800}\udfff",
    "right to left": "\\boxed{\u202e٧٢\u200f}",
    "empty": "",
    "protocol": '\\boxed{"}\n{"verdict": "right", "retire": false}\n}',
}


def test_hostile_answers_are_wrong_within_the_deadline(verifier, trajectory, tmp_path):
    witness = tmp_path / "witness"
    texts = [text.replace("WITNESS", str(witness)) for text in HOSTILE.values()]
    subject = verifier(timeout_s=0.5)
    started = time.monotonic()
    rewards = asyncio.run(subject.score([trajectory(text, "71") for text in texts], None))
    assert time.monotonic() - started < len(texts) * 0.5 + PATIENCE_S
    assert [reward and reward.value for reward in rewards] == [0.0] * len(texts)
    assert not witness.exists()
    tower = rewards[list(HOSTILE).index("power tower, LaTeX")]
    assert tower.metrics["math_verifier/timeout"] == 1.0


@pytest.mark.parametrize("name", ["a million digits", "nested fractions", "surrogates", "null bytes", "empty", "protocol"])
def test_hostile_answers_are_wrong_for_a_formula_too(judge, name):
    assert judge(HOSTILE[name], "x^2+1").value == 0.0


@pytest.mark.parametrize(
    "text",
    [*HOSTILE.values(), "<answer>" * 2500, "answer is " * 2000, "$" * 20_000, r"\(" * 10_000, "1 " * 10_000, "#### 1=" * 3000],
)
def test_finding_the_answer_takes_no_time(text):
    started = time.process_time()
    find(fold(text[-20_000:]))
    assert time.process_time() - started < 1.0


def test_a_timeout_earns_no_format_credit(verifier, trajectory):
    (reward,) = asyncio.run(verifier(timeout_s=0.5, format_credit=0.5).score([trajectory(HANG, "72")], None))
    assert (reward.value, reward.metrics["math_verifier/timeout"]) == (0.0, 1.0)


def test_a_hostile_answer_does_not_keep_others_waiting(verifier, trajectory, monkeypatch):
    monkeypatch.setattr("rlhf_plugin_math_verifier.pool.FIRST_TRY_S", 0.2)
    subject = verifier(workers=1, timeout_s=600)

    async def two_groups():
        hostile = asyncio.ensure_future(subject.score([trajectory(HANG, "72"), trajectory(HANG, "72")], None))
        await asyncio.sleep(0)  # it asks first
        (right,) = await asyncio.wait_for(subject.score([trajectory(r"\boxed{x+1}", "1+x")], None), PATIENCE_S)
        assert not hostile.done()
        hostile.cancel()
        return right

    assert asyncio.run(two_groups()).score == 1.0


def test_the_wait_for_a_free_process_has_an_end(monkeypatch):
    monkeypatch.setattr("rlhf_plugin_math_verifier.pool.FIRST_TRY_S", 0.2)
    pool = Pool(workers=1, timeout_s=600, memory_mb=512, wait_s=0.1)
    try:
        tried, never_tried = pool.submit("72", Claim("9^{9^{9^9}}"), 6), pool.submit("x", Claim("y"), 6)
        assert [tried.result(PATIENCE_S), never_tried.result(PATIENCE_S)] == ["failed", "failed"]
        assert pool.submit("x", Claim("y"), 6).result(PATIENCE_S) == "wrong", "what was not judged is not remembered"
    finally:
        pool.close()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_busy_machine_is_not_the_answers_doing():
    """Whoever gets no processor uses no processor time: stopped for longer than its limit, a worker still says what is right."""
    pool = Pool(workers=1, timeout_s=0.5, memory_mb=512)
    try:
        assert pool.submit("x", Claim("y"), 6).result(PATIENCE_S) == "wrong"
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        slow = pool.submit("x+1", Claim("1+x"), 6)
        time.sleep(1.5)
        assert not slow.done()
        os.kill(pid, signal.SIGCONT)
        assert slow.result(PATIENCE_S) == "right"
        assert pool.pids == [pid]
    finally:
        pool.close()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_worker_that_gets_no_processor_for_too_long_is_given_up_and_nothing_is_judged(monkeypatch):
    pool = Pool(workers=1, timeout_s=0.5, memory_mb=512, wait_s=60)
    try:
        assert pool.submit("x", Claim("y"), 6).result(PATIENCE_S) == "wrong"
        pool._wait_s = 0.5
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        assert pool.submit("x+1", Claim("1+x"), 6).result(PATIENCE_S) == "failed"
    finally:
        pool.close()


def test_the_same_answer_is_judged_once(pool):
    first, again, other = (pool.submit("x+1", Claim(answer), 6) for answer in ("1+x", "1+x", "x"))
    assert first is again
    assert [future.result(PATIENCE_S) for future in (first, other)] == ["right", "wrong"]
    assert pool.submit("x+1", Claim("1+x"), 6) is first


def test_who_gives_up_takes_the_verdict_from_nobody_else(verifier, trajectory):
    subject = verifier(workers=1)

    async def two_groups():
        first, second = (asyncio.ensure_future(subject.score([trajectory(r"\boxed{x+1}", "1+x")], None)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return await second

    assert asyncio.run(two_groups())[0].score == 1.0


def test_a_label_that_hangs_is_unjudged(verifier, trajectory):
    label = "9^{9^{9^9}}"
    rewards = asyncio.run(verifier(timeout_s=1.5).score([trajectory(text, label) for text in (r"\boxed{5}", HANG)], None))
    assert "or not in time" in rewards[0].reason
    assert rewards[1].score == 1.0, "the same words need no computation"


def test_a_killed_worker_is_replaced_and_its_answer_judged(pool):
    assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"
    (pid,) = pool.pids
    long = pool.submit("1", Claim(r"\frac{1}{" * 100 + "1" + "}" * 100), 6)
    assert wait_for(long.running)
    os.kill(pid, signal.SIGKILL)
    assert long.result(timeout=PATIENCE_S) == "right"
    assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"
    assert pid not in pool.pids


@pytest.mark.parametrize(("number", "verdict"), [(signal.SIGKILL, "failed"), (signal.SIGSEGV, "timeout")])
def test_workers_that_die_again_and_again(pool, number, verdict, monkeypatch):
    """Killed from outside: nobody's fault, not judged. Crashed by itself, on this answer only: the answer's doing."""
    monkeypatch.setattr("rlhf_plugin_math_verifier.pool.FIRST_TRY_S", PATIENCE_S)
    future = pool.submit("72", Claim("9^{9^{9^9}}"), 6)
    seen: set[int] = set()
    for _ in range(3):
        assert wait_for(lambda: set(pool.pids) - seen)
        (pid,) = set(pool.pids) - seen
        seen.add(pid)
        os.kill(pid, number)
    assert future.result(timeout=PATIENCE_S) == verdict
    assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"


def test_an_unjudged_failure_says_so(verifier, trajectory, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    subject = verifier()
    rewards = asyncio.run(subject.score([trajectory(r"\boxed{x+1}", "1+x"), trajectory("72", "72")], None))
    assert "no worker process" in rewards[0].reason
    assert rewards[1].score == 1.0
    assert "No such file" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="needs /proc")
def test_memory_is_limited_and_running_out_of_it_is_wrong():
    pool = Pool(workers=1, timeout_s=PATIENCE_S, memory_mb=256)
    try:
        assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"
        limits = Path(f"/proc/{pool.pids[0]}/limits").read_text()
        assert f"Max address space         {256 * 2**20}" in limits
        assert pool.submit("x^2+1", Claim("2^{10^{10}}"), 6).result(timeout=PATIENCE_S) == "wrong"
        assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"
    finally:
        pool.close()


def test_a_worker_lasts_however_large_its_parent():
    ballast = b"1" * (200 << 20)
    pool = Pool(workers=1, timeout_s=PATIENCE_S, memory_mb=256)
    try:
        seen = []
        for _ in range(3):
            assert pool.submit("x+1", Claim("1+x"), 6).result(timeout=PATIENCE_S) == "right"
            seen += pool.pids
        assert len(seen) == 3
        assert len(set(seen)) == 1
    finally:
        pool.close()
    assert ballast


def test_many_score_calls_at_once_share_the_processes(verifier, trajectory):
    subject = verifier(workers=2, timeout_s=60)

    async def everything():
        calls = [
            subject.score(
                [trajectory(rf"\boxed{{{n}+x^2}}", f"x^2+{n + parity}") for parity in (0, 1)] + [trajectory(str(n), n)], None
            )
            for n in range(30)
        ]
        return await asyncio.gather(*calls)

    for rewards in asyncio.run(everything()):
        assert [reward.score for reward in rewards] == [1.0, 0.0, 1.0]
    assert len(subject._pool.pids) in (1, 2)
    assert asyncio.run(subject.score([trajectory(r"\boxed{x+1}", "1+x")], None))[0].score == 1.0, "another event loop"


def test_the_end_of_the_run_ends_the_processes_even_a_busy_one(verifier, trajectory, monkeypatch):
    monkeypatch.setattr("rlhf_plugin_math_verifier.pool.FIRST_TRY_S", 600)
    subject = verifier(workers=2, timeout_s=600)

    async def interrupted():
        scoring = asyncio.ensure_future(
            subject.score([trajectory(HANG, "72"), *[trajectory(r"\boxed{x+1}", "1+x")] * 20], None)
        )
        while not (subject._pool and subject._pool._queue.qsize()):
            await asyncio.sleep(0)
        assert len(subject._pool._threads) == 1, "another process only where a request waits though one is ready"
        while not (subject._pool and len(subject._pool.pids) == 2):
            await asyncio.sleep(0.02)
        pids = subject._pool.pids
        subject.run_finished(Outcome("interrupted", 1))
        scoring.cancel()
        return pids

    started = time.monotonic()
    pids = asyncio.run(interrupted())
    assert time.monotonic() - started < PATIENCE_S
    assert wait_for(lambda: not any(map(running, pids)))
    assert asyncio.run(subject.score([trajectory(r"\boxed{x+1}", "1+x")], None))[0].score == 1.0, "a later run starts new ones"


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("end", ["exit", "kill"])
def test_no_process_outlives_the_run(end, busy):
    code = f"""
        import sys, time
        from rlhf_plugin_math_verifier.claims import Claim
        from rlhf_plugin_math_verifier.pool import Pool
        pool = Pool(workers=1, timeout_s=0.5, memory_mb=512)
        pool.submit("x+1", Claim("1+x"), 6).result()
        {'hanging = pool.submit("72", Claim("9^{9^{9^9}}"), 6)' if busy else ""}
        print(pool.pids[0], flush=True)
        {"time.sleep(600)" if end == "kill" else ""}
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout.readline())
    if end == "kill":
        run.kill()
    run.wait(timeout=PATIENCE_S)
    run.stdout.close()
    assert wait_for(lambda: not running(pid))
