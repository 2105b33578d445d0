"""Only the modules that agents need; they are the published ones."""

import os

__path__.append(os.environ["PUBLISHED_UTILS"])
