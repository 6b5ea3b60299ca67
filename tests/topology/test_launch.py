"""Every launcher's variables give the rank and world size. Contradictions are refused."""

import re

import pytest

from megaspeed.topology import launch
from megaspeed.topology.launch import LaunchEnvironment, LaunchError, read_launch_environment

MEETING_POINT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _torchrun(**changes: str) -> dict[str, str]:
    names = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    return {**names, **MEETING_POINT, **changes}


def _srun(**changes: str) -> dict[str, str]:
    names = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "11",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    }
    return {**names, **MEETING_POINT, **changes}


def _mpirun(**changes: str) -> dict[str, str]:
    names = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    return {**names, **MEETING_POINT, **changes}


def _mpich(**changes: str) -> dict[str, str]:
    names = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    return {**names, **MEETING_POINT, **changes}


def _without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_torchrun_is_read() -> None:
    assert read_launch_environment(_torchrun()) == LaunchEnvironment(
        rank=5, world_size=8, local_rank=1, local_world_size=4, source="RANK/WORLD_SIZE"
    )


def test_deepspeed_calls_the_local_world_size_local_size() -> None:
    environ = _without(_torchrun(LOCAL_SIZE="2"), "LOCAL_WORLD_SIZE")
    assert read_launch_environment(environ).local_world_size == 2


def test_srun_is_read_with_its_short_list_of_tasks_per_node() -> None:
    assert read_launch_environment(_srun()) == LaunchEnvironment(
        rank=9, world_size=11, local_rank=1, local_world_size=4, source="SLURM_*"
    )


def test_mpirun_is_read() -> None:
    assert read_launch_environment(_mpirun()) == LaunchEnvironment(
        rank=3, world_size=4, local_rank=1, local_world_size=2, source="OMPI_*"
    )


def test_mpich_is_read() -> None:
    assert read_launch_environment(_mpich()) == LaunchEnvironment(
        rank=3, world_size=4, local_rank=1, local_world_size=2, source="PMI_*"
    )


def test_srun_is_read_where_its_plugin_speaks_pmi_as_well() -> None:
    environ = _srun(PMI_RANK="9", PMI_SIZE="11", PMIX_RANK="9")
    assert read_launch_environment(environ).source == "SLURM_*"


def test_plain_python_is_one_process() -> None:
    assert read_launch_environment({"PATH": "/usr/bin"}) == LaunchEnvironment(
        rank=0, world_size=1, local_rank=0, local_world_size=1, source="single process"
    )


def test_one_process_needs_neither_a_local_rank_nor_a_meeting_point() -> None:
    launch = read_launch_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (0, 1, 0)


