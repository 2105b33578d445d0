"""X-ray of a batch: what each installed algorithm would do with the same saved answers.

``rlhf_host.xray`` is ``xray`` of this package. Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_host.internals import lazily

if TYPE_CHECKING:
    from rlhf_xray.functions import xray as xray
    from rlhf_xray.measures import Algorithm as Algorithm
    from rlhf_xray.measures import XRay as XRay

__getattr__, __dir__, __all__ = lazily(__name__)
