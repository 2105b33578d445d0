"""Ray: the processes of roles and engines on one machine or several, and what they share."""
