"""Fields that chat and completions share, read into what the core understands.

Types and OpenAI's own spellings are checked here; bounds are the core's (its table is
in `router/core/limits.py`).

| field | here |
|---|---|
| top_k | -1 and 0 are off |
| seed | a signed 64-bit number |
| stop | null, a string, or up to 4 strings |
| logit_bias | keys are decimal ids, values numbers |
| metadata | pairs of strings; `script_*` reaches a scripted model, the rest changes nothing |
| user, store, service_tier, prompt_cache_key, ... | accepted, change nothing |
| tools, response_format, ... | refused unless neutral: `unsupported_parameter` |
| any other name | refused: `unknown_parameter` |
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mesh.errors import InvalidRequest
from router.core.limits import LOGIT_BIAS_MAX, check_count
from router.core.request import NOTHING, Sampling, Stopping
from router.openai.fields import Fields, integer, wrong_type

SAFETY_IDENTIFIER_MAX = 64
_ID = re.compile(r"[0-9]{1,10}")

# Nothing about the result depends on these.
HARMLESS = (
    "user",
    "store",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
)


def model_of(fields: Fields) -> str:
    """The model's name; the caller has not been allowed to use it yet."""
    value = fields.required_string("model")
    if not value or len(value) > 256 or not value.isprintable():
        raise InvalidRequest(
            "Invalid 'model': expected the name of a model.", code="invalid_value", param="model"
        )
    return value


def sampling_of(fields: Fields, logprobs: int | None) -> Sampling:
    """Everything about how tokens are drawn. `logprobs` is spelled differently by each endpoint."""
    top_k = fields.integer("top_k")
    return Sampling(
        temperature=fields.number("temperature", 1.0),
        top_k=0 if top_k in (None, -1) else top_k or 0,
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        logit_bias=_logit_bias(fields),
        seed=_seed(fields),
        logprobs=logprobs,
    )


def stopping_of(fields: Fields, max_tokens: int | None) -> Stopping:
    """When the generation ends. `max_tokens` is spelled differently by each endpoint."""
    return Stopping(
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens") or 0,
        stop_token_ids=_ids(fields, "stop_token_ids"),
        stop=_stop(fields),
        ignore_eos=fields.boolean("ignore_eos"),
    )


def choices_of(fields: Fields) -> int:
    value = fields.integer("n")
    return 1 if value is None else value


def streaming_of(fields: Fields, *, with_usage: bool = True) -> tuple[bool, bool]:
    """(stream, include_usage). An endpoint without `include_usage` refuses it as any unknown option."""
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise InvalidRequest(
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
            code="invalid_value",
            param="stream_options",
        )
    inner = Fields(options, "stream_options")
    include_usage = with_usage and inner.boolean("include_usage")
    # Padding against traffic analysis; none is added.
    inner.boolean("include_obfuscation")
    inner.end()
    return stream, include_usage


def metadata_of(fields: Fields) -> Mapping[str, str]:
    raw = fields.object("metadata")
    if raw is None:
        return NOTHING
    for key, value in raw.items():
        if not isinstance(value, str):
            raise wrong_type(f"metadata.{key[:64]}", "a string", value)
    return raw


def accept_harmless(fields: Fields) -> None:
    """Reads what is accepted and changes nothing."""
    tier = fields.string("service_tier")
    if tier not in (None, "auto", "default", "flex", "scale", "priority"):
        raise InvalidRequest("Invalid value: 'service_tier'.", code="invalid_value", param="service_tier")
    identifier = fields.string("safety_identifier")
    if identifier is not None and len(identifier) > SAFETY_IDENTIFIER_MAX:
        raise InvalidRequest(
            f"Invalid 'safety_identifier': expected at most {SAFETY_IDENTIFIER_MAX} characters.",
            code="string_above_max_length",
            param="safety_identifier",
        )
    fields.ignored(*HARMLESS)


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed")
    if seed is not None and seed >= 2**63:
        raise InvalidRequest(
            f"Invalid 'seed': integer above maximum value. Expected a value <= {2**63 - 1}.",
            code="integer_above_max_value",
            param="seed",
        )
    return seed


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong_type("stop", "a string or an array of strings", value)
    for item in value:
        if not isinstance(item, str):
            raise wrong_type("stop", "an array of strings", item)
    return tuple(value)


def _ids(fields: Fields, name: str) -> tuple[int, ...]:
    return tuple(integer(fields.place(name), item) for item in fields.array(name) or ())


def _logit_bias(fields: Fields) -> Mapping[int, float]:
    raw = fields.object("logit_bias")
    if raw is None:
        return {}
    check_count("logit_bias", len(raw), LOGIT_BIAS_MAX)
    bias: dict[int, float] = {}
    for key, value in raw.items():
        if not _ID.fullmatch(key):
            raise InvalidRequest(
                f"Invalid key in 'logit_bias': {key[:32]!a}. Expected a token id.",
                code="invalid_value",
                param="logit_bias",
            )
        if value is None:
            raise wrong_type("logit_bias", "an object of numbers", value)
        bias[int(key)] = Fields({"logit_bias": value}).number("logit_bias", 0.0)
    if len(bias) != len(raw):
        raise InvalidRequest(
            "Invalid 'logit_bias': two keys name the same id.", code="invalid_value", param="logit_bias"
        )
    return bias
