"""The table of devices: memory as the driver reports it, peak rates, names."""

import re

import pytest

from megaspeed.topology.devices import (
    DEVICES,
    DeviceError,
    device_named,
)


def test_an_80_gb_h100_has_81559_mebibytes() -> None:
    device = device_named("h100-80gb")
    assert device.memory_bytes == 81_559 * 1_048_576 == 85_520_809_984


@pytest.mark.parametrize("name", DEVICES)
def test_no_device_has_more_gib_or_fewer_gb_than_its_name_states(name: str) -> None:
    """A data sheet's number is GiB before error correction, so the bytes are between GB and GiB."""
    stated = re.search(r"-(\d+)gb$", name)
    assert stated is not None
    lowest, highest = int(stated[1]) * 10**9, int(stated[1]) * 2**30
    assert lowest < DEVICES[name].memory_bytes <= highest
    assert DEVICES[name].name == name


@pytest.mark.parametrize("name", DEVICES)
def test_sustained_rates_are_a_plausible_part_of_the_peak(name: str) -> None:
    device = DEVICES[name]
    assert 0.45 < device.sustained_16 / device.peak_16 < 0.9
    assert (device.sustained_8 > 0) == (device.peak_8 > 0)
    assert device.sustained_8 <= 0.81 * device.peak_8
    assert device.memory_bandwidth > device.link_bandwidth > device.network_bandwidth > 0
    assert device.processors >= 40 and device.peak_fp32 < device.peak_16


def test_capital_letters_do_not_matter() -> None:
    assert device_named("H100-80GB") is DEVICES["h100-80gb"]


def test_an_unknown_device_names_the_nearest_and_lists_all() -> None:
    with pytest.raises(DeviceError, match="no device called 'a100-80'; the nearest is a100-80gb;"):
        device_named("a100-80")
    with pytest.raises(DeviceError) as error:
        device_named("?")
    assert all(name in str(error.value) for name in DEVICES)
    assert "nearest" not in str(error.value)
