"""Pictures of saved trajectories: written once beside the lines, and read back whole or refused."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from rlhf_host.errors import UserError
from rlhf_host.records.episodes import Group, Reward, Segment, Task, Trajectory
from rlhf_host.records.pictures import Picture
from rlhf_host.rollouts.collect import Played
from rlhf_host.training.picture_files import PictureFiles
from rlhf_host.training.records import json_line, record
from rlhf_host.training.saved_rows import lines, read_steps, write_lines
from rlhf_host.training.untrained_groups import read_untrained, write_untrained


def picture(colour: str, form: str = "PNG", size: tuple[int, int] = (6, 4)) -> Picture:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, form)
    return Picture.of_bytes(file.getvalue())


RED, BLUE = picture("red"), picture("blue", "JPEG", (3, 5))


def row(name: str = "e-1", **changes) -> Trajectory:
    """An episode that is shown a picture first, and two after its first answer."""
    content = [{"type": "text", "text": "see "}, {"type": "image", "image": RED}]
    action = {"logprobs": [-1.0], "versions": [0]}
    made = Trajectory(
        name,
        "g",
        Task([{"role": "user", "content": content}], "label", {"of": "row"}, None, 3, "source", (1, 9), images=(RED,)),
        [
            Segment("prompt", [1, 9], images=(RED,)),
            Segment("action", [2], **action),
            Segment("observation", [9, 9], images=(BLUE, RED)),
            Segment("action", [3], **action),
        ],
        rewards={"r": Reward(1.0)},
        reward=1.0,
        decode=lambda ids: "".join(map(str, ids)),
    )
    return dataclasses.replace(made, **changes)


def saved(directory: Path, *rows: Trajectory) -> Path:
    path = directory / "rows.jsonl"
    write_lines(path, [lines(1, "train", rows, {}, directory)])
    return path


def edited(path: Path, change) -> Path:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    change(rows[-1])
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def test_rows_come_back_with_their_pictures(tmp_path):
    [step] = read_steps(saved(tmp_path, row(), row("e-2")))
    for back in step.rows:
        assert [segment.images for segment in back.segments] == [(RED,), (), (BLUE, RED), ()]
        assert [each.read() for each in back.images] == [RED.data, BLUE.data, RED.data]
        assert [(each.width, each.height) for each in back.images] == [(6, 4), (3, 5), (6, 4)]
        assert back.task.prompt == row().task.prompt
        assert back.task.images == (RED,)
    assert lines(1, "train", step.rows, {}, tmp_path) == (tmp_path / "rows.jsonl").read_bytes()


def test_each_picture_is_a_file_once_with_its_own_bytes(tmp_path):
    path = saved(tmp_path, row(), row("e-2"))
    files = {file.name: file.read_bytes() for file in (tmp_path / "pictures").iterdir()}
    assert files == {f"{RED.key}.png": RED.data, f"{BLUE.key}.jpeg": BLUE.data}
    line = json.loads(path.read_text().splitlines()[0])
    red, blue = (
        {"file": f"pictures/{name}", "width": width, "height": height}
        for name, width, height in ((f"{RED.key}.png", 6, 4), (f"{BLUE.key}.jpeg", 3, 5))
    )
    assert line["images"] == [red, blue, red]
    assert [segment.get("images") for segment in line["segments"]] == [[red], None, [blue, red], None]
    assert line["row"]["prompt"][0]["content"][1] == {"type": "image", "image": red}


def test_a_half_written_file_is_written_again(tmp_path):
    saved(tmp_path, row())
    (tmp_path / f"pictures/{RED.key}.png").write_bytes(b"half")
    read_steps(saved(tmp_path, row()))


def test_rows_without_tokens_have_all_their_pictures(tmp_path):
    one = row()
    one.segments = one.segments[:2]
    text = json_line({"step": 1, "split": "train", **record(one)}, PictureFiles(tmp_path).named)
    (tmp_path / "rows.jsonl").write_bytes(text)
    [step] = read_steps(tmp_path / "rows.jsonl", texts=True)
    assert step.rows[0].images == step.rows[0].task.images == (RED,)


def test_a_row_without_pictures_says_nothing_of_them(tmp_path):
    one = row(task=Task("see", prompt_ids=(1, 9)))
    one.segments = [dataclasses.replace(segment, images=()) for segment in one.segments]
    assert "images" not in saved(tmp_path, one).read_text()
    assert not (tmp_path / "pictures").exists()


def drop_file(path: Path) -> None:
    (path.parent / f"pictures/{RED.key}.png").unlink()


def change_file(path: Path) -> None:
    (path.parent / f"pictures/{RED.key}.png").write_bytes(BLUE.data)


def drop_from_segment(path: Path) -> None:
    edited(path, lambda line: line["segments"][2].pop("images"))


def swap_in_segment(path: Path) -> None:
    edited(path, lambda line: line["segments"][2]["images"].reverse())


def drop_size(path: Path) -> None:
    edited(path, lambda line: line["row"]["prompt"][0]["content"][1]["image"].pop("width"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_file, rf"rows.jsonl:1: .*/pictures/{RED.key}.png: the picture cannot be read any more: No such file"),
        (change_file, rf"rows.jsonl:1: .*/pictures/{RED.key}.png has changed"),
        (drop_from_segment, "rows.jsonl:2: images: 3 pictures, and its segments have 1"),
        (swap_in_segment, "rows.jsonl:2: images: 3 pictures, and its segments have 3, or others"),
        (drop_size, "rows.jsonl:2: row.prompt: a picture without its file, width and height"),
    ],
)
def test_pictures_that_are_not_there_are_an_error_of_the_row(tmp_path, damage, message):
    path = saved(tmp_path, row(), row("e-2"))
    damage(path)
    with pytest.raises(UserError, match=message):
        read_steps(path)


def test_a_checkpoint_has_the_pictures_of_what_waits_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_untrained({4: Played(Group("g", row().task, [row()]), [], Counter(finished=1))}, folder)
    back = read_untrained(folder)[4]
    assert back.is_of(row().task), "the same pictures are the same prompt, wherever their files are"
    other = [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image", "image": BLUE}]}]
    assert not back.is_of(dataclasses.replace(row().task, prompt=other))
    for file in (folder / "pictures").iterdir():
        file.unlink()
    assert [each.read() for each in back.group.trajectories[0].images] == [RED.data, BLUE.data, RED.data]
    assert pickle.loads(pickle.dumps(back.group.trajectories[0].images)) == (RED, BLUE, RED)
