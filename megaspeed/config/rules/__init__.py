"""Rules that more than one key, or the number of processes, must satisfy together."""
