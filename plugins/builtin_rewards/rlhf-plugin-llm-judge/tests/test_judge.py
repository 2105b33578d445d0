"""What all judges of this package share: what is known, what it cost, and a server beside the run."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rlhf_plugin_llm_judge import LLMJudge, Ruler
from rlhf_plugin_llm_judge.cache import KnownAnswers

import rlhf_host
from rlhf_host import RunError, UserError

from .judges import Judge, judged, row, scores


def ruler(judge, **options):
    return Ruler(Ruler.Options(**{"model": "m", "base_url": judge.url, **options}))


def in_run(run_dir, plugin, *groups):
    """The rewards of groups in one run in that directory."""

    async def run():
        await plugin.run_started(SimpleNamespace(run_dir=run_dir, seed=0))
        found = [await plugin.score(group, None) for group in groups]
        await plugin.run_finished(None)
        return found

    return asyncio.run(run())


def test_a_resumed_run_asks_nothing_that_it_knows(tmp_path):
    groups = [[row("a"), row("bb")], [row("c"), row("dd")]]
    with Judge(scores(lambda answer: len(answer) / 10)) as judge:
        first = in_run(tmp_path, ruler(judge), *groups)
        [file] = (tmp_path / "judgements").iterdir()
        file.write_bytes(file.read_bytes()[:-5])  # killed while it wrote
        assert in_run(tmp_path, ruler(judge), *groups) == first
        assert len(judge.asked) == 3
        assert in_run(tmp_path, ruler(judge), *groups) == first
        assert len(judge.asked) == 3
        in_run(tmp_path, ruler(judge, temperature=0.5), groups[0])
        assert len(judge.asked) == 4, "another judge, another judgement"
        in_run(tmp_path, ruler(judge, cache_mb=0), groups[0])
        assert len(judge.asked) == 5
        for run in "ab":
            in_run(tmp_path / run, ruler(judge, cache_dir=str(tmp_path / "shared")), groups[0])
        assert len(judge.asked) == 6, "two runs, one folder"


def test_another_address_in_the_environment_is_another_judge(tmp_path, monkeypatch):
    for worth in (0.1, 0.9):
        with Judge(scores(lambda answer, worth=worth: worth)) as judge:
            monkeypatch.setenv("OPENAI_BASE_URL", judge.url)
            in_run(tmp_path, ruler(judge, base_url=None), [row("a"), row("bb")])
            assert len(judge.asked) == 1


def test_judgements_stay_below_their_bound_and_the_oldest_go(tmp_path):
    kept = KnownAnswers(1000)
    kept.open(tmp_path / "file.jsonl")
    for number in range(100):
        kept.get("0")
        kept.put(str(number), "x" * 50, False)
        assert kept.used <= 1000
        assert (tmp_path / "file.jsonl").stat().st_size < 2500
    assert kept.get("0") == ("x" * 50, False), "used lately"
    assert kept.get("99")
    assert not kept.get("1")
    kept.put("large", "x" * 2000, False)
    assert not kept.get("large")
    kept.close()
    again = KnownAnswers(1000)
    again.open(tmp_path / "file.jsonl")
    assert again.get("99") == ("x" * 50, False)


def test_a_folder_that_cannot_be_written_is_told_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with Judge(scores(lambda answer: 0.5)) as judge:
        in_run(tmp_path, ruler(judge, cache_dir=str(tmp_path / "file")), [row("a"), row("b")])
    assert "answers are kept in memory alone" in caplog.text


def test_calls_tokens_costs_and_failures_are_metrics_of_a_step(caplog):
    def say(text, number):
        return "no" if "bad" in text else scores(lambda answer: 0.5)(text, number)

    with Judge(say, takes_s=0.01) as judge:
        plugin = ruler(judge, price_in=2, price_out=5)
        caplog.set_level(logging.INFO)
        judged(plugin, row("a"), row("b"))
        judged(plugin, row("a"), row("b"))
        judged(plugin, row("a"), row("bad"))
        step = {metric.name: metric.values for metric in plugin.step_metrics()}
        assert step.pop("latency_s") > 0.005
        wanted = {"calls": 3, "cached": 1, "failed": 1, "tokens_in": 300, "tokens_out": 30, "cost": (3 * 200 + 3 * 50) / 1e6}
        assert step == pytest.approx(wanted)
        assert all(metric.values == 0 for metric in plugin.step_metrics()), "since the last step"
        judged(plugin)
        assert "3 answers of the judge, 1 known before, 1 failed; 300 tokens in, 30 out, cost 0.00075" in caplog.text
    with Judge(say, usage=False) as judge:
        plugin = ruler(judge, price_in=2)
        judged(plugin, row("a"), row("b"))
        assert "does not say how many tokens it took: tokens and cost are too low" in caplog.text


SMALL = {"rollout.n": 4, "train.batch_size": 2, "train.steps": 2, "train.threads": 1, "rollout.max_new_tokens": 4}
SMALL |= {"model": "quickstart", "data": [{"prompt": "12+34="}, {"prompt": "5+6="}], "algo": "rloo"}


def test_a_run_without_labels_writes_its_costs_and_ends_where_the_judge_fails(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    with Judge(scores(lambda answer: len(answer) % 5 / 5)) as judge:
        reward = {"j": {"name": "ruler", "model": "m", "base_url": judge.url, "price_in": 1000}}
        run = rlhf_host.train(rewards=reward, run_dir=str(tmp_path / "run"), **SMALL)
        rows = [line for line in run.metrics if line["step"]]
        assert all(line["j/calls"] + line["j/cached"] == 2 and not line["j/failed"] for line in rows)
        assert sum(line["j/calls"] for line in rows) == len(judge.asked)
        assert rows[0]["j/cost"] == pytest.approx(0.1 * rows[0]["j/calls"])
        judge.say = lambda text, number: 400
        with pytest.raises(RunError, match=r"8 of 8 trajectories could not be judged .*max_unjudged 0.5.*BadRequestError"):
            rlhf_host.train(rewards=reward, run_dir=str(tmp_path / "other"), **SMALL)


DIGIT = {"name": "llm_judge", "pattern": r"(\d)\D*$", "low": 0, "high": 9, "max_tokens": 6}
"""The quickstart's model writes digits: the last one is its judgement."""


