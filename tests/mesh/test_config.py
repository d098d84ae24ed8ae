"""The configuration file: read back as written, and strict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh.config import ConfigError, ModelConfig, NatsConfig, load_config, read_config, write_config


@pytest.fixture
def file(site: Any) -> Path:
    config = site.config(
        "decode",
        "decode-tiny-0",
        nats=NatsConfig("nats://127.0.0.1:1", "decode-tiny-0", "secret", site.ca.cert_file),
        model=ModelConfig("tiny", "tiny:seed=1", "tiny:seed=1"),
        iam=("unix:/a", "unix:/b"),
        options={"threads": 2, "kv_dtype": "f32"},
    )
    write_config(site.path / "c.json", config)
    return Path(site.path / "c.json")


def test_what_is_written_is_read(file: Path, site: Any) -> None:
    config = load_config(["--config", str(file)], {})
    write_config(site.path / "again.json", config)
    assert (site.path / "again.json").read_text() == file.read_text()
    assert config.options == {"threads": 2, "kv_dtype": "f32"}
    assert config.nats is not None
    assert config.nats.ca == site.ca.cert_file
    assert config.iam == ("unix:/a", "unix:/b")


def test_the_file_is_private_and_its_password_is_not_printed(file: Path) -> None:
    assert file.stat().st_mode & 0o777 == 0o600
    assert "secret" not in repr(read_config(file, {}))


def test_the_environment_overrides_options_only(file: Path) -> None:
    environ = {"KVMESH_OPTION_THREADS": "8", "KVMESH_OPTION_KV_DTYPE": "f16", "KVMESH_NAME": "other"}
    config = read_config(file, environ)
    assert config.options == {"threads": 8, "kv_dtype": "f16"}
    assert config.name == "decode-tiny-0"


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"role": None}, "role"),
        ({"tls": 1}, "tls"),
        ({"colour": "red"}, "unknown field colour"),
        ({"metrics": {"host": "h", "port": True, "token_file": "t"}}, r"metrics\.port"),
        ({"metrics": {"host": "h", "port": 1}}, r"metrics\.token_file"),
        ({"nats": {"url": "u", "user": "u", "password": "p", "more": 1}}, "nats: unknown field more"),
        ({"iam": [1]}, "iam"),
        ({"options": []}, "options"),
        ({"identity": None}, "identity"),
    ],
)
def test_an_error_names_the_place(file: Path, change: dict[str, Any], place: str) -> None:
    document = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    with pytest.raises(ConfigError, match=place):
        read_config(file, {})


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_file_that_is_none_is_an_error(file: Path, text: str) -> None:
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c\.json"):
        read_config(file, {})


def test_an_identity_of_another_service_is_refused(site: Any) -> None:
    from mesh.service import ServiceRuntime

    config = replace(site.config("decode", "decode-0"), name="decode-1")
    with pytest.raises(ConfigError, match="decode-0"):
        ServiceRuntime(config)
