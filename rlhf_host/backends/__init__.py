"""Backends do optimizer steps."""
