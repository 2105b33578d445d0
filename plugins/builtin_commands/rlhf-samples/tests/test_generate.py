"""``rlhf generate``: the best answers to each prompt, in a file that can be continued and trained on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time

import pytest
from rlhf_samples import best_answers

from rlhf_host import Segment, Task, Trajectory


@pytest.fixture
def flags(tiny_model, prompts):
    sampling = ("--rollout.n", "4", "--rollout.max-new-tokens", "100", "--train.batch-size", "5", "--kernels", "none")
    return ["generate", "--actor.model", tiny_model, "--data", prompts, "--reward", "vowels", *sampling]


@pytest.fixture
def generate(rlhf_here, flags, tmp_path):
    """Run in this process; gives the lines of the file, and the output."""

    def run(*more, name="best.jsonl", code=0):
        path = tmp_path / name
        result = rlhf_here(*flags, "--output", path, *more)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return (path.read_text().splitlines() if path.exists() else []), result.output

    return run


def test_the_best_of_all_answers_is_written(generate, tmp_path):
    every, said = generate("--keep", "0", "--json", name="every.jsonl")
    rows = [json.loads(line) for line in every]
    best, output = generate()
    by_prompt: dict[str, list[dict]] = {}
    for row in rows:
        by_prompt.setdefault(row["prompt"], []).append(row)
    assert 10 < len(by_prompt) == len(best) <= 24
    for line in best:
        row = json.loads(line)
        assert row.keys() == {"prompt", "completion", "reward", "score"}
        assert row == max(by_prompt[row["prompt"]], key=lambda other: other["reward"])
        assert row["reward"] == sum(letter in "aeiou" for letter in row["completion"]) / 8
    summary = json.loads(said[said.index("{") :])
    assert summary["written"] + summary["cut_off"] == summary["answers"] == 96
    assert summary["cut_off"] > 0
    assert "trains on it" in output
    assert [path.name for path in tmp_path.iterdir() if "state" in path.name] == []


def test_what_was_interrupted_is_continued_to_the_same_file(generate, tmp_path, monkeypatch):
    whole, _ = generate(name="whole.jsonl")
    add = best_answers.BestAnswers.add

    def fails(self, prompts, groups):
        if self.counts.prompts == 10:
            with self.path.open("ab") as file:
                file.write(b'{"prompt": "half a li')
            raise KeyboardInterrupt
        add(self, prompts, groups)

    with monkeypatch.context() as patch:
        patch.setattr(best_answers.BestAnswers, "add", fails)
        _, output = generate(code=130)
    assert "the same command continues it" in output
    assert "was begun with other settings" in generate("--rollout.temperature", "0.5", code=2)[1]
    again, output = generate()
    assert again == whole
    assert "15/24 prompts" in output
    assert "10/24 prompts" not in output
    assert "this file already exists" in generate(code=2)[1]


def test_a_killed_command_is_continued_too(rlhf_process, flags, generate, tmp_path):
    whole, _ = generate(name="whole.jsonl")
    process = rlhf_process(*flags, "--output", tmp_path / "best.jsonl")
    deadline = time.monotonic() + 120
    while not ((tmp_path / "best.jsonl").exists() and (tmp_path / "best.jsonl").stat().st_size):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert generate()[0] == whole


def test_a_file_that_lost_something_is_not_continued(generate, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(best_answers.BestAnswers, "finish", lambda self: None)
        whole, _ = generate()
    path = tmp_path / "best.jsonl"
    size = path.stat().st_size
    for change in (lambda: os.truncate(path, size - 20), path.unlink):
        change()
        before = path.read_bytes() if path.exists() else None
        said = generate(code=2)[1]
        assert f"{size} were written before the interruption: put it back, or remove" in said
        assert (path.read_bytes() if path.exists() else None) == before
    (tmp_path / ".best.jsonl.state").unlink()
    assert generate()[0] == whole


def test_one_process_writes_a_file(generate, tmp_path, monkeypatch):
    answers = best_answers.BestAnswers(tmp_path / "best.jsonl", {}, 1)
    with answers.held():
        assert "is being written by another process" in generate(code=2)[1]
    assert list(tmp_path.iterdir()) == []
    assert generate()[0]
    assert not [path for path in tmp_path.iterdir() if "lock" in path.name]


def test_other_prompts_are_refused(generate, tmp_path, prompts, monkeypatch):
    mine = tmp_path / "prompts.jsonl"
    shutil.copy(prompts, mine)
    monkeypatch.setattr(best_answers.BestAnswers, "finish", lambda self: None)
    generate("--data", mine)
    mine.write_text(mine.read_text().replace("3+21", "3+22"))
    assert "was begun with other prompts" in generate("--data", mine, code=2)[1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--keep", "5"), "--keep 5 is more than the 4 answers of a prompt: set --rollout.n 5"),
        (("--keep", "best"), "--keep best: should be a whole number"),
        (("--reward", "vowls"), "vowels"),
    ],
)
def test_bad_flags_are_refused(generate, tmp_path, more, message):
    lines, output = generate(*more, code=2)
    assert message in output
    assert lines == []


def test_another_kind_of_file_is_refused(generate):
    assert "give it a name that ends in .jsonl" in generate(name="best.txt", code=2)[1]


def test_a_reward_is_needed(rlhf_here, tiny_model, prompts, tmp_path):
    result = rlhf_here("generate", "--actor.model", tiny_model, "--data", prompts, "--output", tmp_path / "best.jsonl")
    assert result.exit_code == 2
    assert "nothing scores the answers: give --reward NAME" in result.output


def test_what_stands_beside_a_prompt_is_written_with_it():
    task = Task([{"role": "user", "content": "q"}], tools=[{"name": "f"}], template_kwargs={"enable_thinking": False})
    answer = Segment("action", [2], [0.0], [0])
    row = Trajectory("e", "g", task, [Segment("prompt", [1]), answer], reward=1.0, decode=lambda ids: "a")
    line = best_answers._line(row)
    assert line == {
        "prompt": task.prompt,
        "completion": "a",
        "reward": 1.0,
        "tools": [{"name": "f"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
