"""From a run's JSON to the dictionary that DeepSpeed is given.

The keys keep their names. What differs, and why:

    zero_optimization.stage 0    1, over a group of one rank: nothing is partitioned, and one code
                                 path serves all stages and dtypes. Gradients are averaged over
                                 the data axis by this package.
    gradient_accumulation_steps  1: the schedule counts micro-batches, and the loss is scaled
                                 before its backward.
    reduce_bucket_size           at most the rank's own parameters: DeepSpeed allocates the
                                 bucket in full.
    communication_data_type      the accumulation dtype where the run does not say: DeepSpeed
                                 would average fp32 sums in the parameters' dtype.
    optimizer, scheduler         removed: the optimizer is passed as an object, and the learning
                                 rate is set each step.
    comms_logger                 removed unless it is enabled: DeepSpeed 0.19.8 (comm/config.py:22)
                                 turns the logger on if the key is there, whatever it says, and the
                                 logger waits for the device after every collective.
    timers.throughput            off: it waits for the device before every forward
                                 (utils/timer.py:238). The run measures its own step times.
"""

from typing import Any

from megaspeed.config.resolve import Run

_OURS = ("train_batch_size", "optimizer", "scheduler")


def deepspeed_json(run: Run, *, local_elements: int) -> dict[str, Any]:
    """DeepSpeed's configuration for one rank of ``run``.

    Args:
        run: the resolved run.
        local_elements: number of parameters that this rank's pipeline stage and tensor shard hold.
    """
    json = run.config.deepspeed_json()
    for key in _OURS:
        json.pop(key, None)
    replicas = 1 if run.zero_stage == 0 else run.grid.dp
    json["train_micro_batch_size_per_gpu"] = run.batch.micro_batch_size
    json["gradient_accumulation_steps"] = 1
    json["train_batch_size"] = run.batch.micro_batch_size * replicas
    json["zero_force_ds_cpu_optimizer"] = False
    if not run.config.comms_logger.enabled:
        json.pop("comms_logger", None)
    json["timers"] = {"throughput": {"enabled": False}}
    if run.accumulation_dtype != run.precision:
        json.setdefault("communication_data_type", run.accumulation_dtype)
    zero = json["zero_optimization"]
    zero["stage"] = max(1, run.zero_stage)
    zero["memory_efficient_linear"] = False
    zero["reduce_bucket_size"] = min(zero["reduce_bucket_size"], local_elements)
    return json
