"""Weight sync: from the trainer to the engines, under a version."""
