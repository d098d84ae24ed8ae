"""Options are read strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from iam_authz.options import parse_options
from mesh.config import ConfigError

GOOD = {"issuer": "https://idp.test", "audience": "api", "jwks_url": "https://idp.test/jwks"}


def test_defaults_are_the_strict_ones() -> None:
    (issuer,) = parse_options({"issuers": [GOOD]}).issuers
    assert issuer.audience == ("api",)
    assert issuer.algorithms == ("RS256", "ES256", "EdDSA")
    assert (issuer.org_claim, issuer.leeway_s, issuer.max_lifetime_s) == ("org", 30.0, 86_400.0)
    assert parse_options({}).issuers == ()
    bootstrap = parse_options(
        {
            "bootstrap": {
                "organisation": "dev",
                "dev_key_file": "/x/dev-key",
                "models": [{"name": "m", "source": "tiny:"}],
            }
        }
    ).bootstrap
    assert bootstrap is not None
    assert bootstrap.dev_key_file == Path("/x/dev-key")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"audience": ...}, "audience"),
        ({"audience": ""}, "audience"),
        ({"audience": []}, "audience"),
        ({"audience": [1]}, "audience"),
        ({"issuer": ...}, "issuer"),
        ({"issuer": ""}, "issuer"),
        ({"jwks_url": ...}, "jwks_url"),
        ({"jwks_file": "/x"}, "one of"),
        ({"jwks_url": "http://idp.test/jwks"}, "https"),
        ({"jwks_url": "file:///etc/passwd"}, "https"),
        ({"algorithms": ["HS256"]}, "HS256"),
        ({"algorithms": ["none"]}, "none"),
        ({"leeway_s": -1}, "leeway_s"),
        ({"leeway_s": True}, "leeway_s"),
        ({"max_lifetime_s": "1h"}, "max_lifetime_s"),
        ({"org_map": {"a": 1}}, "org_map"),
        ({"max_life_s": 5}, "max_life_s"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], word: str) -> None:
    raw = {name: value for name, value in (GOOD | change).items() if value is not ...}
    with pytest.raises(ConfigError, match=word):
        parse_options({"issuers": [raw]})


def test_other_mistakes_are_named_too() -> None:
    for raw, word in (
        ({"issuers": [GOOD, GOOD]}, "twice"),
        ({"issuers": GOOD}, "issuers"),
        ({"issuer": []}, "unknown field issuer"),
        ({"bootstrap": {"organisation": "dev"}}, "dev_key_file"),
        (
            {"bootstrap": {"organisation": "d", "dev_key_file": "/x", "models": [{"name": "m"}]}},
            "source",
        ),
    ):
        with pytest.raises(ConfigError, match=word):
            parse_options(raw)
