"""The trainer's model."""

from .rig import load, models  # noqa: F401
