"""What this process may use of the host's memory, by installed memory and by control groups."""

from __future__ import annotations

import pytest

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.devices.host import limits as host_limits
from torchTensorRef.devices.host.limits import (
    has_spare_ram,
    ram_limit_nbytes,
    share_of_ram,
    spare_ram_nbytes,
)

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path):
    """Give `groups(of_process, {file: text})` and read the limit."""

    def limit(of_process, files):
        for name, text in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        process = tmp_path / "process"
        process.write_text(of_process)
        return ram_limit_nbytes(tmp_path / "cgroup", process, 16 * GIB)

    return limit


def test_without_groups_it_is_what_is_installed(tmp_path):
    assert ram_limit_nbytes(tmp_path, tmp_path / "absent", 7) == 7


def test_version_2_takes_the_tightest_group_around_the_process(groups):
    files = {"a/b/memory.max": "max\n", "a/memory.max": f"{4 * GIB}\n"}
    assert groups("0::/a/b\n", files) == 4 * GIB


def test_version_2_inside_a_container_reads_the_mount(groups):
    assert groups("0::/outside/path\n", {"memory.max": f"{2 * GIB}\n"}) == 2 * GIB


def test_version_1_reads_the_memory_controller_and_knows_its_word_for_no_limit(groups):
    process = "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n"
    no_limit = {"memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert groups(process, no_limit) == 16 * GIB
    assert groups(process, {"memory/job/memory.limit_in_bytes": f"{GIB}\n"}) == GIB


def test_what_cannot_be_read_is_no_limit(groups):
    assert groups("0::/a\n", {"a/memory.max": "nonsense"}) == 16 * GIB


def test_shares_and_sizes(monkeypatch):
    monkeypatch.setattr(host_limits, "ram_limit_nbytes", lambda: 1000)
    assert (share_of_ram("25%"), share_of_ram("0"), share_of_ram("8GiB")) == (250, 0, 8 * GIB)
    with pytest.raises(ConfigError):
        share_of_ram("much")


def test_here():
    assert ram_limit_nbytes() > 0


@pytest.mark.parametrize(
    ("names", "said", "word"),
    [
        (("memory.max", "memory.current"), "0::/a/b", ""),
        (("memory.limit_in_bytes", "memory.usage_in_bytes"), "4:cpu,memory:/a/b", "total_"),
    ],
)
def test_what_is_left_is_what_the_tightest_group_leaves(tmp_path, names, said, word):
    root, of_process = tmp_path / "groups", tmp_path / "cgroup"
    of_process.write_text(said + "\n")
    folder = root / ("memory" if word else "") / "a" / "b"
    folder.mkdir(parents=True)
    assert spare_ram_nbytes(root, of_process, 9000) == 9000
    for file, nbytes in zip(names, (5000, 4000), strict=True):
        (folder / file).write_text(f"{nbytes}\n")
    assert spare_ram_nbytes(root, of_process, 9000) == 1000
    (folder / "memory.stat").write_text(
        f"{word}anon 500\n{word}inactive_file 1000\n{word}active_file 1500\n"
    )
    assert spare_ram_nbytes(root, of_process, 9000) == 3500, "files can be read again"
    assert spare_ram_nbytes(root, of_process, 300) == 300


def test_a_convenience_leaves_some_of_what_a_group_may(monkeypatch):
    monkeypatch.setattr(host_limits, "ram_limit_nbytes", lambda: 1000)
    monkeypatch.setattr(host_limits, "spare_ram_nbytes", lambda: 200)
    assert has_spare_ram(149)
    assert not has_spare_ram(150)
