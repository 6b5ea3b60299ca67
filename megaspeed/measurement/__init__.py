"""Trains to find something out: is a layout exact, how much does it hold, send and take?

verification/      a layout against one process of plain torch
compare/           the ZeRO stages and torch's DDP and FSDP2 side by side
bench/             the step time beside other libraries that train the same task
scaling.py         tokens/s at several numbers of ranks, and which part of a step loses the rest
scaling_report.py  its text and its picture
turns.py           rows (a run, or a peer) take turns; which differences of their times are noise
timed_steps.py     a turn on one rank
torch_trainers.py  training with DDP, with FSDP2, or without communication
report.py          text, Markdown, JSON and a picture of compare, bench and scaling
local_ranks.py     runs a function on all ranks of a layout, on this machine
watched_step.py    measures the memory and traffic of a rank while it trains
allocations.py     what torch's allocator holds, by category
cpu_speed.py       measures this machine for plans with the device cpu
"""
