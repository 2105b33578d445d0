"""Weight sync: from the trainer to the engines, under a version. Syncs between processes are in ``rlhf_host.distributed``."""
