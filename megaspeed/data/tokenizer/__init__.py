"""What makes ids of text: read from disk, trained, chosen for a run, kept in the cache."""
