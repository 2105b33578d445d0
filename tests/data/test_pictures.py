"""Pictures of rows, messages and columns: read, placed, expanded once, and refused by name."""

from __future__ import annotations

import base64
import io
import json
import pickle
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import datasets
import pytest
from PIL import Image
from rlhf_rows.load_units import load_units
from transformers import AutoTokenizer

from rlhf_host.config.schema import DataConfig, DataSource
from rlhf_host.data.codec import ChatCodec, with_pictures
from rlhf_host.data.pictures import as_messages, picture_of
from rlhf_host.data.processor import Processor
from rlhf_host.data.sources import load_tasks
from rlhf_host.errors import UserError
from rlhf_host.records.episodes import EpisodeFailed
from rlhf_host.records.pictures import Picture, Pictured, png

from .. import seeing

TEXT = {"type": "text", "text": "what?"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in (("qwen", seeing.qwen), ("idefics", seeing.idefics))}


@pytest.fixture
def pictures(tmp_path) -> list[Path]:
    sizes = ((56, 42), (28, 70), (84, 56))
    return [seeing.noise(tmp_path / f"{number}.png", size, number) for number, size in enumerate(sizes)]


def written(path: Path, *rows) -> DataConfig:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(sources=[DataSource(path=str(path))])


def tasks_of(model: Path, data: DataConfig, **more):
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = load_tasks(data, split="train", tokenizer=tokenizer, seed=0, **more)
    return tokenizer, [task for source in found.sources.values() for task in source]


def short(tokenizer, ids) -> str:
    """The text with one ``*`` for each picture's token."""
    return tokenizer.decode(list(ids)).replace(" ", "").replace("<|image_pad|>", "*").replace("<image>", "*")


@pytest.mark.parametrize("name", ["qwen", "idefics"])
def test_tokens_of_prompts_are_those_of_the_whole_processor(models, pictures, tmp_path, name):
    two = [{"type": "image"}, {"type": "text", "text": "and "}, {"type": "image"}, TEXT]
    data = written(
        tmp_path / "d.jsonl",
        {"prompt": "which?", "image": "0.png", "answer": "a"},
        {"prompt": [{"role": "user", "content": two}], "images": ["1.png", "2.png"], "answer": "b"},
        {"prompt": "a <image> b", "images": ["2.png"], "answer": "c"},
        {"prompt": "no picture", "answer": "d"},
    )
    tokenizer, tasks = tasks_of(models[name], data)
    processor = Processor.at(str(models[name]))
    assert [len(task.images) for task in tasks] == [1, 2, 1, 0]
    for task in tasks[:3]:
        content = [{k: v for k, v in part.items() if k != "image"} for part in task.prompt[0]["content"]]
        text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
        images = [picture.load() for picture in task.images]
        assert list(task.prompt_ids) == list(processor.processor(text=[text], images=images)["input_ids"][0])
        again = processor.collapse(task.prompt_ids, task.images)
        assert again == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert all("image" not in task.metadata and "images" not in task.metadata for task in tasks)


def test_a_placeholder_in_a_text_is_not_a_picture(models, pictures, tmp_path):
    data = written(tmp_path / "d.jsonl", {"prompt": "<|image_pad|> which?", "images": ["0.png"], "answer": "a"})
    with pytest.raises(UserError, match=r"d.jsonl:1: 1 pictures?, and the text has '<\|image_pad\|>' 2 times"):
        tasks_of(models["qwen"], data)


def test_a_model_without_a_processor_refuses_pictures(tiny_model, pictures, tmp_path):
    data = written(tmp_path / "d.jsonl", {"prompt": "which?", "images": ["0.png"], "answer": "a"})
    with pytest.raises(UserError, match=r"d.jsonl:1: .*(processor|chat template)"):
        tasks_of(tiny_model, data)


def uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_one_content_is_one_picture_in_every_form(pictures):
    path = pictures[0]
    whole = path.read_bytes()
    forms = [
        path,
        str(path),
        f"file://{path}",
        whole,
        uri(path),
        {"bytes": whole, "path": None},
        {"bytes": None, "path": str(path)},
        {"url": uri(path)},
    ]
    found = [picture_of(form) for form in forms]
    assert len(set(found)) == 1
    assert found[0].load().size == (found[0].width, found[0].height) == (56, 42)
    drawn = picture_of(Image.open(path))
    assert drawn.load().tobytes() == found[0].load().tobytes()


