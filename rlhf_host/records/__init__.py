"""The records that hooks receive and return."""
