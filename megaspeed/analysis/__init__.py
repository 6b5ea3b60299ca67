"""Runs looked at from outside: the plain-torch reference, and layouts compared with it."""
