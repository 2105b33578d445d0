"""Weight syncs between processes: both ends, and the ways between them."""
