"""``rlhf episodes``: saved episodes as trees."""

from __future__ import annotations

import json

import pytest


def segment(kind, ids, text):
    more = {"logprobs": [-1.0] * len(ids), "versions": [0] * len(ids)} if kind == "action" else {}
    return {"kind": kind, "token_ids": ids, "text": text, **more}


def row(episode, reward, segments, **more):
    texts = [part["text"] for part in segments]
    saved = {"step": 2, "episode_id": episode, "group_id": "g", "segments": segments, "source": "sums", "task": 7, "label": "3"}
    return saved | {"prompt": texts[0], "text": texts[1], "full_text": "".join(texts[1:]), "reward": reward} | more


@pytest.fixture
def saved(tmp_path):
    stem = [segment("prompt", [1], "1+2?"), segment("action", [2, 3], "add(1,2)")]
    whole = [*stem, segment("observation", [4], "it is\n3\x1b[2J"), segment("action", [5], "3")]
    branch = [segment("prompt", [1, 2, 3], "1+2? add(1,2)"), segment("action", [6], "four")]
    rows = [
        row("e-1", 1.0, whole, score=1.0, advantage=0.5),
        row("e-1", 1.0, branch, tree={"row": 1, "parent": 0, "branch": 3}, final=False, finish_reason="length"),
        row("e-2", 0.0, stem, role="black"),
        row("e-3", None, stem, unjudged="no judge"),
    ]
    path = tmp_path / "saved.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_no_text_of_a_model_turns_the_line_around(rlhf_here, tmp_path):
    turned = "\u202e\u2066\x1b[2J"
    segments = [segment("prompt", [1], f"1{turned}"), segment("action", [2], turned)]
    events = [{"kind": f"note{turned}", "t": 0.0, "text": turned}]
    saved = row(f"e{turned}", None, segments, role=turned, label=turned, unjudged=turned, source=turned)
    saved |= {"events": events}
    (tmp_path / "saved.jsonl").write_text(json.dumps(saved) + "\n")
    result = rlhf_here("episodes", tmp_path / "saved.jsonl")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("\\u202e") >= 5
    assert not {"\u202e", "\u2066", "\x1b"} & {*result.output}


def test_an_episode_is_a_tree_of_its_rows(rlhf_here, saved):
    result = rlhf_here("episodes", saved, "--count", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:12] == [
        "e-1  sums:7  label 3",
        "├─ row 0, final, reward 1, score 1, advantage +0.5, 3 tokens, stop",
        "│    prompt  1+2?",
        "│    answer  add(1,2)",
        "│    seen    it is",
        "│            3\\x1b[2J",
        "│    answer  3",
        "└─ row 1, not judged, from row 0 behind its first 3 tokens, reward 1, 1 tokens, length",
        "     prompt  1+2? add(1,2)",
        "     answer  four",
        "",
    ]
    assert result.stderr.strip().endswith("1 of 3 episodes of step 2 (train)")


def test_what_happened_is_told_in_its_order(rlhf_here, saved):
    call = {"kind": "call", "t": 0.1, "id": "call-0", "why": "root", "parent": None, "prompt": 3, "s": 0.5, "tokens": 2}
    tool = {"kind": "tool", "t": 0.7, "name": "add", "arguments": {"a": 1}, "result": "3\x1b[2J", "ok": True}
    after = {**call, "t": 0.9, "id": "call-1", "why": "edited", "parent": "call-0", "role": "black", "problems": ["odd"]}
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    lines[0]["events"] = [call, tool, after, {"kind": "own", "x": None}]
    saved.write_text("".join(json.dumps(one) + "\n" for one in lines))
    shown = rlhf_here("episodes", saved, "--episode", "e-1").stdout
    assert shown.splitlines()[10:15] == [
        "   what happened:",
        "         0.10 s  call-0 (root): 3 → 2 tokens in 0.5 s",
        '         0.70 s  tool, name add, arguments {"a": 1}, result 3\\x1b[2J, ok true',
        '         0.90 s  black call-1 (edited after call-0): 3 → 2 tokens in 0.5 s, problems ["odd"]',
        "         0.00 s  own",
    ]


def test_which_episodes(rlhf_here, saved):
    worst = rlhf_here("episodes", saved, "--worst", "--count", "2").stdout
    assert worst.index("e-3") < worst.index("e-2")
    assert "e-1" not in worst
    assert "unjudged: no judge" in worst
    assert "black, reward 0" in worst
    assert rlhf_here("episodes", saved, "--episode", "e-2").stdout.startswith("e-2")
    long = rlhf_here("episodes", saved, "--episode", "e-1", "--chars", "6").stdout
    assert "add( [... 2 characters ...] 2)" in long


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--step", "5"], "has the steps 2"),
        (["--episode", "e-9"], "step 2 has no such episode; did you mean 'e-"),
    ],
)
def test_what_is_not_there(rlhf_here, saved, flags, message):
    result = rlhf_here("episodes", saved, *flags)
    assert result.exit_code == 2
    assert message in result.output


def test_a_file_of_texts_alone(rlhf_here, tmp_path):
    line = {
        "step": 1,
        "episode_id": "e",
        "group_id": "g",
        "prompt": "1+1=",
        "text": "2",
        "length": 1,
        "reward": 1.0,
        "label": "2",
    }
    (tmp_path / "train-step-000001.jsonl").write_text(json.dumps(line) + "\n")
    result = rlhf_here("episodes", tmp_path)
    assert "     prompt  1+1=\n     answer  2\n" in result.stdout


def test_several_turns_without_tokens_are_one_text(rlhf_here, tmp_path):
    """A file as a run writes it by default."""
    line = {"step": 1, "group_id": "g", "prompt": "1+1=", "length": 3, "rewards": {"agent": 1.0}, "reward": 1.0, "label": "2"}
    rows = [
        {**line, "episode_id": "e-1", "text": "2", "full_text": "3 no, again: 2"},
        {**line, "episode_id": "e-2", "text": "2"},
    ]
    (tmp_path / "train-step-000001.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = rlhf_here("episodes", tmp_path)
    assert result.exit_code == 0, result.output
    assert "     prompt  1+1=\n     answer  3 no, again: 2\n" in result.stdout
    assert result.stderr.count("--trajectories.tokens saves them by turn") == 1


def test_when_a_run_saves_its_first_episodes(rlhf_here, tmp_path):
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories/eval-step-000000.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("trajectories: {every: 10}\n")
    said = rlhf_here("episodes", tmp_path).output
    assert "training writes every --trajectories.every steps, here 10, first of step 10" in said
