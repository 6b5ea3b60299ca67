"""Where each rank stands: rank arithmetic, the launcher's variables, and the process groups.

grid.py     rank <-> (pp, dp, tp) and the groups along the axes: plain integers
launch.py   rank and world size from torchrun, deepspeed, srun, mpirun or plain python
context.py  ParallelContext: this rank's coordinates, device and groups, and how they are created
failure.py  what a rank reports when it fails: host, rank, coordinates, step and phase
process_settings.py  environment variables and limits that a rank sets for its own process
"""
