"""Rows that are tokens already, with one or several documents per row: their trained tokens, and where each begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from rlhf_host.internals import Malformed, Numbers, get
from rlhf_rows.units import Row

IDS = "input_ids"
UNTRAINED_LABEL = -100
TRAINED_BY = (
    "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask", "loss_mask", "loss_masks", "train_mask",
    "loss_weights", "loss_weight", "weights",
)  # fmt: skip
"""Columns with 1 for each token that is trained and 0 for the others."""
UNTRAINED_BY = ("prompt_mask", "ignore_mask", "mask")
LENGTHS = ("seq_lengths", "seq_lens", "sequence_lengths", "seqlens", "document_lengths", "lengths")
"""Columns with the number of tokens of each document of a row."""
STARTS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "seq_start_id", "seq_start_ids", "sequence_starts")
"""Columns with the places where documents begin; some also have where the last one ends."""
NUMBERS = ("segment_ids", "document_ids", "doc_ids", "sequence_ids")
"""Columns with the number of its document for each token."""
SAYS_NOTHING = ("special_tokens_mask", "offset_mapping")
"""Columns that only a tokenizer needs."""


def read_token_rows(row: Mapping[str, Any], vocabulary: int | None, ignore: Sequence[str] = ()) -> tuple[Row, ...]:
    """Returns a row of the data for each document of a row of tokens. Raises ``Malformed`` for content that cannot be honoured."""
    row = {name: value for name, value in row.items() if value is not None and name not in ignore}
    if IDS in row:
        ids = _ids(row[IDS], IDS, vocabulary)
        trained, key = [True] * len(ids), IDS
    else:
        prompt, completion = (
            _ids(get(row, f"{name}_ids", "tokens"), f"{name}_ids", vocabulary) for name in ("prompt", "completion")
        )
        if not prompt:
            raise Malformed("'prompt_ids' is empty: the first completion token needs a token before it")
        ids, trained, key = [*prompt, *completion], [False] * len(prompt) + [True] * len(completion), "completion_ids"
        for name in (*TRAINED_BY, *UNTRAINED_BY):  # they may be of the completion alone
            if isinstance(mask := row.get(name), Sequence) and len(mask) == len(completion) != len(ids):
                row[name] = [*([0] * len(prompt) if name in TRAINED_BY else [1] * len(prompt)), *mask]
    _refuse_unknown(row, len(ids))
    if "labels" in row:
        trained, key = _labelled(row["labels"], ids), "labels"
    for name in (*TRAINED_BY, *UNTRAINED_BY):
        if name in row:
            wanted = name in TRAINED_BY
            trained = [before and bool(mark) == wanted for before, mark in zip(trained, _marks(row, name, ids), strict=True)]
            key = name
    made = [_row([ids[at] for at in places], [trained[at] for at in places]) for places in _documents(row, len(ids))]
    if not any(made):
        raise Malformed(f"{key!r} has no token to train after the first")
    return tuple(each for each in made if each is not None)


def _ids(value: Any, key: str, vocabulary: int | None) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(type(token) is int for token in value):
        raise Malformed(f"{key!r} must be a list of token ids")
    for token in value:
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            raise Malformed(f"{key!r} has the token {token}, and the tokenizer has {vocabulary}")
    return list(value)


def _refuse_unknown(row: Mapping[str, Any], length: int) -> None:
    """Raises ``Malformed`` for unknown columns with numbers or mappings, which may carry information about the tokens."""
    known = (
        IDS, "prompt_ids", "completion_ids", "labels", "attention_mask", "position_ids", "token_type_ids",
        *TRAINED_BY, *UNTRAINED_BY, *LENGTHS, *STARTS, *NUMBERS, *SAYS_NOTHING,
    )  # fmt: skip
    for name, value in row.items():
        if name in known:
            continue
        each = isinstance(value, list | tuple) and (len(value) == length or all(isinstance(one, int | float) for one in value))
        if each or isinstance(value, Mapping):
            raise Malformed(f"{name!r} is a column beside the tokens, and unknown here (data.ignore {name} leaves it unread)")
    if any(row.get("token_type_ids", ())):
        raise Malformed("'token_type_ids' has other kinds than 0, which no model gets here (data.ignore token_type_ids)")


def _labelled(labels: Any, ids: Sequence[int]) -> list[bool]:
    if not isinstance(labels, Sequence) or len(labels) != len(ids):
        raise Malformed("'labels' must be a list as long as 'input_ids'")
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if label not in (token, UNTRAINED_LABEL):
            next_ones = [(after, label) for after, label in zip(ids[1:], labels, strict=False) if label != UNTRAINED_LABEL]
            shifted = next_ones and all(after == label for after, label in next_ones)
            hint = "; these are shifted by one place, so leave them out and give a loss_mask" if shifted else ""
            raise Malformed(
                f"'labels' has {label!r} at {place} where 'input_ids' has {token}: a label is the token itself, or -100{hint}"
            )
    return [label != UNTRAINED_LABEL for label in labels]


def _marks(row: Mapping[str, Any], name: str, ids: Sequence[int]) -> Sequence[Any]:
    marks = row[name]
    if not isinstance(marks, Sequence) or len(marks) != len(ids):
        raise Malformed(f"{name!r} must be a list as long as the tokens, {len(ids)}")
    if (odd := next((mark for mark in marks if mark not in (0, 1)), None)) is not None:
        raise Malformed(f"{name!r} must have 0 or 1 for each token, not {odd!r} (data.ignore {name} leaves it unread)")
    return marks


def _documents(row: Mapping[str, Any], length: int) -> list[range]:
    """Returns the places of each document's tokens, without padding. Raises ``Malformed`` if columns disagree."""
    numbered = {name: _for_each(row, name, length) for name in ("attention_mask", *NUMBERS) if name in row}
    real = [True] * length
    for name, numbers in numbered.items():
        if name == "attention_mask" or numbers[:1] != [0]:  # segments are counted from 1 where 0 is padding
            real = [one and number != 0 for one, number in zip(real, numbers, strict=True)]
    first, end = (real.index(True), length - real[::-1].index(True)) if any(real) else (0, 0)
    if not all(real[first:end]):
        raise Malformed("there is padding between the tokens of a row: only padding at its ends can be left out")
    begins = {
        name: [at for at in range(1, length) if numbers[at] != numbers[at - 1]]
        for name, numbers in numbered.items()
        if name in NUMBERS or max(numbers, default=0) > 1
    }
    begins |= {name: _counted(row[name], length, end - first, name) for name in (*LENGTHS, *STARTS) if name in row}
    if "position_ids" in row:
        begins["position_ids"] = _positioned(_for_each(row, "position_ids", length), first, end)
    found = {name: [at for at in places if first < at < end] for name, places in begins.items()}
    chosen = next(iter(found.values()), [])
    if (other := next((name for name, places in found.items() if places != chosen), None)) is not None:
        raise Malformed(f"{next(iter(found))!r} and {other!r} disagree about where the documents of a row begin")
    return [range(a, b) for a, b in pairwise([first, *chosen, end])]


