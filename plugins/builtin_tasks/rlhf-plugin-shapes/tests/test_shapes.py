"""Drawn tasks: what is in a picture, which tasks are held out, and the answers that are right."""

import random

import pytest
from pydantic import ValidationError
from rlhf_authoring import reward_contract
from rlhf_plugin_shapes import Shapes, ShapesReward
from rlhf_plugin_shapes.scenes import COLOURS, QUESTIONS, SCENES, SHAPES, count_scene, draw
from rlhf_plugin_shapes.tasks import held_out

from rlhf_host import Reward, Segment, Task, Trajectory, Unjudged

ANSWERS = {
    "count": set("012345"),
    "shape": set(SHAPES),
    "colour": set(COLOURS),
    "digit": set("0123456789"),
}
LABELLED = Task("Which shape is this?", "circle")

TestReward = reward_contract("shapes", tasks=[LABELLED], texts=("circle", "square"))


def load(split="train", seed=0, **options):
    return Shapes(Shapes.Options(**options)).load_tasks(split, seed)


def picture(task):
    return task.prompt[0]["content"][0]["image"]


def pixels(tasks):
    return {picture(task).tobytes() for task in tasks}


@pytest.mark.parametrize("kind", SCENES)
def test_a_prompt_is_a_picture_and_a_question(kind):
    tasks = load(kind=kind, tasks=120)
    assert len(tasks) == 120
    for task in tasks:
        [message] = task.prompt
        image, text = message["content"]
        assert (message["role"], image["type"], text["type"]) == ("user", "image", "text")
        assert (image["image"].size, image["image"].mode) == ((56, 56), "RGB")
        assert text["text"] in QUESTIONS
        assert task.metadata == {"kind": kind}
    assert {task.ground_truth for task in tasks} == ANSWERS[kind]


def test_tasks_are_the_same_again_and_can_be_read_in_any_order():
    tasks = load(kind="mixed", tasks=20)
    backwards = [load(kind="mixed", tasks=20)[i] for i in range(19, -1, -1)]
    assert list(tasks) == backwards[::-1]
    assert tasks[-1] == tasks[19]
    assert tasks[2:4] == [tasks[2], tasks[3]]
    assert not pixels(tasks) & pixels(load(kind="mixed", tasks=20, seed=1))
    with pytest.raises(IndexError, match="there are 20 tasks"):
        tasks[20]


@pytest.mark.parametrize("kind", SCENES)
def test_splits_share_no_picture_whatever_the_seed(kind):
    def drawn(split, seed):
        """Returns the pictures with one colour in place of each ground: what is in them, and where."""
        tasks = load(split, seed, kind=kind, tasks=400, eval_tasks=400, noise=0.0)
        return {picture(task).point(lambda value: 128 if 105 <= value <= 150 else value).tobytes() for task in tasks}

    assert not drawn("eval", 1) & drawn("train", 1)
    assert not drawn("eval", 1) & drawn("train", 2)


def test_the_right_answer_is_the_number_of_shapes_in_the_picture():
    rng = random.Random(0)
    for _ in range(200):
        scene = count_scene(rng, 56, 5)
        picture = draw(scene, 56, 0.0, rng)
        seen = [picture.getpixel((mark.x, mark.y)) for mark in scene.marks]
        assert seen == [COLOURS[mark.colour] for mark in scene.marks]
        colour = next((colour for colour in COLOURS if colour in scene.question), None)
        assert int(scene.answer) == sum(colour in (None, mark.colour) for mark in scene.marks)
        for i, one in enumerate(scene.marks):
            assert all(max(abs(one.x - o.x), abs(one.y - o.y)) > one.radius + o.radius for o in scene.marks[:i])


def test_one_drawing_in_four_is_held_out():
    rng = random.Random(0)
    share = sum(held_out(count_scene(rng, 56, 5)) for _ in range(2000)) / 2000
    assert share == pytest.approx(0.25, abs=0.03)


def test_options():
    tasks = load("eval", eval_tasks=3, size=84, most=1, kind="count", instruction="Answer with a number.")
    assert len(tasks) == 3
    assert picture(tasks[0]).size == (84, 84)
    assert tasks[0].prompt[0]["content"][1]["text"].endswith("?\nAnswer with a number.")
    assert {task.ground_truth for task in load(kind="count", most=1, tasks=50)} == {"0", "1"}
    assert [len(count_scene(random.Random(i), 28, 9).marks) for i in range(50)].count(9) > 0, (
        "nine fit into the smallest picture"
    )
    with pytest.raises(ValidationError, match="kind"):
        Shapes.Options(kind="size")


def judged(text, task=LABELLED):
    row = Trajectory("e", "g", task, [Segment("prompt", [0]), Segment("action", [1])], decode=lambda ids: text)
    [reward] = ShapesReward(ShapesReward.Options()).score([row], None)
    return reward


@pytest.mark.parametrize(
    ("text", "value"), [("circle", 1.0), (" circle\n", 1.0), ("a circle", 0.0), ("Circle", 0.0), ("", 0.0)]
)
def test_an_answer_is_right_if_it_is_the_label(text, value):
    assert judged(text) == Reward(value, score=value)


def test_a_task_without_a_label_is_not_judged():
    assert judged("circle", Task("Which shape is this?")) == Unjudged("the task has no label")
