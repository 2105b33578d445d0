"""Waits until a Ray cluster has all its machines:  python examples/cluster/wait_for_nodes.py HOST:PORT MACHINES [SECONDS]

A run is refused at once if its cluster is too small, so it must not begin while machines are still joining.
"""

import socket
import sys
import time

import ray


def count(address: str) -> int:
    """Returns how many machines are in the cluster; 0 if it does not answer yet."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()  # ray.init() would try for minutes
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError):
        return 0
    return sum(node["Alive"] for node in ray.nodes())


def main(address: str, machines: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (found := count(address)) < machines:
        if time.monotonic() > end:
            sys.exit(
                f"{found} of {machines} machines are in the Ray cluster {address} after {seconds:g} s: read what `ray start`"
                " printed on the others. All need the same RAY_AUTH_TOKEN and must reach this address"
            )
        time.sleep(1)
    print(f"{found} of {machines} machines are in the Ray cluster {address}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 300.0)
