"""Runs whose steps are recorded."""

from __future__ import annotations

import gzip
import json

import pytest
from click.testing import CliRunner
from rlhf_authoring.learner import SUMS, Learner, right_answer
from rlhf_profile.command import afterword, profile

import rlhf_host
from rlhf_host import RunError, UserError
from rlhf_host.internals import observers
from rlhf_host.settings import PluginChoice, RunConfig

from .trace_rules import refuse_broken


def train(run, **more):
    fixed = {"train.threads": 1, "actor.model": "quickstart", "rollout.max_new_tokens": 4, "n": 4, "batch_size": 4, "steps": 3}
    settings = {"algo": Learner(), "reward": right_answer, "data": SUMS, "run_dir": str(run), "lr": 1e-3, **fixed, **more}
    return rlhf_host.train(**settings)


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def numbers(run):
    """Metrics that are no times and no memory."""
    timed = ("time/", "memory/", "tokens_per_s", "tflops")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows(run)]


def record(run, step):
    return json.loads((run / f"profiles/step-{step:06d}/record.json").read_text())


def timeline(run, step):
    return json.loads((run / f"profiles/step-{step:06d}/timeline.json").read_text())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of three steps whose second is recorded."""
    run = tmp_path_factory.mktemp("recorded") / "run"
    train(run, **{"profile.steps": "2"})
    return run


def test_only_the_chosen_step_is_recorded(recorded):
    assert [path.name for path in (recorded / "profiles").iterdir()] == ["step-000002"]
    names = sorted(path.name for path in (recorded / "profiles/step-000002").iterdir())
    assert names == ["record.json", "run.trace.json.gz", "timeline.json"]
    assert observers == [], "nothing is left that would cost later steps time"


def test_the_numbers_of_a_run_are_those_without(recorded, tmp_path):
    train(tmp_path / "plain")
    assert numbers(recorded) == numbers(tmp_path / "plain")


def test_the_timeline_shows_who_did_what(recorded):
    shown = timeline(recorded, 2)
    refuse_broken(shown)
    names = {event["name"] for event in shown["traceEvents"] if event["ph"] == "X"}
    assert {"step", "rollout", "train", "sync", "generate", "request", "score", "pass actor", "forward", "backward"} <= names
    assert {"optimizer actor", "waits"} <= names
    assert not any("rlhf_profile" in name for name in names)
    threads = {event["args"]["name"] for event in shown["traceEvents"] if event["name"] == "thread_name"}
    assert {"MainThread", "rlhf-compute", "rlhf-events"} <= threads
    passes = [event for event in shown["traceEvents"] if event["name"] == "pass actor"]
    assert len(passes) == 1
    assert len([event for event in shown["traceEvents"] if event["name"] == "request"]) == 16


def test_the_phases_add_up_to_the_step(recorded):
    own, (row,) = record(recorded, 2), [row for row in rows(recorded) if row["step"] == 2]
    assert own["time/step"] == row["time/step"]
    assert abs(own["seconds"] - row["time/step"]) < 0.05
    assert 0.8 < own["covered"] <= 1
    for name, seconds in ((phase["name"], phase["seconds"]) for phase in own["phases"]):
        assert abs(seconds - row[f"time/{name}"]) < 0.02
    (process,) = own["processes"]
    seconds = process["seconds"]
    assert seconds["trains"] + seconds["samples"] < own["seconds"] + 0.05
    assert 0 <= seconds["waits"] < own["seconds"]


def test_torchs_trace_has_the_operations_of_all_threads_under_their_spans(recorded):
    trace = json.loads(gzip.decompress((recorded / "profiles/step-000002/run.trace.json.gz").read_bytes()))
    operations = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert {"aten::mm", "aten::_log_softmax"} & {event["name"] for event in operations}
    assert any("autograd" in event["name"] for event in operations), "the backward pass has a thread of its own"
    spans = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {"generate", "pass actor", "optimizer actor"} <= spans


def test_the_command_shows_it(recorded):
    shown = CliRunner().invoke(profile, [str(recorded)])
    assert shown.exit_code == 0, shown.output
    assert "Step 2: " in shown.output
    assert "together" in shown.output
    table = shown.output.split("Longest operations (cpu")[1].splitlines()[1:]
    assert len(table) == 10
    times = [float(line.split()[0]) for line in table]
    assert times == sorted(times, reverse=True)
    assert sum("aten::" in line for line in table) > 4
    assert json.loads(CliRunner().invoke(profile, [str(recorded), "--json"]).output)["steps"][0]["step"] == 2
    with pytest.raises(UserError, match="step 3 was not recorded: there are 2"):
        CliRunner().invoke(profile, [str(recorded), "--step", "3"], catch_exceptions=False)


def test_the_end_of_a_run_has_the_table_where_the_extension_was_chosen(recorded):
    config = RunConfig(run_dir=str(recorded), extensions={"profile": PluginChoice(name="profile")})
    lines = afterword(config)
    assert lines[0].startswith("Recorded steps: 2.")
    assert afterword(config.model_copy(update={"extensions": {}})) == []


def test_steps_that_do_not_come_are_named_at_the_start_and_at_the_end(tmp_path, caplog):
    train(tmp_path / "run", steps=2, **{"profile.steps": "2,5-7", "profile.torch": False})
    told = [message for message in caplog.messages if "profile" in message]
    assert told[0] == "profile.steps: this run has the steps 1 to 2, and not 5-7"
    assert told[-1] == "profile.steps: 5-7 were not recorded in this run, which ended after step 2"
    assert [path.name for path in (tmp_path / "run/profiles/step-000002").iterdir() if "trace" in path.name] == []


def test_a_step_that_fails_is_recorded_to_its_failure(tmp_path, caplog):
    def fails(text, label):
        calls.append(text)
        if len(calls) > 16:
            raise ValueError("no more")
        return 0.0 if len(calls) % 2 else 1.0

    calls: list[str] = []
    with pytest.raises(RunError, match="could not be judged"):
        train(tmp_path / "run", reward=fails, **{"profile.steps": "2"})
    assert any("step 2 did not end" in message for message in caplog.messages)
    own = record(tmp_path / "run", 2)
    assert own["time/step"] is None
    refuse_broken(timeline(tmp_path / "run", 2))
    assert observers == []


def test_a_resumed_run_records_from_its_step_on(tmp_path, caplog):
    train(tmp_path / "run", steps=1)
    own = {"algo": Learner(), "rewards": right_answer, "data": SUMS}
    rlhf_host.train(resume=str(tmp_path / "run"), steps=2, **own, **{"profile.steps": "1-2", "profile.torch": False})
    assert [path.name for path in (tmp_path / "run/profiles").iterdir()] == ["step-000002"]
    assert "profile.steps: this run has the steps 2 to 2, and not 1" in caplog.messages


def test_with_an_update_torch_begins_there(tmp_path, caplog):
    more = {"profile.begin": "update", "profile.memory": True, "profile.shapes": True, "profile.stack": True, "debug": True}
    train(tmp_path / "run", steps=1, **{"profile.steps": "1", **more})
    trace = json.loads(gzip.decompress((tmp_path / "run/profiles/step-000001/run.trace.json.gz").read_bytes()))
    spans = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert "pass actor" in spans
    assert "generate" not in spans
    assert any(event.get("args", {}).get("Input Dims") for event in trace["traceEvents"]), "shapes"
    assert any(event.get("cat") == "python_function" for event in trace["traceEvents"]), "stack"
    assert any("no snapshot of memory" in message for message in caplog.messages)


def test_traces_have_a_limit(tmp_path, caplog):
    train(tmp_path / "short", **{"profile.steps": "1", "profile.seconds": 0.01})
    assert any("recorded the first 0.01 s" in message for message in caplog.messages)
    train(tmp_path / "run", steps=2, **{"profile.steps": "1-2", "profile.max_mb": 0.001})
    assert any("step 2 has only a timeline" in message for message in caplog.messages)
    assert not list((tmp_path / "run/profiles/step-000002").glob("*.trace.json.gz"))
    assert list((tmp_path / "run/profiles/step-000001").glob("*.trace.json.gz"))


def test_a_run_on_rows_is_recorded_too(tmp_path):
    pytest.importorskip("rlhf_plugin_sft")
    data = [{"prompt": row["prompt"], "completion": row["label"]} for row in SUMS]
    settings = {"algo": "sft", "data": data, "actor.model": "quickstart", "batch_size": 2, "steps": 2, "train.threads": 1}
    rlhf_host.train(run_dir=str(tmp_path / "run"), **settings, **{"profile.steps": 2})
    refuse_broken(timeline(tmp_path / "run", 2))
    assert record(tmp_path / "run", 2)["covered"] > 0.5


def test_a_run_goes_on_when_a_step_cannot_be_recorded(tmp_path, caplog, monkeypatch):
    from rlhf_profile import joining

    def dies(*arguments):
        monkeypatch.undo()
        raise RunError("engine 0 has died")

    monkeypatch.setattr(joining, "joined", dies)
    train(tmp_path / "run", **{"profile.steps": "1-2", "profile.torch": False})
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]
    assert "profile: step 1 is not recorded: engine 0 has died" in caplog.messages
    assert caplog.messages[-1] == "profile.steps: 1 were not recorded in this run, which ended after step 3"
    assert record(tmp_path / "run", 2)["covered"] > 0.5
    assert observers == []
