"""Work-arounds for DeepSpeed 0.19.8, each with the line that it changes and the reason.

Each has a test that fails if the work-around is omitted, or if DeepSpeed no longer needs it.
"""
