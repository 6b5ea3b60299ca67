"""Locks, paths, and files and folders that are complete or absent after any interruption."""
