"""The GPT as plain ``torch.nn``: nothing here communicates."""
