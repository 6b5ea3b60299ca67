"""Reads the run folders of training, and compares them or shows them on one page."""
