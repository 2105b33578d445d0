"""From other projects' command lines and configurations to ours: what each of their options is here, or that it is nothing."""
