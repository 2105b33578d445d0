"""Answers of a group meet in pairs."""

import json
import random

import pytest
from rlhf_authoring import reward_contract
from rlhf_plugin_llm_judge import Tournament
from rlhf_plugin_llm_judge.pairing import all_pairs, bradley_terry, mean_chance, swiss_pairs, win_shares

from rlhf_host import Unjudged

from .judges import Judge, answers_in, judged, row, wins


@pytest.fixture(scope="module", autouse=True)
def reachable():
    """For the contract, whose options are made before any test."""
    with Judge(wins(len)) as judge, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", judge.url)
        yield


TestContract = reward_contract("tournament", {"model": "m"})


def tournament(judge, **options):
    return Tournament(Tournament.Options(**{"model": "m", "base_url": judge.url, **options}))


def rows(*lengths):
    return [row("x" * length) for length in lengths]


def test_all_pairs_meet_twice_and_the_share_of_wins_is_the_reward():
    with Judge(wins(len)) as judge:
        rewards = judged(tournament(judge, reward="wins"), *rows(1, 2, 3, 4))
        assert [reward.value for reward in rewards] == pytest.approx([0, 1 / 3, 2 / 3, 1])
        assert {reward.score for reward in rewards} == {None}
        assert rewards[0].metrics == {"tournament/ties": 0.0, "tournament/contradicted": 0.0}
        assert len(judge.asked) == 12
        assert judged(tournament(judge, reward="wins", orders="one"), *rows(1, 2, 3, 4)) == rewards
        assert len(judge.asked) == 18


@pytest.mark.parametrize("reward", ["wins", "bradley_terry"])
@pytest.mark.parametrize("lengths", [(1, 2, 2, 3), (1, 1, 1, 5), (4, 4), (1, 2, 3, 4, 5, 6)])
def test_equal_answers_tie_and_a_group_has_half_a_point_each(reward, lengths):
    with Judge(wins(len)) as judge:
        rewards = judged(tournament(judge, reward=reward), *rows(*lengths))
        values = [one.value for one in rewards]
        assert sum(values) / len(values) == pytest.approx(0.5)
        both = list(zip(values, lengths, strict=True))
        assert all((a < b) == (x < y) and (a == b) == (x == y) for a, x in both for b, y in both)
        assert len(judge.asked) == len(set(lengths)) * (len(set(lengths)) - 1)


def test_a_judge_that_likes_the_first_one_says_nothing_when_asked_in_both_orders():
    with Judge(lambda text, number: '{"explanation": "", "winner": "A"}') as judge:
        rewards = judged(tournament(judge), *rows(1, 2, 3))
        assert [reward.value for reward in rewards] == pytest.approx([0.5] * 3)
        assert rewards[0].metrics == {"tournament/ties": 1.0, "tournament/contradicted": 1.0}
        assert [reward.value for reward in judged(tournament(judge, orders="one"), *rows(1, 2, 3))] != pytest.approx([0.5] * 3)


def test_a_pair_without_a_verdict_leaves_the_group_unjudged():
    def say(text, number):
        lengths = {*map(len, answers_in(text).values())}
        return wins(len)(text, number) if lengths in ({1, 2}, {2, 3}) else "hm"

    with Judge(say) as judge:
        told = judged(tournament(judge), *rows(1, 2, 3))
        assert all(isinstance(one, Unjudged) and "gave no JSON objects with 'winner'" in one.reason for one in told)
    with Judge(lambda text, number: '{"winner": "C"}') as judge:
        assert "said 'C', which is none of A, B, tie" in judged(tournament(judge), *rows(1, 2))[0].reason


def test_an_answer_alone_is_not_judged():
    with Judge(wins(len)) as judge:
        [told] = judged(tournament(judge), *rows(1))
        assert "an answer alone has no other to meet" in told.reason
        assert tournament(judge).needs().min_group_size == 2


def test_a_swiss_tournament_has_few_pairs_and_still_finds_the_order():
    with Judge(wins(len)) as judge:
        rewards = judged(tournament(judge, rounds=3), *rows(*range(1, 9)))
        values = [reward.value for reward in rewards]
        assert len(judge.asked) == 2 * 3 * 4, "rounds, pairs and both orders, not 56"
        assert values[7] == max(values)
        assert values[0] == min(values)
        assert sum(values) / 8 == pytest.approx(0.5)
        judged(tournament(judge, rounds=9), *rows(1, 2, 3))
        assert len(judge.asked) == 24 + 6, "no more than all pairs"


@pytest.mark.parametrize("players", [2, 3, 5, 8])
def test_nobody_meets_anybody_twice(players):
    rng, games = random.Random(0), {}
    for _ in range(players - 1):
        pairs = swiss_pairs(players, games, rng)
        met = [player for pair in pairs for player in pair]
        assert len(met) == len(set(met))
        assert not games.keys() & set(pairs)
        games |= {pair: float(rng.random() < 0.5) for pair in pairs}
    assert games.keys() <= set(all_pairs(players))


def test_strengths_are_the_maximum_of_the_likelihood():
    """Against a fit by torch, with the ties of everybody with a player of strength 1."""
    import torch

    rng = random.Random(1)
    games = {pair: rng.choice([0.0, 0.5, 1.0]) for pair in all_pairs(6)}
    logs = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-15)

    def loss():
        optimizer.zero_grad()
        log = torch.nn.functional.logsigmoid
        total = -0.5 * (log(logs) + log(-logs)).sum()
        for (first, second), share in games.items():
            total = total - share * log(logs[first] - logs[second]) - (1 - share) * log(logs[second] - logs[first])
        total.backward()
        return total

    optimizer.step(loss)
    wanted = torch.sigmoid(logs[:, None] - logs[None, :]).tolist()
    found = bradley_terry(6, games)
    assert max(abs(a - b) for x, y in zip(wanted, found, strict=True) for a, b in zip(x, y, strict=True)) < 1e-6
    assert sum(mean_chance(found, [1] * 6)) == pytest.approx(3)
    copies = [1, 2, 1, 1, 1, 3]
    shares = mean_chance(win_shares(6, games), copies)
    assert sum(share * count for share, count in zip(shares, copies, strict=True)) == pytest.approx(4.5)


def test_the_winner_may_be_written_in_any_case():
    with Judge(lambda text, number: json.dumps({"winner": " TIE "})) as judge:
        assert judged(tournament(judge), *rows(1, 2))[0].value == 0.5
