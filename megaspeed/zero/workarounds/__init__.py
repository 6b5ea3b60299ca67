"""Work-arounds for DeepSpeed 0.19.8, one a file, each with the line it goes round and the reason.

Each has a test that fails when the work-around is left out, or when DeepSpeed no longer needs it.
"""
