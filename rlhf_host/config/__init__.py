"""The run's configuration: schema, YAML, flags, presets, printing, validation. Imports no torch."""
