"""A recording of one process."""

from __future__ import annotations

import threading

from rlhf_profile.process import Recording


class Slow:
    """A profiler that takes a while to stop."""

    def __init__(self):
        self.asked, self.stopped = threading.Event(), 0

    def stop(self):
        self.asked.set()
        threading.Event().wait(0.3)
        self.stopped += 1


def test_a_step_that_ends_while_its_profiler_is_stopped_early_waits_for_it():
    own = Recording(step=1, torch=False, begin="step", shapes=False, stack=False, memory=False, seconds=2.0)
    own._profiler = slow = Slow()
    early = threading.Thread(target=own._stop_early)
    early.start()
    assert slow.asked.wait(60)
    own.forget()
    assert slow.stopped == 1
    assert own.notes == ["torch's profiler recorded the first 2 s (profile.seconds)"]
    early.join()
