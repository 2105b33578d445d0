"""An engine, a backend and a runtime, written against the host's public names alone."""
