"""What other projects mark as trained, on messages and on tokens, is honoured or refused by name."""

import json

import pytest

from .reading import HELPFUL, OPENS, read, refused, said, turn, user

MARKS = [
    *({name: value} for name in ("train", "trainable", "training", "loss", "learn", "train_on_turn") for value in (False, 0)),
    *({name: 0} for name in ("loss_mask", "weight", "step_loss_mask", "loss_scale")),
    {"loss_weight": 0.0}, {"weight": "0"}, {"train": "false"},
    {"mask": True}, {"masked": True}, {"mask": 1}, {"ignore_loss": True},
]  # fmt: skip
RIGHT = turn("user", "one?") + turn("assistant", "WRONG") + turn("user", "two?") + OPENS + "⟦right<|im_end|>⟧"


@pytest.mark.parametrize("mark", MARKS, ids=json.dumps)
def test_a_message_that_is_marked_as_not_trained_is_not(mark):
    talk = [user("one?"), said("WRONG", **mark), user("two?"), said("right")]
    assert read([{"messages": talk}]) == [HELPFUL + RIGHT]
    senders = {"user": "human", "assistant": "gpt"}
    turns = [{**each, "from": senders[each["role"]], "value": each["content"]} for each in talk]
    sharegpt = [{key: value for key, value in each.items() if key not in ("role", "content")} for each in turns]
    assert read([{"conversations": sharegpt}]) == [HELPFUL + RIGHT]
    (name,) = mark
    assert "⟦WRONG" in read([{"messages": talk}], ignore=[name])[0]
    other = {name: not mark[name] if not isinstance(mark[name], str) else "1"}
    assert read([{"messages": [user("a"), said("b", **other)]}])[0].endswith("⟦b<|im_end|>⟧")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (said("x", loss_weight=0.5), "'loss_weight' must be 0 or 1, or true or false, not 0.5"),
        (said("x", loss_mask=[0, 1]), "'loss_mask' must be 0 or 1"),
        (said("x", train="perhaps"), "'train' must be 0 or 1"),
        (said("x", train=True, mask=True), "'train' and 'mask' contradict each other about what is trained"),
        (said("x", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}]), "has 'train_detail'"),
        (said("x", prefix=True), "has 'prefix'"),
        (said("x", images=["a.png"]), "has 'images': write pictures as parts of the content"),
        (said("x", thinking_blocks=[{"thinking": "hm"}]), "has 'thinking_blocks'"),
        (said("x", thinking={"text": "hm"}), "'thinking' must be a text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mark_that_cannot_be_honoured_is_refused(message, problem):
    assert problem in refused(read, [{"messages": [user("q"), message]}])


def test_a_users_turn_cannot_be_trained():
    problem = refused(read, [{"messages": [user("q", train=True), said("x")]}])
    assert "message 1 (user) is to be trained, as 'train' says, and only the assistant's messages can be" in problem
    assert read([{"messages": [user("q", mask=False, weight=0), said("x", mask=False, weight=1)]}])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("weight", 0.5),
        ("weight", "0"),
        ("loss_mask", [0, 1]),
        ("trainable", [False, True]),
        ("weights", [0.0, 1.0]),
        ("sample_weight", 0),
        ("train_on_inputs", True),
        ("mask", "Assistant"),
    ],
)
def test_a_weight_or_mask_of_a_whole_row_is_refused(column, value):
    for kind, row in (
        ("prompt_completion", {"messages": [user("q"), said("x")]}),
        ("prompt_completion", {"instruction": "q", "output": "x"}),
        ("preference", {"prompt": "q", "chosen": "x", "rejected": "y"}),
    ):
        row[column] = value
        assert f"data[0]: '{column}' is {value!r}" in refused(read, [row], kind)
        assert read([row], kind, ignore=[column])
    for usual in (
        {"weight": 1, "train_on_inputs": False, "mask": "User"},
        {"weight": "1.0", "train_on_inputs": "False", "loss": 0.3},
    ):
        assert read([{"messages": [user("q"), said("x")], **usual}])


# --- tokens --------------------------------------------------------------------------------------------

