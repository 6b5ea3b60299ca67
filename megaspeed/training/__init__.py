"""The training loop, its optimizer and learning rate, what it measures, and the main job."""
