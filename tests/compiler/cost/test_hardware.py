"""Which figures a GPU gets: by its driver's name, by what the driver reports, by a copy, or those of an assumed GPU."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sidestream.compiler.cost import hardware
from sidestream.compiler.cost.hardware import H100, H200, UnknownGpu, gpu_here, gpu_named, gpu_of


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, sms: int = 132, **properties: Any) -> None:
    found = SimpleNamespace(name=name, multi_processor_count=sms, **properties)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


@pytest.mark.parametrize("name", ["NVIDIA H200", "H200", "h200 SXM"])
def test_an_h200_by_name(name: str) -> None:
    assert gpu_named(name) is H200


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "h100", "H100 SXM5"])
def test_an_h100_by_name(name: str) -> None:
    assert gpu_named(name) is H100


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB"],
)
def test_variants_with_another_memory_have_no_entry(name: str) -> None:
    with pytest.raises(UnknownGpu, match=rf"{name}.*H200, H100"):
        gpu_named(name)


def test_bandwidths_are_those_that_copies_reached() -> None:
    assert H200.bytes_per_second() == pytest.approx(4.68e12) and H100.bytes_per_second() == pytest.approx(3.03e12)
    assert H100.describe_bandwidth() == "3.03 TB/s (H100)"


@pytest.mark.parametrize(("name", "known"), [("NVIDIA H200", H200), ("NVIDIA H100 80GB HBM3", H100)])
def test_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch, name: str, known: hardware.Gpu) -> None:
    pretend(monkeypatch, name)
    assert gpu_of(torch.device("cuda", 1)) is gpu_here() is known


def test_another_gpu_has_the_bandwidth_that_its_driver_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H100 PCIe", 114, memory_clock_rate=1593000, memory_bus_width=5120)
    gpu = gpu_here()
    assert gpu.bytes_per_second() == pytest.approx(0.9 * 2.04e12, rel=0.01), "the datasheet has 2.04 TB/s"
    assert gpu.bytes_per_second(57) < gpu.bytes_per_second(114) == gpu.bytes_per_second()
    assert gpu.flops_per_second(1) == pytest.approx(H200.flops_per_second(1) * 114 / 132) and not gpu.known_rates
    found = json.loads(json.dumps(gpu.to_json()))
    assert found["name"] == "NVIDIA H100 PCIe" and "driver reports" in found["source"]


def test_a_gpu_without_such_properties_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H20", 78)
    monkeypatch.setattr(hardware, "_copied_bytes_per_second", lambda device: 3.4e12)
    gpu = gpu_of("cuda")
    assert gpu.bytes_per_second() == pytest.approx(3.4e12) and "by a copy" in gpu.source


def test_without_a_gpu_one_is_assumed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_here().bytes_per_second() == H200.bytes_per_second()
    assert gpu_here().source.startswith("assumed, as this machine has no GPU") and gpu_here(H100).name == "H100"


@pytest.mark.gpu
def test_a_copy_reaches_most_of_the_bandwidth() -> None:
    reached = hardware._copied_bytes_per_second(torch.device("cuda", torch.cuda.current_device()))
    assert 0.8 < reached / gpu_here().bytes_per_second() < 1.1
