"""The host's own extensions and its default agent; found by entry point like those of any package."""
