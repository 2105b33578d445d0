"""Backends, which make optimizer steps."""
