"""Sizes and settings mean what they say, or the error names the setting and shows how to write it."""

from __future__ import annotations

import pytest

from engine import ConfigError, EngineConfig, Mode, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64MiB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("800MB", 800 * 10**6),
        ("2gib", 2 * 2**30),
        (" 10 KiB ", 10240),
        ("25%", 250),
        ("12.5%", 125),
        ("100%", 1000),
        (".5MB", 500000),
        ("1.MB", 10**6),
        ("123", 123),
        ("7B", 7),
        (4096, 4096),
        (0, 0),
    ],
)
def test_sizes(text, size):
    assert parse_size(text, whole=1000) == size


@pytest.mark.parametrize(
    "text", ["", "lots", "64 MB of it", "-5MiB", "5MiBs", "%", "1,5GiB", "0x10", "1e9", "5 %%", "GiB"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"expert memory '.*' is not a size: write 64MiB, 1\.5GiB or 25%"):
        parse_size(text, whole=1000, name="expert memory")


def test_sizes_that_make_no_sense():
    with pytest.raises(ConfigError, match="size '-1' is negative"):
        parse_size(-1)
    with pytest.raises(ConfigError, match="size '25%': a percentage has no meaning here, write 64MiB or 1.5GiB"):
        parse_size("25%")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 * 2**20, "64.0 MiB"), (300 * 2**20, "300 MiB"), (3 * 2**29, "1.5 GiB"),
     (5 * 2**41, "10.0 TiB")],
)  # fmt: skip
def test_sizes_for_people(size, text):
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(prefetch="psychic"), "prefetch 'psychic' is unknown: choose from"),
        (dict(resident="int2"), "resident 'int2' is unknown: choose from native, int4"),
        (dict(device="tpu"), "device 'tpu' is unknown: choose from auto, cpu, cuda"),
        (dict(context=8), "context 8 is too small: at least 16"),
        (dict(read_threads=0), "read threads 0 is too small: at least 1"),
        (dict(expert_memory="lots"), "expert memory 'lots' is not a size"),
        (dict(expert_memory=-1), "expert memory '-1' is negative"),
        (dict(mode="fast"), "mode 'fast' is unknown: choose from on-demand"),
    ],
)
def test_settings_are_checked_where_they_are_made(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("model", **settings)


def test_a_configuration_does_not_change():
    config = EngineConfig("model", mode=Mode.ON_DEMAND)
    with pytest.raises(AttributeError):
        config.context = 1
