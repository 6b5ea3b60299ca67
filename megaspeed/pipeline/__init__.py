"""Pipeline parallelism: schedules as data, their check, their execution, partition of layers."""
