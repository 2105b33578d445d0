"""Plugins: finding them, choosing them, their options, and the manager of one run. Imports no torch."""
