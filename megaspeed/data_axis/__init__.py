"""What the data axis does in a step, as plain data: what is reduced and gathered, when and how.

    run, pipeline stage --axis.py--> DataAxis     its parameters, buckets and gathers
        zero/       makes DeepSpeed's parameter groups from it, reduces and gathers as it states
        planning/   counts the memory and traffic of it
        steps.py    lists what each instruction of a step reduces and gathers, and checks it

The data axis here is all ranks with the same weights (dp x cp): shards, over which ZeRO partitions,
and replicas, which hold the same partition. All ranks of a pipeline stage share one plan. Without
torch, it is made in milliseconds.
"""
