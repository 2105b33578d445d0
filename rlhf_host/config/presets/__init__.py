"""YAML that the user's settings override: the lowest layer, and presets found by the entry points of ``rlhf.presets``."""
