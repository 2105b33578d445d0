"""Texts in two tokenisations, cut where both have an edge: against a slow search, over generated texts and real tokenizers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlhf_authoring.models import byte_tokenizer, tiny_tokenizer
from rlhf_plugin_distill.alignment import Span, read_ends, said, spans
from rlhf_plugin_distill.token_bytes import TokenBytes

from rlhf_host import UserError

from .other_tokenizers import byte_level, lower_case, sentence_piece, word_piece

SMOLLM2 = Path(__file__).parents[4] / "models/SmolLM2-135M-Instruct"
MAKERS = {
    "bpe": lambda: byte_level(400),
    "coarse": lambda: byte_level(600),
    "pieces": lambda: sentence_piece(400),
    "bytes": byte_tokenizer,
}
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["the sum", " of seven", " and", "  ", "\n", "é", "東京", "🙂", "naïve", "so it is", "<|end|>", "</s>", "a"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    ),
    max_size=8,
).map("".join)


@cache
def tokens_of(name):
    if name == "smollm2":
        transformers = pytest.importorskip("transformers")
        if not SMOLLM2.exists():
            pytest.skip("SmolLM2's tokenizer is not here")
        tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    else:
        tokenizer = MAKERS[name]()
    return tokenizer, TokenBytes(tokenizer, name)


@cache
def singles(tokens):
    """The bytes that a tokenizer can write alone."""
    return {piece for piece in tokens.ids() if isinstance(piece, bytes) and len(piece) == 1}


def slow(raw, ends, others):
    """Pieces by search: every pair of numbers of tokens whose bytes are the same, and none in between."""
    found, place, first, second = [], 0, 0, 0
    for one, end in enumerate(ends, 1):
        for two, other in enumerate(others, 1):
            last_one = one == len(ends) or ends[one] != end
            last_two = two == len(others) or others[two] != other
            if raw[:end] == raw[:other] and last_one and last_two:
                if end > place:
                    found.append(Span(first, one - first, second, two - second))
                place, first, second = end, one, two
    return found


@pytest.mark.parametrize(
    "pair", [("bpe", "coarse"), ("bpe", "pieces"), ("pieces", "bytes"), ("coarse", "pieces"), ("smollm2", "pieces")]
)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_pieces_are_the_shortest_that_both_have(pair, text):
    (one, ours), (two, theirs) = map(tokens_of, pair)
    ids, others = (each(text, add_special_tokens=False)["input_ids"] for each in (one, two))
    own, ends = said(ids, ours), read_ends(text, others, theirs)
    if not {bytes([byte]) for byte in text.encode()} <= singles(ours):
        return  # the host tells of characters that a tokenizer lacks
    if own.last is None and len(own.ends) == len(ids) and len(ends) == len(others):  # no special token is spelt in it
        padded = own.text.removeprefix(" ") if own.text != text else own.text
        assert padded == text
        assert ends[-1:] == ([len(text.encode())] if others else [])
    if own.text != text:  # a space of the tokenizer's own stands before it
        return
    found = spans(own, ends)
    assert found == slow(text.encode(), [end for end in own.ends if end is not None], ends)
    for span in found:
        mine = b"".join(map(ours, ids[span.begin : span.begin + span.count]))
        other = b"".join(map(theirs, others[span.other_begin : span.other_begin + span.other_count]))
        assert mine == other or (span.other_begin == 0 and other.removeprefix(b" ") == mine)


@pytest.mark.parametrize("name", ["bpe", "coarse", "bytes"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sampled_tokens_that_are_no_utf_8_are_left_out_and_the_rest_is_exact(name, data):
    """Any tokens, as a policy samples them, against the decoder of the tokenizer itself."""
    tokenizer, tokens = tokens_of(name)
    other, theirs = tokens_of("pieces")
    ordinary = [number for number in range(len(tokenizer)) if number not in tokens.special]
    ids = data.draw(st.lists(st.sampled_from(ordinary), max_size=12))
    own = said(ids, tokens)
    assert own.text == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    raw, text = b"".join(map(tokens, ids)), own.text.encode()
    read = other(own.text, add_special_tokens=False)["input_ids"]
    ends = read_ends(own.text, read, theirs)
    covered = set()
    for span in spans(own, ends):
        begin, end = len(b"".join(map(tokens, ids[: span.begin]))), len(b"".join(map(tokens, ids[: span.begin + span.count])))
        piece = b"".join(map(theirs, read[span.other_begin : span.other_begin + span.other_count]))
        assert piece in (raw[begin:end], b" " + raw[begin:end])
        covered |= {*range(begin, end)}
    if not own.broken and not [end for end in own.ends if end is None] and ends[-1:] == [len(text)]:
        assert covered == {*range(len(raw))}


def test_a_special_token_ends_what_is_said():
    tokenizer, tokens = tokens_of("bpe")
    ids = tokenizer("so it is")["input_ids"]
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert said([*ids, end], tokens).last == end
    assert said([*ids, end], tokens).text == "so it is"
    assert said([*ids, other, *ids, end], tokens) == said([*ids, other, end], tokens)  # what follows is nobody's
    assert said([*ids, other, end], tokens).last is None
    assert said([], tokens).ends == ()


def test_the_teacher_s_own_special_token_in_a_text_ends_what_it_reads():
    tokenizer, tokens = tokens_of("pieces")
    text = "so</s> it is"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id in ids
    assert read_ends(text, ids, tokens)[-1] == 2


def test_tokens_that_cut_a_character_are_cut_by_bytes():
    ours, theirs = tokens_of("bytes")[1], tokens_of("pieces")[1]
    text = "a🙂b"
    ids = [tokens_of("bytes")[0](text, add_special_tokens=False)["input_ids"], tokens_of("pieces")[0](text)["input_ids"][1:]]
    own, ends = said(ids[0], ours), read_ends(text, ids[1], theirs)
    assert own.ends == (1, 2, 3, 4, 5, 6)
    assert ends == [1, 2, 3, 4, 5, 6] or ends[-1] == 6
    cut = said(ids[0][:3], ours)
    assert (cut.text, cut.broken) == ("a\ufffd", ((1, 4),))
    assert spans(cut, [1, 4]) == [Span(0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [(lower_case, "does not keep texts"), (word_piece, "joins tokens by WordPiece"), (lambda: object(), "not a fast one")],
)
def test_tokenizers_that_cannot_be_aligned_are_refused(tokenizer, message):
    with pytest.raises(UserError, match=message):
        TokenBytes(tokenizer(), "the role 'math'")


def test_a_tokenizer_of_few_characters_goes_as_far_as_it_can():
    tokens = TokenBytes(tiny_tokenizer(), "the teacher")
    assert read_ends("a+Éb", tiny_tokenizer()("a+Éb")["input_ids"], tokens) == [1, 2]