def test_a_model_is_served_beside_the_run_and_ends_with_it(tmp_path):
    pytest.importorskip("rlhf_plugin_rloo", reason="a whole run needs an algorithm")
    pytest.importorskip("rlhf_server", reason="rlhf serve")
    (tmp_path / "rubric.txt").write_text("{answer}7+1=")
    served = {**DIGIT, "rubric": str(tmp_path / "rubric.txt"), "serve": "quickstart", "serve_flags": "--train.threads 1"}
    rewards = {"one": served, "two": {**served, "temperature": 0.5}}
    run = rlhf_host.train(rewards=rewards, run_dir=str(tmp_path / "run"), **SMALL)
    assert not any(line[f"{name}/failed"] for line in run.metrics for name in rewards)
    assert all(sum(line[f"{name}/tokens_in"] for line in run.metrics) > 10 for name in rewards)
    log = (tmp_path / "run/judge-server.log").read_text()
    assert log.count("Serving ") == 1, "two rewards, one server"
    assert not serving(), "it ended with the run"


def serving():
    """Ids of processes that serve a judge."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--key-file" in words and any(b"rlhf-judge-" in word for word in words):
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_server_ends_also_where_its_run_is_killed(tmp_path):
    pytest.importorskip("rlhf_server", reason="rlhf serve")
    program = f"""
import asyncio
from types import SimpleNamespace
from pathlib import Path
from rlhf_plugin_llm_judge import LLMJudge

async def main():
    judge = LLMJudge(LLMJudge.Options(serve="quickstart", serve_flags="--train.threads 1"))
    await judge.run_started(SimpleNamespace(run_dir=Path({str(tmp_path)!r}), seed=0))
    print("serves", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "serves\n", (tmp_path / "judge-server.log").read_text()
    assert serving()
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 20
    while serving() and time.monotonic() < until:
        time.sleep(0.1)
    assert not serving()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"serve": "no/such-model-anywhere"}, "judge's server ended with exit code .*judge-server.log says last: "),
        (
            {"serve": "quickstart", "serve_timeout_s": 0.01, "serve_flags": "--train.threads 1"},
            r"did not answer in 0.01 s \(serve_timeout_s\)",
        ),
    ],
)
def test_a_server_that_does_not_start_is_told_with_its_last_words(tmp_path, options, message):
    pytest.importorskip("rlhf_server", reason="rlhf serve")
    plugin = LLMJudge(LLMJudge.Options(**options))
    with pytest.raises(UserError, match=message):
        in_run(tmp_path, plugin)
    assert not serving()


def test_a_command_that_is_not_installed_is_told_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for serve_with, message in (
        ("vllm", "there is no command 'vllm': install it"),
        ("sglang serve {model}", "or a command that has {port}"),
        ("'", "are no words of a shell: No closing quotation"),
    ):
        with pytest.raises(UserError, match=message):
            Ruler(Ruler.Options(serve="m", serve_with=serve_with)).check_run({})
    with pytest.raises(RuntimeError, match="ruler: the judge's server starts with a run"):
        judged(Ruler(Ruler.Options(serve="m")), row("a"), row("b"))


def test_what_two_rewards_keep_are_files_of_their_own(tmp_path):
    with Judge(scores(lambda answer: 0.5)) as judge:
        in_run(tmp_path, ruler(judge), [row("a"), row("b")])
        in_run(tmp_path, ruler(judge, temperature=1), [row("a"), row("b")])
    files = sorted((tmp_path / "judgements").iterdir())
    assert len(files) == 2
    assert all(len(json.loads(file.read_text().splitlines()[0])) == 3 for file in files)
