"""DeepSpeed: roles that ZeRO trains, or splits."""
