"""Checkpoints: how they are written, found, checked and read, independent of the layout."""
