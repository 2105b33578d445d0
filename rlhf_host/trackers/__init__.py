"""The host's own trackers; found by entry point like those of any package."""
