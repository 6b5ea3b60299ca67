"""Models of Hugging Face transformers: into checkpoints, out of them, and whether they agree."""
