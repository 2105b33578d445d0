"""Products of two numbers, with a calculator. One file is a whole environment: tasks, rewards and tools."""

import random

system_prompt = "Use the calculator, then say the product."
max_turns = 4


def tasks(split, seed):
    """Tasks of ``train`` or ``eval``; instead of a function, ``tasks`` may be the name of data: a file or a Hub dataset."""
    draw = random.Random(f"{split} {seed}")
    for _ in range(512 if split == "train" else 64):
        a, b = draw.randrange(2, 1000), draw.randrange(2, 1000)
        yield {"prompt": f"What is {a} times {b}?", "label": str(a * b)}


def right(text, label):
    """The answer ends with the product. Parameters are chosen by name: text, label, prompt, metadata, trajectory."""
    return text.rstrip(" .").endswith(label)


def short(text):
    """From 0 to -1: long answers cost something."""
    return -min(len(text), 1000) / 1000


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


rewards = {right: 1.0, short: 0.1}
tools = [multiply]