IDS = [17, 18, 19, 20, 21, 22, 2]
LETTERS = "-./012"  # what the first six are


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"attention_mask": [1] * 7 + [0, 0], "input_ids": [*IDS, 2, 2]}, ["-⟦./012<|im_end|>⟧"]),
        ({"attention_mask": [0, 0] + [1] * 7, "input_ids": [2, 2, *IDS]}, ["-⟦./012<|im_end|>⟧"]),
        ({"completion_mask": [0, 0, 0, 0, 1, 1, 1]}, ["-./0⟦12<|im_end|>⟧"]),
        ({"assistant_masks": [0, 0, 1, 0, 1, 1, 1]}, ["-.⟦/⟧0⟦12<|im_end|>⟧"]),
        ({"loss_mask": [0, 0, 0, 0, 0.0, 1.0, True]}, ["-./01⟦2<|im_end|>⟧"]),
        ({"labels": [-100] * 4 + IDS[4:], "loss_mask": [1, 1, 1, 1, 1, 1, 0]}, ["-./0⟦12⟧<|im_end|>"]),
        ({"prompt_mask": [1, 1, 1, 0, 0, 0, 0]}, ["-./⟦012<|im_end|>⟧"]),
        ({"position_ids": [0, 1, 2, 0, 1, 2, 3]}, ["-⟦./⟧", "0⟦12<|im_end|>⟧"]),
        ({"seq_lengths": [3, 4]}, ["-⟦./⟧", "0⟦12<|im_end|>⟧"]),
        ({"cu_seqlens": [0, 3, 7]}, ["-⟦./⟧", "0⟦12<|im_end|>⟧"]),
        ({"seq_start_id": [0, 3], "loss_mask": [0, 0, 1, 0, 0, 1, 1]}, ["-.⟦/⟧", "01⟦2<|im_end|>⟧"]),
        ({"attention_mask": [1, 1, 1, 2, 2, 2, 2], "position_ids": [0, 1, 2, 0, 1, 2, 3]}, ["-⟦./⟧", "0⟦12<|im_end|>⟧"]),
        ({"segment_ids": [1, 1, 1, 2, 2, 2, 0]}, ["-⟦./⟧", "0⟦12⟧"]),
        ({"position_ids": list(range(7)), "attention_mask": [1] * 7, "token_type_ids": [0] * 7}, ["-⟦./012<|im_end|>⟧"]),
        ({"special_tokens_mask": [0] * 6 + [1]}, ["-⟦./012<|im_end|>⟧"]),
    ],
)  # fmt: skip
def test_what_other_columns_say_of_tokens_is_honoured(columns, expected):
    assert read([{"input_ids": IDS, **columns}]) == expected


def test_masks_of_completions_are_honoured():
    row = {"prompt_ids": IDS[:3], "completion_ids": IDS[3:]}
    assert read([{**row, "completion_mask": [1, 0, 1, 1]}]) == ["-./⟦0⟧1⟦2<|im_end|>⟧"]
    assert read([{**row, "loss_mask": [0, 0, 0, 0, 0, 1, 1]}]) == ["-./01⟦2<|im_end|>⟧"]


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"attention_mask": [1, 1, 0, 1, 1, 1, 1]}, "there is padding between the tokens of a row"),
        ({"completion_mask": [0, 1]}, "'completion_mask' must be a list as long as the tokens, 7"),
        ({"loss_mask": [0, 0, 0.5, 1, 1, 1, 1]}, "'loss_mask' must have 0 or 1 for each token, not 0.5"),
        ({"position_ids": [5, 6, 7, 8, 9, 10, 11]}, "'position_ids' has 5 where 0 follows"),
        ({"seq_lengths": [3, 3]}, "'seq_lengths' does not say how the 7 tokens of a row are cut"),
        ({"seq_lengths": [3, 4], "position_ids": [0, 1, 0, 1, 2, 3, 4]}, "'seq_lengths' and 'position_ids' disagree"),
        ({"token_type_ids": [0, 0, 1, 1, 1, 1, 1]}, "'token_type_ids' has other kinds than 0"),
        ({"advantages": [0.1] * 7}, "'advantages' is a column beside the tokens, and unknown here (data.ignore advantages"),
        ({"packing_params": {"sequence_boundaries": [0, 3, 7]}}, "'packing_params' is a column beside the tokens"),
        ({"boundaries": [0, 3]}, "'boundaries' is a column beside the tokens"),
        ({"labels": [*IDS[1:], -100]}, "these are shifted by one place"),
        ({"completion_mask": [0] * 7}, "'completion_mask' has no token to train after the first"),
        ({"attention_mask": [None] * 7}, "'attention_mask' must be a list of whole numbers"),
    ],
)
def test_what_they_say_and_cannot_be_honoured_is_refused(columns, problem):
    assert problem in refused(read, [{"input_ids": IDS, **columns}])
