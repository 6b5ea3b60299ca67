"""A CUDA run on paper: CPUs record what megaspeed and DeepSpeed would ask of GPUs.

A CPU hides what costs most on a GPU. A call returns when its work is done, so no wait is visible.
These files replace the accelerator and the process groups. Everything else is real: the worker, the
model, the executor, DeepSpeed's engine and its ZeRO optimizers.

    accelerator.py     tells DeepSpeed that it is asynchronous, so DeepSpeed takes its CUDA
                       branches; records streams, events and waits of the host
    cases.py           runs with each feature
    fake_world.py      torch's ``fake`` process groups: one process is any rank of any grid
    on_device.py       each feature in a fake world on the real device
    recorder.py        what the step launches, sends and reads, in order
    races.py           accesses of two streams to the same memory that no wait puts in order
    nccl_simulator.py  which orders of sends, receives and collectives deadlock

The tests set budgets for these records. A budget may only be lowered.
"""