def test_a_picture_lies_as_people_see_it(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (40, 20), (9, 8, 7)).save(tmp_path / "turned.jpg", exif=exif)
    found = picture_of(tmp_path / "turned.jpg")
    assert (found.width, found.height) == found.load().size == (20, 40)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("gone.png", "gone.png: No such file"),
        ("https://example.org/a.png", "not fetched from there: give its path"),
        (b"text", "4 bytes are no picture"),
        ("data:image/png;base64,@@", "a data URI that cannot be read"),
        (3, "an int"),
        ({"width": 3}, "none of bytes, path and url"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(value, reason):
    with pytest.raises(UserError, match=reason):
        picture_of(value)


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_file_that_was_cut_is_refused_when_it_is_read(tmp_path, suffix):
    file = io.BytesIO()
    Image.effect_noise((200, 200), 80).convert("RGB").save(file, "JPEG" if suffix == "jpg" else "PNG")
    path = tmp_path / f"cut.{suffix}"
    path.write_bytes(file.getvalue()[: len(file.getvalue()) // 2])
    with pytest.raises(UserError, match=rf"cut.{suffix}: .* no picture"):
        picture_of(path)


def test_a_file_that_changes_is_noticed(pictures):
    found = picture_of(pictures[0])
    seeing.noise(pictures[0], (56, 42), 99)
    with pytest.raises(UserError, match="has changed since its row was read"):
        found.load()


def test_a_picture_travels_once_with_its_content(pictures):
    one = picture_of(pictures[2])
    message = pickle.dumps([one] * 50)
    assert len(message) < len(one.read()) + 1000
    assert pickle.loads(message)[7].load().tobytes() == one.load().tobytes()
    assert Pictured([1, 2], [one]) != Pictured([1, 2], [picture_of(pictures[0])])
    assert Pictured([1, 2], [one]) == pickle.loads(pickle.dumps(Pictured([1, 2], [one])))


def test_places_and_pictures_must_be_as_many(pictures):
    content = [{"type": "image"}, TEXT]
    for given in ([], pictures[:2]):
        with pytest.raises(UserError, match=f"{len(given)} pictures?, and 1 place for pictures"):
            as_messages([{"role": "user", "content": content}], given)
    with pytest.raises(UserError, match="1 picture, and 2 places"):
        as_messages("<image> and <image>", pictures[:1])
    [message] = as_messages("what?", pictures[:2])
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]


def test_datasets_give_their_files_and_not_pixels(models, pictures, tmp_path):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image()), "answer": datasets.Value("string")}
    )
    rows = [{"prompt": "which?", "images": [str(path)], "answer": "a"} for path in pictures]
    table = datasets.Dataset.from_list(rows, features=features)
    table.to_parquet(tmp_path / "d.parquet")
    expected = [picture_of(path) for path in pictures]
    for data, more in (
        (DataConfig(sources=[DataSource(path=str(tmp_path / "d.parquet"))]), {}),
        (DataConfig(sources=[DataSource(path="python:d")]), {"rows": {"python:d": table}}),
    ):
        _, tasks = tasks_of(models["qwen"], data, **more)
        assert [task.images for task in tasks] == [(each,) for each in expected]


def test_a_long_prompt_with_pictures_is_left_out_and_never_cut(models, pictures, tmp_path):
    data = written(
        tmp_path / "d.jsonl",
        {"prompt": "which?", "image": "0.png", "answer": "a"},
        {"prompt": "b", "answer": "b"},
    )
    data.max_prompt_tokens = 30
    _, [left] = tasks_of(models["qwen"], data)
    assert not left.images
    data.long_prompts = "truncate"
    with pytest.raises(UserError, match=r"task 1: a prompt of \d+ tokens with pictures cannot be cut to 30"):
        tasks_of(models["qwen"], data)


def test_rows_with_answers_keep_spans_and_pictures(models, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    talk = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a?"}]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, {"type": "image"}]},
        {"role": "assistant", "content": "e"},
    ]
    data = written(tmp_path / "d.jsonl", {"messages": talk, "images": ["0.png", "1.png"]})
    tokenizer = AutoTokenizer.from_pretrained(models["qwen"])

    def read():
        units = load_units(data, kind="prompt_completion", split="train", tokenizer=tokenizer)
        [unit] = units.sources["d"]
        return unit.rows[0], units.fingerprint

    row, fingerprint = read()
    assert [tokenizer.decode(row.completion_ids[begin:end]).replace(" ", "") for begin, end in row.trained] == [
        "b<|im_end|>",
        "e<|im_end|>",
    ]
    assert short(tokenizer, row.completion_ids).count("*") == len(Processor.of(tokenizer).tokens(row.images[1]))
    monkeypatch.setattr("rlhf_rows.unit_store.MOST_IN_MEMORY", 1)
    assert read() == (row, fingerprint)  # written
    assert read() == (row, fingerprint)  # from the cache
    seeing.noise(pictures[1], (28, 70), 77)
    monkeypatch.setattr("rlhf_rows.unit_store.MOST_IN_MEMORY", 20_000)
    (tmp_path / "d.jsonl").write_text((tmp_path / "d.jsonl").read_text() + "\n")
    assert read()[1] != fingerprint, "another picture is other data"


