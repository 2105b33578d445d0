"""Which server gets a request."""

import random
from dataclasses import dataclass, field

import pytest
from rlhf_engine_http.balance import BLOCK, BLOCKS, IDLE, LOAD, Balance, Prefixes, chain_of


@dataclass
class Server:
    open: int = 0
    prefixes: Prefixes = field(default_factory=Prefixes)


def sent(balance, servers, group, ids):
    number = balance.choose(servers, group, chain_of(ids))
    servers[number].open += 1
    servers[number].prefixes.add(chain_of(ids))
    return number


@pytest.mark.parametrize("seed", range(20))
def test_known_blocks_are_those_of_the_longest_beginning(seed):
    draw = random.Random(seed)
    prefixes, rows = Prefixes(), []
    for _ in range(30):
        base = draw.choice(rows)[: draw.randrange(0, 80)] if rows and draw.random() < 0.7 else []
        row = base + [draw.randrange(4) for _ in range(draw.randrange(1, 60))]
        known = prefixes.known(chain_of(row))
        same = 0
        for other in rows:
            equal = next((at for at, pair in enumerate(zip(row, other, strict=False)) if pair[0] != pair[1]), len(row))
            whole = row == other
            same = max(same, len(chain_of(row)) if whole else min(equal, len(row), len(other)) // BLOCK)
        assert known == same
        prefixes.add(chain_of(row))
        rows.append(row)


def test_the_ends_of_old_rows_are_forgotten_first(monkeypatch):
    monkeypatch.setattr("rlhf_engine_http.balance.BLOCKS", 4)
    prefixes = Prefixes()
    prefixes.add(old := chain_of(range(4 * BLOCK)))
    prefixes.add(chain_of([7] * BLOCK))
    assert len(prefixes) == 4 < BLOCKS
    assert prefixes.known(old) == 3
    prefixes.clear()
    assert prefixes.known(old) == 0


def test_a_conversation_stays_where_its_beginning_is():
    balance, servers = Balance(), [Server(), Server(), Server()]
    system, rows = list(range(40)), {}
    for number in range(12):
        row = [*system, *[100 + number] * 40]
        rows[number] = (sent(balance, servers, number, row), row)
    assert {home for home, _ in rows.values()} == {0, 1, 2}
    for server in servers:
        server.open = 0
    for number, (home, row) in rows.items():
        longer = [*row, *[500 + number] * 40]
        assert sent(balance, servers, ("another", number), longer) == home
        servers[home].open -= 1


@pytest.mark.parametrize("seed", range(20))
def test_no_server_is_far_busier_than_the_others(seed):
    """Whatever requests have in common, and whenever they end."""
    draw = random.Random(seed)
    balance, servers = Balance(), [Server() for _ in range(draw.randrange(1, 6))]
    for _ in range(300):
        busy = [server for server in servers if server.open]
        if busy and draw.random() < 0.3:
            draw.choice(busy).open -= 1
            continue
        fewest = min(server.open for server in servers)
        number = sent(balance, servers, draw.randrange(3), [draw.randrange(2)] * draw.randrange(1, 100))
        assert servers[number].open <= max(IDLE, LOAD * (fewest + 1))


def test_a_beginning_that_all_prompts_share_leaves_no_server_idle():
    balance, servers = Balance(), [Server(), Server(), Server(), Server()]
    for number in range(400):
        sent(balance, servers, number, [*range(160), 200 + number])
    assert min(server.open for server in servers) > 50


def test_a_prompt_that_nobody_knows_goes_to_the_server_with_the_fewest_requests():
    balance, servers = Balance(), [Server(2), Server(1), Server(1)]
    servers[1].prefixes.add(chain_of([9] * 64))
    assert sent(balance, servers, 1, [5, 6, 7]) == 2
