"""Runs looked at from outside: compared with one process, measured, predicted."""
