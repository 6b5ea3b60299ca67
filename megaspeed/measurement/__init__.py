"""Trains to find something out: is a layout exact, how much does it hold, send and take?

verification/       a layout against one process of plain torch
compare.py          the ZeRO stages and torch's DDP and FSDP2 side by side, and the row to use
bench.py            the step time beside other libraries that train the same task
scaling.py          tokens/s at several numbers of ranks, and which part of a step loses the rest
turns.py            rows (a run, or a peer) take turns; which differences of their times are noise
report.py           text, Markdown, JSON and a picture of compare, bench and scaling
torch_trainers.py   training with DDP, with FSDP2, or without communication
deepspeed_peers.py  training with DeepSpeed's own engines
local_ranks.py      runs a function on all ranks of a layout, on this machine
watched_step.py     measures the memory and traffic of a rank while it trains
allocations.py      what torch's allocator holds, by category
cpu_speed.py        measures this machine for plans with the device cpu
"""