def _for_each(row: Mapping[str, Any], name: str, length: int) -> list[int]:
    value = row[name]
    if not _are_numbers(value) or len(value) != length:
        raise Malformed(f"{name!r} must be a list of whole numbers as long as the tokens, {length}")
    return list(map(int, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(number, int) for number in value)


def _counted(value: Any, length: int, real: int, name: str) -> list[int]:
    """Returns where documents begin, after the first, from their lengths or from these places themselves."""
    numbers = list(map(int, value)) if _are_numbers(value) else []
    edges = numbers if name in STARTS else [sum(numbers[:number]) for number in range(len(numbers) + 1)]
    while len(edges) > 1 and edges[-1] in (-1, edges[-2]):  # such lists are padded
        edges = edges[:-1]
    whole = edges[-1:] == [length] or edges[-1:] == [real] or name in STARTS
    if edges[:1] != [0] or not whole or any(a >= b for a, b in pairwise(edges)) or edges[-1] > length:
        raise Malformed(f"{name!r} does not say how the {length} tokens of a row are cut into documents: {str(value)[:60]}")
    return edges[1:]


def _positioned(positions: Sequence[int], first: int, end: int) -> list[int]:
    """Returns where documents begin: at each position 0."""
    begins, expected = [], 0
    for at in range(first, end):
        expected = 0 if positions[at] == 0 else expected
        if positions[at] != expected:
            raise Malformed(f"'position_ids' has {positions[at]} where {expected} follows, and positions are not chosen here")
        begins += [at] if expected == 0 else []
        expected += 1
    return begins


def _row(ids: list[int], trained: list[bool]) -> Row | None:
    """Returns the row. The prompt is everything before the first trained token, and at least one token; None: nothing is
    trained.
    """
    if not any(trained[1:]):
        return None
    begin = trained.index(True, 1)
    spans, place = [], 0
    for wanted, run in groupby(trained[begin:]):
        end = place + len(list(run))
        spans += [(place, end)] if wanted else []
        place = end
    return Row(Numbers("i", ids[:begin]), Numbers("i", ids[begin:]), tuple(spans))
