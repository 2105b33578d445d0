"""A training server for clients of Tinker's API: LoRA adapters over one base, trained by sessions of this host."""
