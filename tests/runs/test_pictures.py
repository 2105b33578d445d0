"""Pictures of saved episodes, on the page of ``rlhf report`` and in the terminal."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re

import pytest
from PIL import Image
from rlhf_runs import thumbnails
from rlhf_runs.report import page
from transformers import AutoTokenizer

from rlhf_host.config.schema import RunConfig
from rlhf_host.data.processor import Processor
from rlhf_host.records.episodes import Segment, Task, Trajectory
from rlhf_host.records.pictures import Picture
from rlhf_host.runs.directory import RunDirectory
from rlhf_host.settings import write_yaml
from rlhf_host.training.picture_files import PictureFiles
from rlhf_host.training.records import json_line, record
from rlhf_host.training.saved_rows import decoder, lines

from ..seeing import noise, qwen

SIZES = ((56, 42), (28, 28), (700, 350))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return qwen(tmp_path_factory.mktemp("model") / "qwen")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    files = [noise(folder / f"{number}.png", size, number) for number, size in enumerate(SIZES)]
    return [Picture.of_bytes(file.read_bytes(), str(file)) for file in files]


@pytest.fixture
def episode(model, pictures):
    """Asked with one picture, and shown two after the first answer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    seen = [Processor.of(tokenizer).tokens(picture) for picture in pictures]
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in "abcde"}
    begin = tokenizer.convert_tokens_to_ids("<|vision_start|>")
    asked = [*ids["a"], begin, *seen[0], *ids["b"]]
    shown = [*seen[1], *ids["d"], begin, *seen[2]]
    action = {"logprobs": [-1.0], "versions": [0]}
    segments = [
        Segment("prompt", asked, images=pictures[:1]),
        Segment("action", ids["c"], **action),
        Segment("observation", shown, images=pictures[1:]),
        Segment("action", ids["e"], **action),
    ]
    made = Trajectory("e-1", "g", Task("which", prompt_ids=tuple(asked)), segments, reward=1.0)
    made.decode = decoder(tokenizer)
    return made


@pytest.fixture
def run(tmp_path, model, episode):
    run = tmp_path / "run"
    (run / "trajectories").mkdir(parents=True)
    settings = RunConfig().model_dump()
    settings["roles"]["actor"]["model"] = str(model)
    (run / "config.yaml").write_text(write_yaml(settings))
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 1.0}) + "\n")
    folder = run / "trajectories"
    (folder / "train-step-000001.jsonl").write_bytes(lines(1, "train", [episode], {}, folder))
    return run


def shown(run, step=1):
    """The groups of a page."""
    text, notices = page([RunDirectory(run)], ["run"])
    [packed] = re.findall(rf'id="run0-train-{step}">([^<]*)<', text)
    return json.loads(gzip.decompress(base64.b64decode(packed))), notices


def brief(seen):
    return [part if isinstance(part, str) else f"[{part['picture']}]" for part in seen]


def edited(run, change):
    path = run / "trajectories/train-step-000001.jsonl"
    row = json.loads(path.read_text())
    change(row)
    path.write_text(json.dumps(row) + "\n")


def test_a_page_shows_pictures_at_their_places(run, pictures):
    [group], notices = shown(run)
    assert not [notice for notice in notices if "only named" in notice]
    assert brief(group["seen"]) == ["a", "[1]", "b"]
    [row] = group["rows"]
    assert [part["kind"] for part in row["segments"]] == ["action", "observation", "action"]
    observation = row["segments"][1]
    assert brief(observation["seen"]) == ["[2]", "d", "[3]"]
    assert "tokens" not in observation, "hundreds of placeholders for each picture"
    assert row["segments"][2]["tokens"] == ["e"]
    found = [part for part in (*group["seen"], *observation["seen"]) if not isinstance(part, str)]
    for part, picture in zip(found, pictures, strict=True):
        assert (part["width"], part["height"]) == (picture.width, picture.height)
        assert part["file"] == str(run / f"trajectories/pictures/{picture.key}.png")
        head, _, body = part["uri"].partition(",")
        assert head == "data:image/jpeg;base64"
        copy = Image.open(io.BytesIO(base64.b64decode(body)))
        assert copy.size == (320, 160) if picture.width == 700 else (picture.width, picture.height)


def test_without_a_tokenizer_they_come_first(run):
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("/qwen", "/gone"))
    [group], _ = shown(run)
    assert brief(group["seen"]) == ["[1]", "a b"]
    assert brief(group["rows"][0]["segments"][1]["seen"]) == ["[2]", "[3]", "d"]


@pytest.mark.parametrize("turns", [1, 2])
def test_rows_without_tokens(run, episode, turns):
    if turns == 1:
        episode.segments = episode.segments[:2]
    folder = run / "trajectories"
    row = {"step": 1, "split": "train", **record(episode)}
    (folder / "train-step-000001.jsonl").write_bytes(json_line(row, PictureFiles(folder).named))
    [group], _ = shown(run)
    if turns == 1:
        assert brief(group["seen"]) == ["[1]", "a b"]
        assert "seen" not in group["rows"][0]
    else:
        assert "seen" not in group
        assert brief(group["rows"][0]["seen"]) == ["[1]", "[2]", "[3]", "c d e"]


@pytest.mark.parametrize(("limit", "value"), [("MOST", 4_000), ("NUMBER", 1)])
def test_a_page_has_room_for_so_many(run, monkeypatch, limit, value):
    monkeypatch.setattr(thumbnails, limit, value)
    [group], notices = shown(run)
    assert "run: 2 pictures are only named, as the page would be too large" in notices
    assert "uri" in group["seen"][1]
    assert [("uri" in part) for part in group["rows"][0]["segments"][1]["seen"] if "picture" in part] == [False, False]


def test_what_is_not_a_picture_of_the_run_is_only_named(run, pictures):
    outside = str(pictures[0].path)
    edited(run, lambda row: row["segments"][0]["images"][0].update(file=outside))
    [group], _ = shown(run)
    assert "uri" not in group["seen"][1]
    assert group["seen"][1]["file"].startswith(str(run))


@pytest.mark.parametrize("damage", [3, [3], [{}], [{"file": "a"}]])
def test_a_damaged_row_is_shown_without(run, damage):
    edited(run, lambda row: [segment.update(images=damage) for segment in row["segments"]])
    [group], _ = shown(run)
    assert "seen" not in group
    assert group["rows"][0]["text"] == "c d e"


def test_episodes_name_their_files(run, rlhf_here, pictures):
    result = rlhf_here("episodes", run)
    assert result.exit_code == 0, result.output
    paths = [run / f"trajectories/pictures/{picture.key}.png" for picture in pictures]
    assert result.stdout.splitlines()[2:] == [
        f"     prompt  [picture 1] 56×42 {paths[0]}",
        "             a b",
        "     answer  c",
        f"     seen    [picture 2] 28×28 {paths[1]}",
        f"             [picture 3] 700×350 {paths[2]}",
        "             d",
        "     answer  e",
        "",
    ]


def test_a_run_shows_which_pictures_its_answers_are_about(run, rlhf_here, pictures):
    result = rlhf_here("show", run)
    assert result.exit_code == 0, result.output
    assert f"  picture {run / f'trajectories/pictures/{pictures[2].key}.png'}" in result.stdout
