"""What TRL's side of a comparison needs, in TRL's own environment: seconds of every optimizer step."""

import time

from transformers import TrainerCallback


class Clock(TrainerCallback):
    """``seconds`` of each step, from ``on_step_begin`` to ``on_step_end``: without what is written about it."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__):
        self.seconds.append(-time.perf_counter())

    def on_step_end(self, *_, **__):
        self.seconds[-1] += time.perf_counter()
