"""The pipeline axis: schedules as data, their check, the partition of layers, the executor."""
