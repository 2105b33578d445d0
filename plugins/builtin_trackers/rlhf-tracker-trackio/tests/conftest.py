"""A folder for what Trackio keeps, which it reads once for a process, as it is imported."""

from __future__ import annotations

import os
import tempfile

FOLDER = tempfile.TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = FOLDER.name
