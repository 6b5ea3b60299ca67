"""Measures the memory and the traffic of a run while it trains."""
