"""Runtimes: where roles live."""
