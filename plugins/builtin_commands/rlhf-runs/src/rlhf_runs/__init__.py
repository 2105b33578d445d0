"""Commands for finished and running runs: list, show and compare them, a page for the browser, models for other programs.

The names here are for packages that show runs too. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_runs.report import Shown as Shown
    from rlhf_runs.report import document as document
    from rlhf_runs.report import pack as pack
    from rlhf_runs.terminal import number as number
    from rlhf_runs.terminal import table as table

__getattr__, __dir__, __all__ = lazily(__name__)
