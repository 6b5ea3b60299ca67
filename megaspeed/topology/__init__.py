"""Ranks and processes: rank arithmetic, launchers, process groups, and what happens if one fails.

grid.py, launch.py       rank <-> (pp, dp, tp); rank and world size from the launcher's variables
process_settings.py      environment variables and limits of this process
meeting.py, context.py   all ranks connect to one store; then they create the process groups
activity.py, failure.py  what a rank is doing, and what it reports if it fails
watch.py, hang.py        each rank detects failures of the others, and hangs
process_end.py           stop signals, the exit of this process, the end of other processes
"""
