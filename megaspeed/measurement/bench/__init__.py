"""``megaspeed bench``: the step time of a run beside other libraries that train the same task.

    run (checked) -> workloads: the run itself, and a tiny host-bound one of the same depth
                  -> turns: A B C A B C ..., each a launch of N fresh processes
                  -> medians, quartiles, ratios of neighbouring turns -> Markdown, JSON, a picture

contest   the workloads, which peers can train the run, and the rows
job       megaspeed's turn: the complete training job
peers     those that train with DeepSpeed
result    the figures of all turns: spread, ratios, operations
report    the figures as text, JSON and picture

Turns never share memory, and a peak of memory belongs to one contestant. megaspeed's turn has its
watch, metrics and log files; only the checkpoint of the last step is not written. A step's time is
that on rank 0 from the end of one step to the end of the next. It includes loading the samples, the
loss on the host, and what megaspeed records in every step.
"""
