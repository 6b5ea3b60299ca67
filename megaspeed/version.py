"""The version of this package, beneath all other modules."""

__version__ = "0.3.0"
