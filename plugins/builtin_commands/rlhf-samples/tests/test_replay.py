"""``rlhf replay``: other rewards and advantages for saved trajectories, and what they change."""

import json
import re
from pathlib import Path

import pytest

from rlhf_host.runs import read_steps


def row(group: str, sample: int, text: str, reward: float | None, **values) -> dict:
    """A trajectory of characters, as other programs may write it: the least that is needed."""
    ids = [ord(char) for char in text]
    segments = [
        {"kind": "prompt", "token_ids": [63]},
        {"kind": "action", "token_ids": ids, "logprobs": [-0.5] * len(ids), "versions": [0] * len(ids)},
    ]
    made = {"step": 1, "episode_id": f"{group}-{sample}", "group_id": group, "sample": sample, "segments": segments}
    return made | {"prompt": "?", "text": text, "label": "x", "reward": reward} | values


@pytest.fixture
def saved(tmp_path):
    """Two groups of three; ``vowels`` gives an eighth for each vowel."""
    rows = [
        *(
            row("a", sample, text, reward)
            for sample, (text, reward) in enumerate([("aaaa", 1.0), ("aabb", 0.0), ("bbbb", 0.5)])
        ),
        *(row("b", sample, text, reward) for sample, (text, reward) in enumerate([("ee", 0.0), ("ee", 0.0), ("ee", 3.0)])),
    ]
    return write(tmp_path / "saved.jsonl", rows)


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


@pytest.fixture
def replay(rlhf_here):
    def run(*arguments, code=0):
        result = rlhf_here("replay", *arguments)
        assert result.exit_code == code, result.output
        assert "Traceback" not in result.output
        return json.loads(result.stdout) if "--json" in arguments else result.stdout or result.output

    return run


def pairs(found, name):
    return [(each[name]["old"], each[name]["new"]) for each in found["trajectories"]]


def test_rewards_are_given_anew(replay, saved):
    found = replay(saved, "--reward", "vowels", "--json")
    assert pairs(found, "reward") == [(1.0, 0.5), (0.0, 0.25), (0.5, 0.0), (0.0, 0.25), (0.0, 0.25), (3.0, 0.25)]
    summary = found["summary"]
    assert summary["reward_mean"] == {"old": 0.75, "new": 0.25}
    assert (summary["trajectories"], summary["rewards_changed"], summary["unjudged"]) == (6, 6, {"old": 0, "new": 0})


def test_weights_are_those_given_now(replay, saved):
    found = replay(saved, "--reward", "vowels", "--reward.vowels.weight", "4", "--json")
    assert [new for _, new in pairs(found, "reward")] == [2.0, 1.0, 0.0, 1.0, 1.0, 1.0]


def test_advantages_before_and_after(replay, saved):
    """By hand: the reward less the mean of the group's two others."""
    found = replay(saved, "--reward", "vowels", "--algo", "baseline", "--json")
    assert [old for old, _ in pairs(found, "advantage")] == pytest.approx([0.75, -0.75, 0.0, -1.5, -1.5, 3.0])
    assert [new for _, new in pairs(found, "advantage")] == pytest.approx([0.375, 0.0, -0.375, 0.0, 0.0, 0.0])
    assert found["summary"]["old_advantages"] == "recomputed from the saved rewards"
    assert found["summary"]["advantages_changed"] == 6


def test_an_algorithm_alone_keeps_the_rewards(replay, saved):
    found = replay(saved, "--algo", "baseline", "--json")
    assert all(old == new for old, new in pairs(found, "reward"))
    group = [new for _, new in pairs(found, "advantage")][:3]
    assert group == pytest.approx([0.75, -0.75, 0.0])


def test_a_file_with_advantages_shows_those_as_old(replay, tmp_path):
    rows = [row("a", i, "aa", float(i), advantage=advantage) for i, advantage in enumerate([0.5, -0.25])]
    found = replay(write(tmp_path / "own.jsonl", rows), "--algo", "baseline", "--json")
    assert pairs(found, "advantage") == [(0.5, -1.0), (-0.25, 1.0)]
    assert found["summary"]["old_advantages"] == "as saved"
    assert found["summary"]["advantages_flipped"] == 2


