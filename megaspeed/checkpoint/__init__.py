"""Checkpoints that know nothing of the layout: every tensor whole under its own name, in pieces."""
