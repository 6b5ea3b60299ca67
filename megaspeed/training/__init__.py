"""The training loop: its optimizer, learning rate and checkpoints, and what it measures."""
