"""Which server gets a request: the one that has the longest beginning of it in its cache, unless it is far busier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Protocol

BLOCK = 16
"""Tokens of a block: a common size of the servers' own."""
BLOCKS = 65_536
"""Number of blocks that a server is believed to keep: a million tokens."""
HOMES = 100_000
"""Number of groups whose server is remembered."""
LOAD, IDLE = 2, 4
"""A server gets no request while it has ``LOAD`` times as many open as the server with the fewest (which counts with one more),
and ``IDLE``. Bounded loads (Mirrokni et al., arXiv 1608.01350) compare with the mean: with that, two of three servers may have all
requests.
"""


def chain_of(token_ids: Sequence[int]) -> list[int]:
    """Returns a number for each beginning of the tokens that ends with a block, and one for all of them."""
    chain: list[int] = []
    before = 0
    for start in range(0, len(token_ids), BLOCK):
        before = hash((before, *token_ids[start : start + BLOCK]))
        chain.append(before)
    return chain


class Prefixes:
    """The beginnings of rows that a server probably has in its cache: those it was sent or answered with, the latest of them."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, chain: Sequence[int]) -> None:
        for block in reversed(chain):  # so that a row's end is forgotten before its beginning
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > BLOCKS:
            self._blocks.popitem(last=False)

    def known(self, chain: Sequence[int]) -> int:
        """Returns the number of blocks, from the first one on, that are here."""
        return next((count for count, block in enumerate(chain) if block not in self._blocks), len(chain))

    def clear(self) -> None:
        self._blocks.clear()


class Balanced(Protocol):
    """What is chosen."""

    open: int
    """Number of requests that it has not answered."""
    prefixes: Prefixes


class Balance:
    """Chooses servers by prefix, with bounded load."""

    def __init__(self) -> None:
        self._homes: OrderedDict[Hashable, Balanced] = OrderedDict()

    def choose(self, servers: Sequence[Balanced], group: Hashable, chain: Sequence[int]) -> int:
        """Returns which of ``servers`` gets a request: among those that are not far busier than the others, the one that knows
        the most blocks of its prompt, had requests of the same group, has the fewest open, or was given the fewest blocks.

        Args:
            group: what the samples of one task share.
            chain: of the prompt.
        """
        most = max(IDLE, LOAD * (min(one.open for one in servers) + 1))
        home = self._homes.pop(group, None)

        def worth(number: int) -> tuple[int, bool, int, int]:
            one = servers[number]
            return one.prefixes.known(chain), one is home, -one.open, -len(one.prefixes)

        chosen = max((number for number, one in enumerate(servers) if one.open < most), key=worth)
        self._homes[group] = servers[chosen]
        if len(self._homes) > HOMES:
            self._homes.popitem(last=False)
        return chosen
