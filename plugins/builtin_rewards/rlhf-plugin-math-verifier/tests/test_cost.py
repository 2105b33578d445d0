"""The front reads a text in time that grows as the text does, and never holds the event loop."""

from __future__ import annotations

import asyncio
import random
import time

from rlhf_plugin_math_verifier.candidates import find
from rlhf_plugin_math_verifier.characters import fold
from rlhf_plugin_math_verifier.reading import MAX_CHARS, other_readings, read

PIECES = r"""
\boxed{ } { $ $$ #### answer~is Answer: - 72 1,2 / % = \frac \[ \ \( ** * _ __ ` > < <answer> </answer> <b> & &amp;
<|begin_of_box|> <|x|> {"answer":~" {"answer":~[ \over~ \text{ \begin{array}{c} \begin{matrix}| ^{ _5C_2 \hat{i}
0.3333 0.121212 ... 1,000 1.000.000 1'000
2~x~3 +~1 =~2 and or~3 so~ because~ if~ in~ of~ ( not~ about~ wait,~ no,~it~is~ ? ! . 。 答案是 よ is~ A.~ (a)~1,
 \color{red} \tag{ [ \!
\, ~ | ~~ == " ' percent~of~ more~than~
probably~ 5~hours~3~minutes~ ]1;2[ \begin{cases} \\ & 1~2/3~
"""
"""What patterns of the front begin with; ``~`` is a blank."""
LENGTH = 2000


def cost(read_it, text: str) -> float:
    """Processor time of the faster of two tries."""
    times = []
    for _ in range(2):
        started = time.thread_time()
        read_it(text)
        times.append(time.thread_time() - started)
    return min(times)


def repeated() -> list[str]:
    source = random.Random(0)
    units = [piece.replace("~", " ") for piece in PIECES.split()] + [
        "\n",
        "\t",
        " ",
        "~",
        "- 1\n",
        "| a |\n",
        "1. 2\n",
        "```\n",
    ]
    return units + ["".join(source.sample(units, 3)) for _ in range(4)]


def test_four_times_the_text_takes_no_more_than_about_four_times_as_long():
    """Generous: eight times as long is allowed, and whatever takes no time at all. A quadratic pattern takes sixteen times."""

    def front(text: str) -> None:
        find(fold(text))
        find(fold(text), prose=True, parts=2)

    slow = []
    for unit in repeated():
        text = unit * (4 * LENGTH // len(unit))
        started = time.thread_time()
        front(text)
        if time.thread_time() - started > 0.05 and cost(front, text) > 8 * cost(front, text[:LENGTH]):
            slow.append(unit)
    assert slow == []


def test_a_long_answer_does_not_hold_the_event_loop(verifier, trajectory):
    """Read here it may take some tenths of a second: a process reads it."""
    contents = ["0." + "9" * 1800 + "…", "9" * 1800, "0." + "12" * 900 + "...", "1," * 900 + "1", "{" * 900 + "}" * 900]
    subject = verifier()

    async def longest_pause() -> float:
        rows = [trajectory(rf"\boxed{{{content}}}", "72") for content in contents]
        judged = asyncio.ensure_future(subject.score(rows, None))
        longest = 0.0
        while not judged.done():
            before = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - before)
        assert [reward.value for reward in judged.result()] == [0.0] * len(contents)
        return longest

    assert asyncio.run(longest_pause()) < 0.3


def test_reading_an_answer_is_bounded():
    slow = []
    for unit in repeated()[::3]:
        started = time.thread_time()
        text = (unit * MAX_CHARS)[:MAX_CHARS]
        read(text), other_readings(text)
        if time.thread_time() - started > 2:
            slow.append(unit)
    assert slow == []