def test_pairs_share_their_pictures(models, pictures, tmp_path):
    data = written(tmp_path / "d.jsonl", {"prompt": "<image>which?", "chosen": "a", "rejected": "b", "images": ["0.png"]})
    units = load_units(data, kind="preference", split="train", tokenizer=AutoTokenizer.from_pretrained(models["qwen"]))
    chosen, rejected = units.sources["d"][0].rows
    assert chosen.images == rejected.images == (picture_of(pictures[0]),)
    assert chosen.prompt_ids == rejected.prompt_ids


def test_later_turns_bring_pictures(models, pictures):
    tokenizer = AutoTokenizer.from_pretrained(models["qwen"])
    codec = ChatCodec(tokenizer)
    processor = Processor.of(tokenizer)
    seen = with_pictures([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(pictures[0])}}, TEXT]}])
    prompt = codec.render(seen)
    assert short(tokenizer, prompt).count("*") == len(processor.tokens(picture_of(pictures[0])))
    answer = tokenizer("yes", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    new = with_pictures([{"role": "user", "content": [{"type": "image", "image": Image.open(pictures[1])}]}])
    added = codec.delta({"role": "assistant", "content": "yes"}, new, answer)
    talk = [*seen, {"role": "assistant", "content": "yes"}, *new]
    assert [*prompt, *answer, *added] == codec.render(talk)


def test_plain_text_has_no_place_for_pictures(models, pictures):
    codec = ChatCodec(AutoTokenizer.from_pretrained(models["qwen"]), "none")
    seen = with_pictures([{"role": "user", "content": [{"type": "image", "image": str(pictures[0])}, TEXT]}])
    with pytest.raises(EpisodeFailed, match="pictures are placed by a chat template, and there is none"):
        codec.render(seen)


def test_a_picture_of_memory_stays_there():
    found = picture_of(png(Image.new("RGB", (8, 8))))
    assert found.path is None
    assert isinstance(found, Picture)


def test_an_address_is_fetched_once_where_that_is_allowed(models, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    asked = []

    class Served(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            if self.path == "/a.png":
                self.wfile.write(pictures[0].read_bytes())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Served) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        data = written(tmp_path / "d.jsonl", {"prompt": "which?", "image": f"{address}/a.png", "answer": "a"})
        with pytest.raises(UserError, match=r"d.jsonl:1: http://.*/a.png: pictures are not fetched .*--data.fetch-images"):
            tasks_of(models["qwen"], data)
        data.fetch_images = True
        for _ in range(2):
            _, [task] = tasks_of(models["qwen"], data)
            assert task.images == (picture_of(pictures[0]),)
        assert asked == ["/a.png"]
        data = written(tmp_path / "gone.jsonl", {"prompt": "which?", "image": f"{address}/b.png", "answer": "a"})
        data.fetch_images = True
        with pytest.raises(UserError, match=r"gone.jsonl:1: http://.*/b.png cannot be fetched: .*404"):
            tasks_of(models["qwen"], data)
        server.shutdown()


def test_rows_of_tokens_refuse_pictures(models, pictures, tmp_path):
    data = written(tmp_path / "d.jsonl", {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "images": ["0.png"]})
    with pytest.raises(UserError, match=r"d.jsonl:1: a row of tokens cannot have pictures"):
        load_units(data, kind="prompt_completion", split="train", tokenizer=AutoTokenizer.from_pretrained(models["qwen"]))


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "<image>which?", "picture": "0.png"}, r"the text has '<image>', and no picture for it: name the column"),
        ({"prompt": "<|image_pad|>which?"}, r"the text has '<\|image_pad\|>', and no picture"),
        (
            {"prompt": user({"type": "image", "image": "0.png"}, TEXT), "images": ["1.png"]},
            "the messages have 1 picture of their own, and beside them there is 1 picture of another content",
        ),
    ],
)
def test_texts_and_pictures_that_do_not_belong_together_are_refused(models, pictures, tmp_path, row, reason):
    with pytest.raises(UserError, match=rf"d.jsonl:1: {reason}"):
        tasks_of(models["qwen"], written(tmp_path / "d.jsonl", {**row, "answer": "a"}))


