"""YAML that lies under the user's settings, reached through the entry points of ``rlhf.presets``."""
