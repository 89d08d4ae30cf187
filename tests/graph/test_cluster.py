from pathlib import Path

import numpy as np
import pytest

from dpro.errors import TraceError
from dpro.graph.cluster import Cluster, Device, Line, load

YAML = """\
devices:
  - {type: V100, count: 2, machine: big, memory_gb: 16}
  - {type: P100, machine: small, name: old}
types:
  P100: {default: 0.5, Conv2d: 0.25}
links:
  within: {gb_per_s: 10, latency_us: 20}
  between: {gb_per_s: 5, latency_us: 50}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return path


def test_the_form_of_the_file(tmp_path: Path) -> None:
    cluster = load(written(tmp_path, YAML))
    assert [device.name for device in cluster.devices] == ["v100-0", "v100-1", "old"]
    assert cluster.memory_bytes().tolist() == [16_000_000_000, 16_000_000_000, 0]
    assert (cluster.speed(0, "Conv2d"), cluster.speed(2, "Conv2d"), cluster.speed(2, "ReLU")) == (1.0, 0.25, 0.5)
    # 100 kB: 20 µs + 10 µs in the machine, 50 µs + 20 µs to the other
    assert cluster.transfer_ns(100_000, 0, 1) == 30_000
    assert cluster.transfer_ns(100_000, 0, 2) == 70_000
    assert cluster.transfer_ns(100_000, 2, 2) == 0
    assert cluster.times_ns(["Conv2d", "ReLU"], np.array([100, 100])).tolist() == [[100, 100, 400], [100, 100, 200]]


def test_pairs_of_a_machine_have_links_of_their_own_and_machines_share_theirs(tmp_path: Path) -> None:
    cluster = load(written(tmp_path, YAML))
    assert cluster.links == [
        "link/v100-0>v100-1", "link/big>small", "link/v100-1>v100-0", "link/small>big",
    ]  # fmt: skip
    assert cluster.link[0, 2] == cluster.link[1, 2] != cluster.link[2, 0]
    shared = load(written(tmp_path, YAML + "shared: true\n"))
    assert shared.link[0, 2] == shared.link[2, 1]
    assert "link/between" in shared.links


def test_machines_and_pairs_differ_from_the_rest(tmp_path: Path) -> None:
    more = "machines: {small: {gb_per_s: 1}}\npairs: [{from: v100-0, to: v100-1, gb_per_s: 40}]\n"
    cluster = load(written(tmp_path, YAML + more))
    # a way between machines is as slow as the slower end: 1 GB/s, and the latency of the other
    assert cluster.transfer_ns(100_000, 0, 2) == 150_000
    assert cluster.transfer_ns(100_000, 0, 1) == 2_500
    assert cluster.transfer_ns(100_000, 1, 0) == 30_000


def test_an_all_reduce_in_one_machine_is_a_ring() -> None:
    # 4 devices, 2 · 3 steps of 1000/4 bytes at 2 ns each and 10 ns of latency
    cluster = Cluster([Device(f"d{i}", "gpu", "host") for i in range(4)], Line(10.0, 2.0))
    assert cluster.all_reduce_ns(1000, range(4)) == 6 * (10 + 500)
    assert cluster.all_reduce_ns(1000, [2]) == 0


def test_an_all_reduce_over_machines_is_a_ring_or_two_levels_whichever_is_faster() -> None:
    devices = [Device(f"d{i}", "gpu", f"m{i // 2}") for i in range(4)]
    slow = Cluster(devices, Line(0.0, 0.01), Line(0.0, 1.0))
    # one ring: 6 steps of 250 bytes over the slow link. In levels: 2 steps of 5 ns in each machine, 2 of 500 between,
    # 10 to copy
    assert slow.all_reduce_ns(1000, range(4)) == 10 + 2 * 500 + 10
    fast = Cluster(devices, Line(0.0, 1.0), Line(0.0, 1.0))
    assert fast.all_reduce_ns(1000, range(4)) == 6 * 250


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "devices: a list"),
        ("devices: []\nlinks: {within: {gb_per_s: 1}}", "devices: a list"),
        ("devices: [{type: a}]", "links: there must be"),
        ("devices: [{type: a, count: 0}]\nlinks: {within: {gb_per_s: 1}}", "count"),
        ("devices: [{type: a, count: 99999}]\nlinks: {within: {gb_per_s: 1}}", "count"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: -1}}", "no number"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: .nan}}", "no number"),
        ("devices: [{kind: a}]\nlinks: {within: {gb_per_s: 1}}", "unknown key 'kind'"),
        ("devices: [{name: x}, {name: x}]\nlinks: {within: {gb_per_s: 1}}", "two have one name"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: 1}}\nshared: 3", "shared"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: 1}}\npairs: [{from: x, to: y, gb_per_s: 1}]", "pairs"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: 1}}\npairs: 5", "pairs: a list"),
        ("devices: [{type: a}]\nlinks: {within: }", "links: there must be"),
        ("devices: [{type: a}]\nlinks: {within: {}}", "links.within.gb_per_s: 'None' is no number"),
        ("devices: [{type: a}]\nlinks: {within: 0, between: {gb_per_s: 1}}", "links.within: '0' where"),
        ("devices: [{count: 2, name: x}]\nlinks: {within: {gb_per_s: 1}}", "one name for 2 devices"),
        ("devices: [{type: a}]\nlinks: {within: {gb_per_s: 1}}\nmachines: {m: {gb_per_s: 1}}", "no device is there"),
        ("devices: [{type: 2020-99-99}]", "not YAML"),
        ("devices: [", "not YAML"),
        ("!!python/object/apply:os.getcwd []", "not YAML"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line_with_the_file_and_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(TraceError, match=reason) as error:
        load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_a_missing_and_a_huge_file_too(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(TraceError, match="larger than 1 MiB"):
        load(written(tmp_path, "# " + "x" * (1 << 20)))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="not text"):
        load(binary)


def test_the_example_of_the_documentation_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
    cluster = load(written(tmp_path, text.split("```yaml")[1].split("```")[0]))
    assert [device.name for device in cluster.devices] == ["v100-0", "v100-1", "old"]
    assert cluster.transfer_ns(1_000_000, 0, 1) == 25_000  # the pair's own 40 GB/s
    assert cluster.transfer_ns(1_000_000, 1, 0) == 10_000 + 50_000
    assert cluster.transfer_ns(1_000_000, 0, 2) == 50_000 + 800_000  # small's 1.25 GB/s
