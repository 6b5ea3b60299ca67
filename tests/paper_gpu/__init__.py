"""A CUDA run on paper: what megaspeed and DeepSpeed would ask of GPUs, recorded on CPUs.

A CPU hides what costs most on a GPU: whoever asks waits at once, so no wait is ever seen. The kit
replaces the two things that make a GPU a GPU, and keeps all the rest real: the worker, the model,
the executor, DeepSpeed's engine and its ZeRO optimizers.

    accelerator.py   DeepSpeed's accelerator says that it is asynchronous, so DeepSpeed takes its
                     CUDA branches; streams and events are recorded, and so is every wait of the
                     host
    fake_world.py    torch's `fake` process groups: one process is any rank of any grid
    recorder.py      what the step launches, sends and reads, in order

The tests hold budgets over the records. A budget may only be lowered.
"""
