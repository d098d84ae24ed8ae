"""What `up` accepts, and what it refuses with which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh.supervisor.options import (
    MeshOptions,
    OptionsError,
    default_kv_bytes,
    merged,
    parse_model,
    parse_size,
    process_slug,
    read_file,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("4096", 4096), ("64kb", 65536)],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1G", "1X", "1G1"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(OptionsError):
        parse_size(text)


def test_models() -> None:
    assert parse_model("org/tiny=tiny:seed=1") == ("org/tiny", "tiny:seed=1")
    for text in ("tiny", "=x", "tiny=", "a b=x", "-x=y"):
        with pytest.raises(OptionsError):
            parse_model(text)


def test_names_of_processes_are_short_plain_and_differ_when_models_do() -> None:
    assert process_slug("smollm2") == "smollm2"
    slugs = {process_slug(name) for name in ("a/b", "a-b", "A-B", "a_b", "x" * 100, "x" * 101)}
    assert len(slugs) == 6
    assert all(len(slug) <= 24 and "/" not in slug and slug == slug.lower() for slug in slugs)


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        """
        port = 9000
        kv-memory = "256M"
        decode = 3
        [prefill]
        count = 2
        max-runs = 8
        [envoy]
        stream-idle-timeout-s = 60
        [models]
        tiny = "tiny:seed=1"
        "a/b" = "script:"
        [iam]
        issuers = [{issuer = "x"}]
        """
    )
    options = merged(read_file(file), {"port": 9001, "decode": None}, [])
    assert (options.port, options.decode, options.kv_bytes) == (9001, 3, 256 << 20)
    assert (options.prefill, options.role_options["prefill"]) == (2, {"max_runs": 8})
    assert options.role_options["envoy"] == {"stream_idle_timeout_s": 60}
    assert options.models == {"tiny": "tiny:seed=1", "a/b": "script:"}
    assert options.role_options["iam"] == {"issuers": [{"issuer": "x"}]}
    assert merged(read_file(file), {}, ["m=script:"]).models == {"m": "script:"}


@pytest.mark.parametrize(
    "text",
    [
        "porrt = 1",
        "port = 'x'",
        "port = true",
        "port = [",
        "[models]\nx = 1",
        "[nats]\nport = 4222",
        "[envoy]\nbogus = 1",
        "[kvstore]\ncount = 2",
        "[decode]\ncount = 'two'",
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(text)
    with pytest.raises(OptionsError, match=r"mesh\.toml"):
        read_file(file)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (MeshOptions(host="0.0.0.0"), "--tls"),
        (MeshOptions(host="192.0.2.1"), "--tls"),
        (MeshOptions(cert=Path("c"), tls=True), "--cert and --key"),
        (MeshOptions(cert=Path("c"), key=Path("k")), "--tls"),
        (MeshOptions(cert=Path("/no/c"), key=Path("/no/k"), tls=True), "--cert /no/c"),
        (MeshOptions(decode=0), "--decode"),
        (MeshOptions(port=0), "--port"),
        (MeshOptions(models={}), "--model"),
        (MeshOptions(kv_bytes=10), "--kv-memory"),
    ],
)
def test_what_must_not_be_started(options: MeshOptions, word: str) -> None:
    with pytest.raises(OptionsError, match=word):
        options.check()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_the_loopback_needs_no_tls(host: str) -> None:
    MeshOptions(host=host).check()


def test_pages_take_a_quarter_of_the_free_memory_up_to_a_limit() -> None:
    assert default_kv_bytes(8 << 30) == 2 << 30
    assert default_kv_bytes(100 << 30) == 4 << 30


def test_nodes_say_which_workers_they_have(tmp_path: Path) -> None:
    options = merged({}, {}, [], ["a=prefill:2", "b=decode,prefill"])
    assert options.nodes == {"a": {"prefill": 2, "decode": 0}, "b": {"prefill": 1, "decode": 1}}
    assert (options.prefill, options.decode) == (3, 1)
    (tmp_path / "mesh.toml").write_text('[nodes]\na = "prefill"\nb = "decode:2"\n')
    assert merged(read_file(tmp_path / "mesh.toml"), {}, []).decode == 2


@pytest.mark.parametrize(
    ("nodes", "flags"),
    [
        (["a"], {}),
        (["A=decode"], {}),
        (["a=router"], {}),
        (["a=decode:x"], {}),
        (["a=decode:0"], {}),
        (["a=prefill", "a=decode"], {}),
        (["a=prefill"], {}),
        (["a=prefill,decode"], {"decode": 2}),
    ],
)
def test_nodes_that_cannot_be(nodes: list[str], flags: dict[str, int]) -> None:
    with pytest.raises(OptionsError):
        merged({}, flags, [], nodes)
