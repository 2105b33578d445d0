"""The pool: win rates, who leaves, and who is drawn."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlhf_plugin_league import League
from rlhf_plugin_league.pool import Pool, Record, drawn

SHARES = st.lists(st.floats(0, 10), min_size=1, max_size=9).filter(lambda shares: sum(shares) > 1e-6)


def pool_of(*saved, size=8, decay=1.0):
    pool = Pool(["opponent"], size, decay)
    for name in saved:
        pool.add(name)
    return pool


def test_the_oldest_saved_step_leaves_and_fixed_members_stay():
    pool = pool_of("a", "b", size=2)
    assert pool.add("c") == ["a"]
    assert list(pool.records) == ["opponent", "b", "c"]
    pool.note("a", 1.0)
    assert list(pool.records) == ["opponent", "b", "c"], "a game against one that has left is forgotten"


def test_a_win_rate_is_the_mean_score_with_older_games_weighted_less():
    pool = pool_of(decay=0.5)
    assert pool.records["opponent"].win_rate == 0.5
    scores = [1.0, 0.0, 0.5, 1.0]
    for score in scores:
        pool.note("opponent", score)
    weights = [0.5**age for age in (3, 2, 1, 0)]
    expected = sum(weight * score for weight, score in zip(weights, scores, strict=True)) / sum(weights)
    assert pool.records["opponent"].win_rate == pytest.approx(expected, rel=1e-12)


def test_pfsp_is_f_hard_of_the_win_rate():
    """Vinyals et al. 2019: f_hard(x) = (1 - x)^p of the probability to win."""
    pool = pool_of("a", "b")
    for name, scores in (("opponent", (1, 1, 1, 0)), ("a", (1, 0)), ("b", (0, 0, 0, 1))):
        for score in scores:
            pool.note(name, float(score))
    assert pool.weights("pfsp", 2.0) == pytest.approx({"opponent": 1 / 16, "a": 1 / 4, "b": 9 / 16})
    assert pool.weights("pfsp", 0.0) == pool.weights("uniform", 2.0) == {"opponent": 1.0, "a": 1.0, "b": 1.0}
    assert pool.weights("latest", 2.0) == {"opponent": 0.0, "a": 0.0, "b": 1.0}
    assert pool_of().weights("latest", 2.0) == {"opponent": 1.0}


def test_a_policy_that_beats_everybody_meets_everybody_alike():
    pool = pool_of("a")
    for name in ("opponent", "a"):
        pool.note(name, 1.0)
    assert pool.weights("pfsp", 2.0) == {"opponent": 1.0, "a": 1.0}


@given(shares=SHARES, count=st.integers(1, 6), start=st.floats(0, 1, exclude_max=True))
def test_names_are_drawn_in_proportion_to_their_weights(shares, count, start):
    weights = {str(place): share for place, share in enumerate(shares)}
    names = drawn(weights, count, start)
    assert len(names) == count
    for name, share in weights.items():
        expected = count * share / sum(shares)
        assert abs(names.count(name) - expected) < 1 + 1e-6
        assert share > 0 or not names.count(name)


@given(shares=SHARES, count=st.integers(1, 4))
def test_over_all_starts_each_name_has_exactly_its_share(shares, count):
    weights, fine = {str(place): share for place, share in enumerate(shares)}, 4096
    names = list(itertools.chain.from_iterable(drawn(weights, count, (place + 0.5) / fine) for place in range(fine)))
    for name, share in weights.items():
        assert names.count(name) / fine == pytest.approx(count * share / sum(shares), abs=2 * count / fine)


def test_a_state_comes_back_with_other_fixed_members_than_before():
    pool = pool_of("a")
    pool.note("a", 1.0)
    other = Pool(["opponent", "rival_1"], 8, 1.0)
    other.load_state_dict(pool.state_dict())
    assert list(other.records) == ["opponent", "rival_1", "a"]
    assert other.records["a"].win_rate == 1.0


MODELS = st.lists(st.sampled_from("abcd"), unique=True)
"""Models of rivals, in any order."""


@given(MODELS, MODELS, st.sampled_from(["opponent", "foe"]), st.sampled_from(["opponent", "foe"]))
def test_a_record_belongs_to_a_model_whatever_the_settings_of_a_resume(before, after, role, new_role):
    old, new = (League(League.Options(rivals=rivals, role=name)) for rivals, name in ((before, role), (after, new_role)))
    members = dict(zip(("", *before), old.pool.fixed, strict=True)) | {"saved": "step-000007"}
    old.pool.add("step-000007")
    games = {model: Record(float(number), number / 2) for number, model in enumerate(members, 1)}
    for model, name in members.items():
        old.pool.records[name] = old.step[name] = games[model]
    old.seats = list(members.values())
    new.load_state_dict(old.state_dict())
    own = dict(zip(("", *after), new.pool.fixed, strict=True)) | {"saved": "step-000007"}
    assert new.pool.records == {name: games.get(model, Record()) for model, name in own.items()}
    assert new.step == {name: games[model] for model, name in own.items() if model in games}
    assert new.seats == [own.get(model, "") for model in members]


def test_one_rival_twice_is_refused():
    with pytest.raises(ValueError, match="rivals has a twice: name each model once"):
        League.Options(rivals=["a", "b", "a"])
