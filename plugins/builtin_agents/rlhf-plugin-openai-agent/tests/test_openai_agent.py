"""Programs and functions: their rewards, and how they fail."""

import time
from pathlib import Path

import pytest
from rlhf_plugin_openai_agent import OpenAIAgent

import rlhf_host
from rlhf_host import RunError, UserError

HERE = Path(__file__).parent


@pytest.fixture
def play(tmp_path):
    """The trajectories of two tasks' episodes on the quickstart model's sums."""

    def run(kind=None, function=None, **options):
        settings = options.pop("settings", {})
        if kind is not None:
            options["command"] = f"{{python}} {HERE}/programs.py '{kind}' {{task_file}}"
        if function is not None:
            options["function"] = f"{HERE}/functions.py:{function}"
        agent = {"name": "openai_agent", **options}
        settings = {"rollout.n": 2, "train.batch_size": 2, "rollout.max_new_tokens": 6, "train.threads": 1} | settings
        with rlhf_host.session(agent=agent, model="quickstart", data="arithmetic", **settings) as running:
            return running.sample(1, settings["train.batch_size"]).trajectories_in_order()

    return run


@pytest.mark.parametrize(("kind", "reward", "score"), [("prints", 0.5, 1.0), ("posts", 0.25, 0.0)])
def test_the_reward_is_posted_or_printed(play, kind, reward, score):
    rows = play(kind)
    assert [(row.reward, row.score) for row in rows] == [(reward, score)] * 4
    assert all(row.actions[0].logprobs for row in rows)
    program = [event for event in rows[0].events if event["kind"] == "program"]
    assert [event["code"] for event in program] == [0]
    assert program[0]["stdout"].endswith("}\n" if kind == "prints" else "1.0\n")


def test_a_program_may_speak_anthropic_s_api(play):
    rows = play("anthropic")
    assert [row.reward for row in rows] == [1.0] * 4
    assert all(0 < len(row.actions[0].token_ids) <= 4 for row in rows)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("silent", "the program never asked the policy"),
        ("fails", "exit code 1: no sandbox today"),
        ("gives up", "the shop is closed"),
        ("nan", "finite, and a score in"),
        ("misspells", "the program's report has scroe; it may have reward, score, metrics, final"),
    ],
)
def test_a_program_that_fails_is_no_zero(play, kind, reason):
    with pytest.raises(RunError, match=reason):
        play(kind)


def test_an_exit_code_may_be_worth_nothing(play):
    assert [row.reward for row in play("fails", nonzero="score0")] == [0.0] * 4


def test_a_late_program_ends_with_all_that_it_started(play, tmp_path, monkeypatch):
    monkeypatch.setenv("PROCESSES", str(tmp_path / "processes"))
    settings = {"rollout.episode_timeout_s": 4, "rollout.n": 1, "train.batch_size": 1}
    with pytest.raises(RunError, match=r"no answer of agent_run in 4 s"):
        play("hangs", env=["PROCESSES"], settings=settings)
    processes = (tmp_path / "processes").read_text().split()
    assert len(processes) == 2
    assert [process for process in processes if runs(process)] == []


def runs(process):
    """Tells if it still does something: one that ended stays as a zombie until its parent asks."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_holds_the_pipes_of_a_program_that_ended_holds_up_nothing(play):
    started = time.monotonic()
    rows = play("daemon", settings={"rollout.n": 1, "train.batch_size": 1})
    assert [row.reward for row in rows] == [1.0]
    assert time.monotonic() - started < 35


def test_a_program_gets_no_keys(play, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "x")
    monkeypatch.setenv("ALLOWED", "1")
    assert [row.reward for row in play("environment", env=["ALLOWED"])] == [1.0] * 4


def test_functions(play):
    assert [(row.reward, len(row.actions)) for row in play(function="run", settings={"data.template": "{prompt}"})] == [
        (1.0, 2)
    ] * 4
    assert [(row.reward, row.score) for row in play(function="plain")] == [(1.0, 1.0)] * 4


def _has_a_digit(text):
    return float(any(letter.isdigit() for letter in text))


def test_a_function_without_a_reward_is_judged_by_plugins(play):
    with pytest.raises(RunError, match="the program gave no reward"):
        play(function="nothing")
    rows = play(function="nothing", rewards=False, settings={"rewards": _has_a_digit})
    assert {row.reward for row in rows} <= {0.0, 1.0}
    assert len(rows) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --agent.command"),
        ({"command": "x", "function": "y"}, "give --agent.command"),
        ({"function": "nowhere.py:f"}, "there is no Python file"),
        ({"function": f"{HERE}/functions.py:other"}, "the file has none called 'other'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(UserError, match=message):
        OpenAIAgent(OpenAIAgent.Options(**options))


def test_a_command_that_cannot_start_ends_the_run(play):
    with pytest.raises(UserError, match="/nowhere/program cannot be started: No such file"):
        play(command="/nowhere/program {task_file}")
