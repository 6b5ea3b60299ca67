"""What several tests use: rank processes, launched runs, nodes, a browser, tiny models."""
