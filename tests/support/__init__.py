"""Tools that several tests use: ranks, forked and launched runs, nodes, a browser, tiny models."""
