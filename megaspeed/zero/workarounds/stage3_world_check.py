"""DeepSpeed 0.19.8, runtime/zero/partitioned_param_coordinator.py:260-269 and
runtime/zero/utils.py:81-130: at the first forward of ZeRO-3 every rank of the *world* broadcasts
its list of modules from rank 0 and compares.

Pipeline stages hold different modules, and a later stage is still waiting for its input while the
first one broadcasts: the run hangs. Within a stage all data-parallel ranks run the same program by
construction, so the check has nothing to find; it is replaced by nothing.
"""

from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator


def skip_world_wide_module_check() -> None:
    """Removes the comparison from the coordinator's module, where it was imported by name."""
    coordinator.assert_ints_same_as_other_ranks = lambda ints: None
