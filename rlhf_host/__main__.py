"""``python -m rlhf_host``: the same as ``rlhf``."""

from rlhf_host.cli.main import main

if __name__ == "__main__":
    main(prog_name="rlhf")