def test_what_a_filter_would_drop_is_told_and_left_out(replay, saved, tmp_path):
    found = replay(
        *(saved, "--reward", "vowels", "--with", "differing", "--algo", "baseline", "--json", "--output", "kept.jsonl")
    )
    # In group b every answer has the same score, so it teaches nothing.
    assert [each["dropped"] is not None for each in found["trajectories"]] == [False] * 3 + [True] * 3
    assert [new for _, new in pairs(found, "advantage")][3:] == [None] * 3
    assert found["summary"]["dropped"] == 3
    (step,) = read_steps(Path("kept.jsonl"))
    assert [(each.group_id, each.reward) for each in step.rows] == [("a", 0.5), ("a", 0.25), ("a", 0.0)]
    assert step.weights == {"vowels": 1.0}


def test_what_an_extension_does_to_rewards_and_masks(replay, tmp_path):
    rows = [row("a", i, "aaaa", 1.0, finish_reason="length" if i else "stop") for i in range(2)]
    path = write(tmp_path / "cut.jsonl", rows)
    found = replay(path, "--with", "lowered", "--json")
    assert pairs(found, "reward") == [(1.0, 1.0), (1.0, 0.25)]
    found = replay(path, "--with", "whole", "--algo", "baseline", "--json")
    assert [each["masked"] for each in found["trajectories"]] == [False, True]


def test_a_reward_that_cannot_judge_says_so(replay, saved):
    found = replay(saved, "--reward", "picky", "--json")
    assert found["summary"]["unjudged"] == {"old": 0, "new": 2}
    assert found["trajectories"][0]["unjudged"] == "picky: could not judge"
    found = replay(saved, "--reward", "broken", "--json")
    why = found["trajectories"][0]["unjudged"]
    assert re.fullmatch(r"broken: ConnectionError: the judge is down \(.*samples_plugins\.py:\d+\)", why)


def test_the_table_shows_what_changed_most(replay, saved):
    output = replay(saved, "--reward", "vowels", "--algo", "baseline", "--rows", "1")
    lines = output.splitlines()
    assert lines[0].split() == ["step", "group", "sample", "answer", "label", "reward", "advantage"]
    assert lines[1].split() == ["1", "b", "2", "ee", "x", "3", "→", "0.25", "3", "→", "0"]
    assert "... and 5 more, which changed no more than these (--rows 0 shows all)" in output
    assert len(replay(saved, "--reward", "vowels", "--rows", "0").splitlines()) > len(lines)


def test_no_model_is_loaded(rlhf_here, saved):
    """Not even named: the texts are in the file."""
    result = rlhf_here("replay", saved, "--reward", "vowels", "--algo", "baseline", "--json")
    assert json.loads(result.stdout)["summary"]["trajectories"] == 6
    assert "Loading actor" not in result.stderr


def test_a_role_is_loaded_when_a_plugin_asks_for_it(replay, rlhf_here, sampling, tiny_model):
    """KL in the reward against the very model that sampled is zero: advantages stay, and the roles were there."""
    rolled = rlhf_here("rollout", *sampling, "--output", "rolled.jsonl")
    assert rolled.exit_code == 0, rolled.output
    flags = ("rolled.jsonl", "--algo", "baseline", "--kl.coef", "0.5", "--json")
    assert "ask the role reference, beside the actor's tokenizer: give --actor.model PATH" in rlhf_here("replay", *flags).output
    found = replay(*flags, "--actor.model", tiny_model)
    assert [new for _, new in pairs(found, "advantage")] == pytest.approx([old for old, _ in pairs(found, "advantage")])
    plain = replay("rolled.jsonl", "--algo", "baseline", "--json")
    assert [new for _, new in pairs(found, "advantage")] == pytest.approx(
        [new for _, new in pairs(plain, "advantage")], abs=1e-5
    )


def test_scored_anew_a_file_is_trained_on(replay, rlhf_here, sampling):
    """Rollouts first, the reward later: the same as a run that had both."""
    assert rlhf_here("rollout", *sampling[2:], "--output", "bare.jsonl").exit_code == 0
    replay("bare.jsonl", "--reward", "vowels", "--output", "scored.jsonl")
    common = ("train", "--algo", "baseline", *sampling, "--train.steps", "1")
    for name, more in (("read", ("--from-trajectories", "scored.jsonl")), ("sampled", ())):
        result = rlhf_here(*common, "--run-dir", name, *more)
        assert result.exit_code == 0, result.output
    read, sampled = (json.loads(Path(name, "metrics.jsonl").read_text()) for name in ("read", "sampled"))
    for name in ("loss", "grad_norm", "reward/mean", "advantages/std"):
        assert read[name] == sampled[name]


