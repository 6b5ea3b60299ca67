"""Analysis of runs: comparison with one process, measurement, and prediction."""
