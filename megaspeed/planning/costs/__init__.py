"""Predict memory and traffic of a run from its configuration, and the step time on given machines.

Pure arithmetic over shapes: no code here makes a tensor or imports DeepSpeed.

memory.py             model states, and what compression of gradients needs
stage_states.py       what ZeRO holds in each pass: gradients, buckets in flight, gathered layers
activations.py        what a forward keeps for its backward
stage_memory.py       the peak of a rank in a step
reserved_memory.py    what CUDA, NCCL, cuBLAS and the allocator need beside tensors
traffic.py            bytes that a rank sends, by axis
placement.py          which ranks are on one node
workload.py           what the ranks compute and send, for the step time
step_time.py, network_time.py    the parts of the step time
"""
