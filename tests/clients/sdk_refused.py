"""Which tests of the SDK fail here, and why: they were written for a server that makes its answers up.

`table` is the part of `docs/openai-clients.md` that says so; print it with `python -m tests.clients.sdk_refused`.
"""

from __future__ import annotations

from collections.abc import Iterator


def _all(path: str, names: str) -> Iterator[str]:
    for name in names.split():
        for kind in ("method", "raw_response", "streaming_response"):
            yield f"{path}::test_{kind}_{name}"


CHAT, COMPLETIONS, RESPONSES = "chat/test_completions.py", "test_completions.py", "test_responses.py"
ITEMS, TOKENS = "responses/test_input_items.py", "responses/test_input_tokens.py"
PARAMS = "test_method_create_with_all_params_overload"

# The reason, and the tests, each with all five clients.
_GROUPS: list[tuple[str, list[str]]] = [
    (
        "404 and 405: completions are not stored",
        [*_all(CHAT, "retrieve update list delete"), f"{CHAT}::test_method_list_with_all_params"],
    ),
    ("405: `DELETE /v1/models/{model}` is the operator's", [*_all("test_models.py", "delete")]),
    ("405: there is no `/v1/responses/compact`", [*_all(RESPONSES, "compact")]),
    ("405: the same, with all parameters", [f"{RESPONSES}::test_method_compact_with_all_params"]),
    (
        "400 `model`: it is sent without a model, which nothing here stands in for",
        [*_all(RESPONSES, "create_overload_1 create_overload_2"), *_all(TOKENS, "count")],
    ),
    ("400: the same, with all parameters", [f"{TOKENS}::test_method_count_with_all_params"]),
    (
        "404: no response of the id that it makes up is kept",
        [
            *_all(RESPONSES, "retrieve_overload_1 delete cancel"),
            *_all(ITEMS, "list"),
            f"{ITEMS}::test_method_list_with_all_params",
        ],
    ),
    (
        "400 `stream`: what a kept response was like while it was made is not kept",
        [
            *_all(RESPONSES, "retrieve_overload_2"),
            f"{RESPONSES}::test_method_retrieve_with_all_params_overload_1",
            f"{RESPONSES}::test_method_retrieve_with_all_params_overload_2",
        ],
    ),
    (
        "400 `stream_options` with `stream: false`; 400 `logit_bias`: `foo` is no token id",
        [f"{CHAT}::{PARAMS}_1", f"{CHAT}::{PARAMS}_2"],
    ),
    (
        "400 `stream_options` with `stream: false`; 400 `best_of: 0` is less than `n: 1`",
        [f"{COMPLETIONS}::{PARAMS}_1", f"{COMPLETIONS}::{PARAMS}_2"],
    ),
    (
        "400 `stream_options`, `include` of built-in tools, `background`, `prompt`, `conversation`",
        [f"{RESPONSES}::{PARAMS}_1", f"{RESPONSES}::{PARAMS}_2"],
    ),
]
REFUSED = [test for _, tests in _GROUPS for test in tests]
# The client asks for base64, as it does by default, and its strict parsing looks before it has decoded it.
STRICT_ONLY = list(_all("test_embeddings.py", "create"))


def table() -> str:
    """Rows of Markdown."""
    rows = [f"| {reason} | {', '.join(f'`{_short(test)}`' for test in tests)} |" for reason, tests in _GROUPS]
    strict = ", ".join(f"`{_short(test)}`" for test in STRICT_ONLY)
    rows.append(
        f"| strict clients only: the answer is base64, as asked, and validated undecoded | {strict} |"
    )
    return "\n".join(["| why | tests |", "|---|---|", *rows])


def _short(test: str) -> str:
    path, _, name = test.partition("::")
    return f"{path.removesuffix('.py').replace('test_', '')}: {name.removeprefix('test_')}"


if __name__ == "__main__":
    print(table())