def test_a_run_with_default_settings_is_scored_again_by_its_texts(replay, rlhf_here, sampling, tiny_model, tmp_path):
    """Its files have no tokens. Also with a tokenizer at hand, texts are those of the file; lengths are what they were."""
    assert rlhf_here("train", "--algo", "baseline", *sampling, "--train.steps", "1", "--run-dir", "run").exit_code == 0
    again = ("run", "--reward", "vowels", "--with", "whole", "--json")
    for more in ((), ("--actor.model", tiny_model)):
        found = replay(*again, *more)
        assert (found["summary"]["trajectories"], found["summary"]["unjudged"]["new"]) == (16, 0)
        assert all(old == pytest.approx(new) for old, new in pairs(found, "reward"))
        rewards = [new for _, new in pairs(found, "reward")]
        assert len(set(rewards)) > 1
    written = Path("run/trajectories/train-step-000001.jsonl").read_text().splitlines()
    assert rewards == [json.loads(line)["reward"] for line in written]
    for flags in (("--algo", "baseline"), ("--reward", "vowels", "--output", "scored.jsonl")):
        output = replay("run", *flags, code=2)
        assert "without its tokens: write token ids too: rlhf rollout does" in output
    output = replay("run", "--kl.coef", "0.5", "--actor.model", tiny_model, code=2)
    assert "the chosen plugins ask models about tokens, and the file has only texts: write token ids too" in output


def test_texts_keep_what_the_agent_gave_and_are_refused_for_several_turns(replay, tmp_path):
    texts = {key: value for key, value in row("a", 0, "aa", 1.75).items() if key != "segments"}
    path = write(tmp_path / "texts.jsonl", [texts | {"length": 2, "rewards": {"agent": 1.5, "vowels": 0.25}}])
    assert pairs(replay(path, "--reward", "vowels", "--reward.vowels.weight", "2", "--json"), "reward") == [(1.75, 2.0)]
    path = write(tmp_path / "turns.jsonl", [texts | {"length": 2, "full_text": "a?a"}])
    assert "turns.jsonl:1: several turns without their tokens" in replay(path, "--reward", "vowels", code=2)


def test_a_text_that_is_not_in_the_file_needs_the_model(replay, tmp_path):
    several = row("a", 0, "aa", 1.0)
    several["segments"] += [{"kind": "observation", "token_ids": [1]}, {**several["segments"][1], "token_ids": [98, 98]}]
    output = replay(write(tmp_path / "turns.jsonl", [several]), "--reward", "vowels", code=2)
    assert "give the model that they come from, --actor.model PATH, for its tokenizer" in output


def test_a_reward_that_reads_whole_texts_needs_tokens_or_the_model(replay, tmp_path, tiny_model):
    pytest.importorskip("rlhf_translate")  # calls the function
    Path("remote.py").write_text("def reward_func(queries, prompts, labels):\n    return {'rewards': [len(queries[0])]}\n")
    made = row("a", 0, "aa", 1.0)
    tokens = write(tmp_path / "tokens.jsonl", [made])
    texts = write(tmp_path / "texts.jsonl", [{key: made[key] for key in made if key != "segments"} | {"length": 2}])
    output = replay(tokens, "--reward", "remote.py", code=2)
    assert "give the model that they come from, --actor.model PATH, for its tokenizer" in output
    assert replay(tokens, "--reward", "remote.py", "--actor.model", tiny_model, "--json")["summary"]["unjudged"]["new"] == 0
    for model in ([], ["--actor.model", tiny_model]):
        output = replay(texts, "--reward", "remote.py", *model, code=2)
        assert "read more than the answer, and the file has only that: write token ids too" in output


def test_what_cannot_be_replayed_is_refused(replay, saved, rlhf_here):
    assert "no file is given: rlhf replay FILE" in replay("--reward", "vowels", code=2)
    assert "nothing is chosen to replay with" in replay(saved, code=2)
    Path("short/trajectories").mkdir(parents=True)
    Path("short/trajectories/eval-step-000003.jsonl").touch()
    output = replay("short", "--algo", "baseline", code=2)
    assert "of evaluations there is short/trajectories/eval-step-000003.jsonl" in output
    assert "every --trajectories.every steps" in output
    assert "no such file or directory; did you mean 'saved.jsonl'?" in replay("save.jsonl", "--algo", "baseline", code=2)
    assert "--rows few: how many trajectories to show" in replay(saved, "--algo", "baseline", "--rows", "few", code=2)
    assert "no such flag" in replay(saved, "--algo", "baseline", "--trian.steps", "3", code=2)
    assert "this file already exists" in replay(saved, "--algo", "baseline", "--output", saved, code=2)