def test_a_column_that_repeats_the_messages_pictures_adds_none(models, pictures, tmp_path):
    row = {"prompt": user({"type": "image", "image": "0.png"}, TEXT), "images": ["0.png"], "answer": "a"}
    _, [task] = tasks_of(models["qwen"], written(tmp_path / "d.jsonl", row))
    assert task.images == (picture_of(pictures[0]),)


def test_an_answer_that_would_learn_a_placeholder_is_refused(models, pictures, tmp_path):
    for name, text in (("qwen", "a <|image_pad|>"), ("idefics", "a <image> b")):
        row = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}], "images": ["0.png"]}
        with pytest.raises(UserError, match=r"d.jsonl:1: .*(pictures?, and the text has|no picture for it)"):
            load_units(
                written(tmp_path / "d.jsonl", row),
                kind="prompt_completion",
                split="train",
                tokenizer=AutoTokenizer.from_pretrained(models[name]),
            )


def test_stored_rows_are_read_anew_where_pictures_or_the_processor_differ(models, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rlhf_rows.unit_store.MOST_IN_MEMORY", 1)
    model = tmp_path / "model"
    shutil.copytree(models["qwen"], model)

    def read(place: Path):
        monkeypatch.chdir(place)
        data = DataConfig(sources=[DataSource(path="x.jsonl")])
        tokenizer = AutoTokenizer.from_pretrained(model)
        return load_units(data, kind="prompt_completion", split="train", tokenizer=tokenizer).sources["x"][0].rows[0]

    for number, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        seeing.noise(tmp_path / name / "0.png", (56, 42), number)
        written(tmp_path / name / "x.jsonl", {"prompt": "q", "completion": "a", "images": ["0.png"]})
    first, second = read(tmp_path / "a"), read(tmp_path / "b")
    assert first.images[0].path == str(tmp_path / "a" / "0.png")
    assert second.images[0].path == str(tmp_path / "b" / "0.png")
    assert first.images != second.images
    seeing.noise(tmp_path / "a" / "0.png", (28, 70), 5)
    assert len(read(tmp_path / "a").prompt_ids) != len(first.prompt_ids), "the file has another picture now"
    settings = json.loads((model / "preprocessor_config.json").read_text())
    settings["size"]["shortest_edge"] = 56 * 56 * 4
    (model / "preprocessor_config.json").write_text(json.dumps(settings))
    Processor.at.__func__.__globals__["_at"].cache_clear()
    assert len(read(tmp_path / "b").prompt_ids) > len(second.prompt_ids)


def test_tokens_that_look_like_a_picture_before_it_stay_text(models, pictures):
    picture = picture_of(pictures[0])
    processor = Processor.at(str(models["qwen"]))
    own = list(processor.tokens(picture))
    said = [20, *own, 21]
    ids = [*said, 4, *own, 5]
    collapsed = processor.collapse(ids, [picture], [len(said)])
    assert collapsed == [*said, 4, processor.placeholder, 5]


@pytest.mark.parametrize(("mode", "expected"), [("RGBA", 255), ("LA", 255), ("I;16", 128), ("L", 128), ("P", 0), ("CMYK", 0)])
def test_every_mode_is_read_as_people_see_it(mode, expected):
    image = Image.new("I;16", (4, 4), 0x8080) if mode == "I;16" else Image.new(mode, (4, 4))
    if mode == "L":
        image = Image.new("L", (4, 4), 128)
    if mode == "CMYK":
        image = Image.new("CMYK", (4, 4), (0, 0, 0, 255))
    assert set(picture_of(image).load().tobytes()) == {expected}


def test_moving_pictures_are_refused(tmp_path):
    frames = [Image.new("RGB", (8, 8), (number, 0, 0)) for number in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(UserError, match=r"a.gif: .* have 2 pictures"):
        picture_of(tmp_path / "a.gif")


@pytest.mark.parametrize(
    "text", ["~nouser/x.png", "a\0.png", "http://[x", "", base64.b64encode(b"x" * 4000).decode(), "\ud800.png"]
)
def test_odd_texts_in_a_column_of_pictures_are_refused_and_short(text):
    with pytest.raises(UserError) as caught:
        picture_of(text)
    assert len(str(caught.value)) < 300


def test_the_line_about_data_counts_pictures_and_names_a_column_that_is_not_read(models, pictures, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(models["qwen"])
    for column, said in (("images", "; 1 with pictures"), ("picture", "; no pictures are read: 'picture' may have some")):
        data = written(tmp_path / "d.jsonl", {"prompt": "which?", column: ["0.png"], "answer": "a"})
        assert said in load_tasks(data, split="train", tokenizer=tokenizer, seed=0).report[0]
