"""The host's own trackers; found by entry point like everyone's."""
