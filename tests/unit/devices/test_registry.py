"""Names to devices."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.options import options
from torchTensorRef.devices import (
    DeviceSpec,
    SimDevice,
    default_name,
    known_devices,
    reset,
    resolve,
)


@pytest.fixture(autouse=True)
def fresh_registry():
    reset()
    yield
    reset()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cpu", "cpu"),
        ("cpu", "CPU:0"),
        ("sim", "sim:0"),
        ("sim:1", " sim:1 "),
        ("sim:h200", "sim:h200:0"),
        ("cpu", torch.device("cpu")),
    ],
)
def test_the_same_name_is_the_same_device(one, other):
    assert resolve(one) is resolve(other)


def test_devices_are_themselves():
    mine = SimDevice(DeviceSpec("mine", capacity_nbytes=5))
    assert resolve(mine) is mine


def test_names_tell_spec_and_number():
    names = [resolve(name).name for name in ("sim", "sim:3", "sim:rtx3060", "sim:rtx3060:1")]
    assert names == ["sim:0", "sim:3", "sim:rtx3060:0", "sim:rtx3060:1"]
    assert resolve("sim:rtx3060:1").capacity_nbytes == 12 * 2**30
    assert [device.name for device in known_devices()] == ["cpu", *names]


def test_simulated_devices_of_one_host_share_its_clock():
    one, two, server = resolve("sim:0"), resolve("sim:1"), resolve("sim:h200")
    one.charge(1, 1, "float32")
    assert one.now_ns() == two.now_ns() > 0
    assert server.now_ns() == 0


def test_what_the_host_computes_is_charged_to_the_virtual_host():
    sim = resolve("sim")
    resolve("cpu").charge(0, 40_000, "float32")
    assert sim.now_ns() == 1000  # 40 GB/s


def test_the_same_spec_is_the_same_device():
    spec = DeviceSpec("Mine", capacity_nbytes=5)
    mine = resolve(spec)
    assert mine is resolve(DeviceSpec("Mine", capacity_nbytes=5)) is resolve("sim:mine")
    other = resolve(spec.scaled(capacity=6))
    assert (mine.capacity_nbytes, other.capacity_nbytes) == (5, 6)
    assert other is resolve(spec.scaled(capacity=6))
    assert (mine.name, other.name) == ("sim:mine:0", "sim:mine-2:0")


def test_settings_reach_the_simulated_device():
    with options(poison=True, faults="alloc:1"):
        sim = resolve("sim")
    assert sim.poison
    with pytest.raises(torch.OutOfMemoryError):
        sim.allocate(1)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("sm", "sim"), ("cpi", "cpu"), ("sim:rx660xt", "rx6600xt"), ("cuda:x", "cuda:0")],
)
def test_unknown_names_get_the_nearest(wrong, nearest):
    with pytest.raises(ConfigError, match="There is no") as caught:
        resolve(wrong)
    assert caught.value.nearest == nearest
    assert len(str(caught.value)) < 200


def test_of_many_cards_a_message_has_those_that_may_be_meant():
    with pytest.raises(ConfigError, match="Known: rtx2060, rtx3050, rtx3060, rtx3060ti, and") as e:
        resolve("sim:rtx306")
    assert "v100" in e.value.known
    with pytest.raises(ConfigError, match=r"Known: cpu, cuda, hip, mps, sim, xpu, and \d+ simul"):
        resolve("rtx306")


def test_a_number_must_be_a_number():
    with pytest.raises(ConfigError, match="'sim:h200:1'"):
        resolve("sim:h200:one")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has cuda")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", "hip", torch.device("cuda")])
def test_a_kind_this_torch_lacks_says_what_to_do(name):
    with pytest.raises(ConfigError, match="use 'sim'") as caught:
        resolve(name)
    assert f"no usable '{str(name).partition(':')[0]}'" in str(caught.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this torch has an accelerator")
def test_the_default_is_simulated_without_an_accelerator():
    assert default_name() == "sim"


def test_importing_devices_imports_no_torch():
    code = "import sys, torchTensorRef.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
