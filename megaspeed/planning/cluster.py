"""The machines that a run is planned for, as the user states them.

--device h100-80gb --nodes 8 --gpus-per-node 8 --nic-gbps 400
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError

from megaspeed.config.errors import ConfigError
from megaspeed.config.loading import translate
from megaspeed.config.section import LARGEST_WORLD, Bandwidth, Section
from megaspeed.planning.costs.placement import GPUS_PER_NODE
from megaspeed.planning.costs.workload import Cluster
from megaspeed.topology.devices import DeviceError, device_named
from megaspeed.units import counted

CPU = "cpu"
"""The name of the device that is measured, because no table can have its figures."""


class ClusterConfig(Section):
    """The machines, as a user states them."""

    device: str | None = None
    """Name of the accelerator, or cpu for this machine, which is measured."""
    nodes: int | None = Field(default=None, gt=0, le=LARGEST_WORLD)
    """Number of nodes. If omitted: as many as the ranks need."""
    gpus_per_node: int = Field(default=GPUS_PER_NODE, gt=0, le=LARGEST_WORLD)
    """Accelerators of one node."""
    nic_gbps: Bandwidth | None = None
    """Network bandwidth of each accelerator, in Gb/s in one direction. If omitted: that of the
    vendor's own system."""
    dollars_per_gpu_hour: float | None = Field(default=None, ge=0)
    """Price of one accelerator for one hour."""
    calibrate: float = Field(default=1.0, ge=0.01, le=100)
    """Measured / predicted step time of a run on such machines. It multiplies all times."""

    @property
    def gpus(self) -> int | None:
        """Accelerators of all nodes; None if the number of nodes is not stated."""
        return None if self.nodes is None else self.nodes * self.gpus_per_node

    def ranks(self, world_size: int | None) -> int:
        """Return the stated number of ranks. If it is None, one rank for each device.

        Raises ConfigError if neither is stated, or there are not enough devices.
        """
        if world_size is None and self.gpus is None:
            raise _wrong("the number of ranks is missing: add --world-size, or --nodes")
        ranks = world_size or self.gpus or 0
        if ranks > LARGEST_WORLD:
            raise _wrong(
                f"{ranks:,} ranks are more than the limit of {LARGEST_WORLD:,}; use fewer nodes"
            )
        if self.nodes is not None and ranks > self.nodes * self.gpus_per_node:
            raise _wrong(
                f"{ranks:,} ranks need more than the {self.gpus:,} devices of "
                f"{counted(self.nodes, 'node')} with {self.gpus_per_node:,} each; add nodes, or "
                "omit --nodes"
            )
        return ranks

    def cluster(self) -> Cluster | None:
        """Return the figures of the machines; None if no device is named, or the device is cpu."""
        if self.device is None or self.device == CPU:
            return None
        device = device_named(self.device)
        stated = self.nic_gbps
        return Cluster(
            device=device,
            gpus_per_node=self.gpus_per_node,
            network_bandwidth=device.network_bandwidth if stated is None else stated / 8,
            calibration=self.calibrate,
        )


def _wrong(problem: str) -> ConfigError:
    return ConfigError([problem], "the cluster")


def read_cluster(stated: Mapping[str, Any]) -> ClusterConfig:
    """Return the cluster with these keys. None is as if omitted.

    Raises ConfigError with all mistakes.
    """
    values = {key: value for key, value in stated.items() if value is not None}
    known = ClusterConfig.model_fields
    problems = [
        f"{key} does not apply to the device cpu, which is this machine; omit it"
        for key in ("nodes", "gpus_per_node", "nic_gbps")
        if values.get("device") == CPU and key in values
    ]
    for key in values.keys() - known:
        problems.append(f"{key} is an unknown key; the keys of a cluster are {', '.join(known)}")
    values = {key: value for key, value in values.items() if key in known}
    try:
        cluster = ClusterConfig.model_validate(values)
        if cluster.device not in (None, CPU):
            device_named(cluster.device)
    except DeviceError as error:
        problems.append(str(error))
    except ValidationError as error:
        problems += [each.message for each in translate(error, values)]
    if problems:
        raise ConfigError(problems, "the cluster")
    return cluster
