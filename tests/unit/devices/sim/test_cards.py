"""Devices by name: sources, plausible figures, a user's own."""

import pytest

from torchTensorRef import ConfigError
from torchTensorRef.devices import registry
from torchTensorRef.devices.sim.cards import CARDS, HOSTS, SPECS, read_specs


def test_each_card_has_a_source_and_a_host():
    assert len(CARDS) >= 25
    for name, card in CARDS.items():
        assert len(card.source) > 10, name
        assert card.host in HOSTS
        assert card.tflops_half >= card.tflops_float32
        assert 100 < card.memory_gb_per_s < 10_000
        assert card.link_gb_per_s in (15.75, 31.5, 63.0)


def test_a_users_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        "[mine]\ngib = 2\ntflops_float32 = 1.0\ntflops_half = 2.0\n"
        "memory_gb_per_s = 100\nlink_gb_per_s = 8.0\n"
    )
    try:
        assert read_specs(path)["mine"].capacity_nbytes == 2 << 30
        assert registry.resolve("sim:mine").spec is SPECS["mine"]
    finally:
        SPECS.pop("mine")
        registry.reset()


WHOLE = "[mine]\ntflops_float32 = 1.0\ntflops_half = 2.0\nmemory_gb_per_s = 100\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[mine", "cannot be read as TOML"),
        ("[mine]\ngib = 2", "lacks tflops_float32"),
        ("[mine]\ngibs = 2", "Did you mean 'gib'"),
        ("[mine]\nhost = 'ddr6'", "lacks gib"),
        (f"{WHOLE}link_gb_per_s = 8.0\ngib = inf", "more than any device"),
        (f"{WHOLE}gib = 2\nlink_gb_per_s = 1{'0' * 400}", "more than any device"),
        (f"{WHOLE}gib = 2\nlink_gb_per_s = 8.0\nhost = ['a']", "names a host"),
    ],
)
def test_what_is_wrong_with_it_is_said(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_specs(path)
