"""Sizes, shares and durations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchTensorRef.base.errors import ConfigError
from torchTensorRef.base.units import (
    UNITS,
    format_nbytes,
    format_ns,
    parse_limit,
    parse_nbytes,
    parse_share,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("123", 123),
        (" 123 B ", 123),
        ("6GiB", 6 * 2**30),
        ("512 MB", 512_000_000),
        ("1.5GiB", 3 * 2**29),
        ("1.5kib", 1536),
        ("1_000", 1000),
        ("0.1KB", 100),
        ("2TiB", 2**41),
        ("1PiB", 2**50),
        ("0.9999999999999999999PiB", 2**50 - 1),
        (77, 77),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("6 GiBs", "'GiB'"),
        ("6gigs", "unit 'gigs'"),
        ("6G", "'GiB' (1,073,741,824 bytes) or 'GB' (1,000,000,000 bytes)"),
        ("", "not a number"),
        ("GiB", "not a number"),
        ("-1GiB", "negative"),
        ("1e9", "not a number"),
        ("25%", "unit '%'"),
        (-1, "negative"),
        (True, "bool"),
        (1.5, "float"),
        (None, "NoneType"),
    ],
)
def test_a_bad_size_is_refused_with_an_example(text, hint):
    with pytest.raises(ConfigError, match="such as '6GiB'") as caught:
        parse_nbytes(text)
    assert hint in str(caught.value)


@given(st.integers(0, 10**18), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_units_are_exact(count, unit):
    assert parse_nbytes(f"{count} {unit}") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "share"), [("25%", 0.25), ("100%", 1.0), (" 0.5 % ", 0.005), ("12.5%", 0.125)]
)
def test_shares_are_read(text, share):
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["0%", "101%", "25", "-5%", "%", "a lot", "5GiB"])
def test_a_bad_share_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="such as '25%'"):
        parse_share(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (-1023, "-1023 B"),
        (1024, "1.00 KiB"),
        (-1536, "-1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (24 * 2**20, "24.00 MiB"),
        (2**50, "1.00 PiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_sizes_are_written(nbytes, text):
    assert format_nbytes(nbytes) == text


@given(st.integers(0, 2**59))
def test_a_written_size_is_near_the_size(nbytes):
    written = parse_nbytes(format_nbytes(nbytes))
    assert written == pytest.approx(nbytes, rel=0.006, abs=1)
    assert not format_nbytes(nbytes).startswith("1024")


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 us"),
        (999_999, "1.00 ms"),
        (1_500_000, "1.50 ms"),
        (-2_000_000_000, "-2.00 s"),
        (59_999_999_999, "1.00 min"),
        (90 * 10**9, "1.50 min"),
        (7200 * 10**9, "120.00 min"),
    ],
)
def test_durations_are_written(duration_ns, text):
    assert format_ns(duration_ns) == text


@pytest.mark.parametrize("read", [parse_limit, parse_nbytes])
def test_a_size_of_thousands_of_digits_is_refused(read):
    with pytest.raises(ConfigError, match="too many digits"):
        read("9" * 5000)


@pytest.mark.parametrize(
    ("text", "meant"), [("5__0", "50GiB"), ("5_", "5GiB"), ("1__5.5", "15.5GiB")]
)
def test_underscores_are_left_out_of_what_is_meant(text, meant):
    with pytest.raises(ConfigError) as raised:
        parse_limit(text)
    assert raised.value.nearest == meant
    assert parse_share("5_%") == 0.05