@pytest.mark.parametrize("tasks", ["16", "3"])
def test_a_world_size_beside_other_slurm_tasks_is_refused_naming_both(tasks: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": tasks}
    with pytest.raises(LaunchError, match=rf"1 from RANK/WORLD_SIZE, but SLURM_NTASKS={tasks}"):
        read_launch_environment(environ)


def test_ranks_beside_other_mpi_ranks_are_refused_naming_both() -> None:
    environ = _torchrun(OMPI_COMM_WORLD_SIZE="3", OMPI_COMM_WORLD_RANK="0")
    with pytest.raises(LaunchError, match=r"8 from RANK/WORLD_SIZE, but OMPI_COMM_WORLD_SIZE=3"):
        read_launch_environment(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (_torchrun(PMI_SIZE="5"), "8 from RANK/WORLD_SIZE, but PMI_SIZE=5"),
        (_mpirun(PMI_SIZE="3"), "4 from OMPI_*, but PMI_SIZE=3"),
        (_srun(PMI_SIZE="2"), "11 from SLURM_*, but PMI_SIZE=2"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "1 from single process, but PMI_SIZE=4"),
        ({"PMIX_RANK": "3"}, "1 from single process, but PMIX_RANK=3"),
        (_torchrun(PMIX_RANK="8"), "8 from RANK/WORLD_SIZE, but PMIX_RANK=8"),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "0"}, "but SLURM_NTASKS=0"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused_naming_both(
    environ: dict[str, str], message: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(message)):
        read_launch_environment(environ)


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1", "29500 ", "1e3", "٣", "2" * 5000])
def test_a_port_that_is_none_is_refused_with_its_text(port: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_PORT must be a port, a number from 1 to 65535"):
        read_launch_environment(_torchrun(MASTER_PORT=port))


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a..b", "x" * 300, "256.0.0.1"])
def test_an_address_that_no_machine_has_is_refused_with_its_name(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_RESOLVE_SECONDS", 0.0)
    with pytest.raises(
        LaunchError, match=f"MASTER_ADDR is '{address[:80]}', which cannot be resolved"
    ):
        read_launch_environment(_torchrun(MASTER_ADDR=address))


@pytest.mark.parametrize("nodes", ["1", "2", "8"])
def test_one_torchrun_in_each_slurm_task_is_right(nodes: str) -> None:
    environ = _torchrun(SLURM_NTASKS=nodes, SLURM_PROCID="0", SLURM_STEP_ID="0")
    assert read_launch_environment(environ).source == "RANK/WORLD_SIZE"


@pytest.mark.parametrize("tasks", ["3", "5", "32"])
def test_an_elastic_run_that_has_lost_nodes_has_fewer_agents_than_tasks(tasks: str) -> None:
    """Each task runs one torchrun, and one of them is gone. 8 ranks of 2 agents remain. An earlier
    version refused them.
    """
    elastic = {"TORCHELASTIC_RUN_ID": "job", "GROUP_WORLD_SIZE": "2"}
    environ = _torchrun(SLURM_NTASKS=tasks, SLURM_STEP_ID="0", PMIX_RANK="31", **elastic)
    assert read_launch_environment(environ).world_size == 8
    with pytest.raises(LaunchError, match=f"SLURM_NTASKS={tasks}|PMIX_RANK=31"):
        read_launch_environment({**environ, "GROUP_WORLD_SIZE": "1"})


def test_plain_python_in_an_allocation_of_many_tasks_is_refused() -> None:
    batch_script = {"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(LaunchError, match=r"SLURM_NTASKS=16, but .* world size would be 1"):
        read_launch_environment(batch_script)


def test_plain_python_in_an_allocation_of_one_task_is_one_process() -> None:
    batch_script = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert read_launch_environment(batch_script).source == "single process"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_missing_number_is_named(missing: str) -> None:
    with pytest.raises(LaunchError, match=rf"^{missing} is not set, but .*: set {missing} too"):
        read_launch_environment(_without(_torchrun(), missing))


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
@pytest.mark.parametrize("environ", [_torchrun(), _srun(), _mpirun()])
def test_several_ranks_without_a_meeting_point_learn_what_to_export(
    environ: dict[str, str], missing: str
) -> None:
    with pytest.raises(
        LaunchError, match=rf"need an address to connect to, but {missing} is not set.*expor"
    ):
        read_launch_environment(_without(environ, missing))


@pytest.mark.parametrize("text", ["first", "-1", "1_6", " 1", "٣", "", "2" * 10])
def test_a_rank_that_is_no_number_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(LaunchError, match=f"RANK must be an integer of .*, but is '{text}'"):
        read_launch_environment(_torchrun(RANK=text))


@pytest.mark.parametrize(
    ("name", "environ"),
    [
        ("WORLD_SIZE", _torchrun()),
        ("MASTER_PORT", _torchrun()),
        ("SLURM_NTASKS", _srun()),
    ],
)
def test_a_value_of_thousands_of_digits_is_not_repeated_in_full(
    name: str, environ: dict[str, str]
) -> None:
    with pytest.raises(LaunchError, match=f"{name} .*777") as refused:
        read_launch_environment({**environ, name: "7" * 5000})
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("text", "size"),
    [("4(x2),3", 4), ("2,3,6", 6), ("4(x99999999999)", 4), ("9" * 5000, 11), ("0", 11), ("", 11)],
)
def test_the_largest_number_of_tasks_of_a_node_is_used(text: str, size: int) -> None:
    launch = read_launch_environment(_srun(SLURM_STEP_TASKS_PER_NODE=text))
    assert launch.local_world_size == size


@pytest.mark.parametrize("changes", [{"RANK": "8"}, {"LOCAL_RANK": "4"}])
def test_a_rank_beyond_its_world_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="does not exist among"):
        read_launch_environment(_torchrun(**changes))
