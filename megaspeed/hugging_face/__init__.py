"""Models of Hugging Face transformers: import, export, comparison, generation and evaluation."""
