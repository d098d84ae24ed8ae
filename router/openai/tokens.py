"""`POST /tokenize` and `/detokenize`, in the shapes that other servers of the field have for them.

The ids of a text are those that `/v1/completions` would compute, those of a conversation
the ones of `/v1/chat/completions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mesh.errors import InvalidRequest
from router.core.core import Admitted
from router.core.limits import check_count
from router.core.request import Conversation
from router.core.texts import text_of
from router.openai import parameters
from router.openai.completions import token_ids
from router.openai.fields import Fields
from router.openai.messages import read_messages
from router.openai.reasoning import effort_of, template_variables_of, variables
from router.openai.tools import tools_of
from router.openai.unary import Call
from text import Tokenizer

DETOKENIZE_MAX = 1_000_000
# They change what a chat template writes, and nothing about a text.
_OF_MESSAGES = (
    *("tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
    *("reasoning_effort", "chat_template_kwargs"),
)


async def tokenize(call: Call) -> dict[str, Any]:
    """Exactly one of `prompt` and `messages`; `token_strs` only where they are asked for."""
    fields = Fields(await call.body())
    admitted = await call.admit(parameters.model_of(fields))
    with_names = fields.boolean("return_token_strs")
    read = _conversation if fields.has("messages") else _text
    ids = await read(call, admitted, fields)
    return {
        "count": len(ids),
        "max_model_len": admitted.model.text.context_length,
        "tokens": ids,
        "token_strs": _names(admitted.model.text.tokenizer, ids) if with_names else None,
    }


async def detokenize(call: Call) -> dict[str, Any]:
    """The text of token ids, with the names of control tokens."""
    fields = Fields(await call.body())
    admitted = await call.admit(parameters.model_of(fields))
    raw = fields.array("tokens")
    if raw is None:
        raise InvalidRequest(
            "Missing required parameter: 'tokens'.", code="missing_required_parameter", param="tokens"
        )
    check_count("tokens", len(raw), DETOKENIZE_MAX)
    ids = token_ids("tokens", raw) if raw else []
    fields.end()
    return {"prompt": text_of(admitted.model, ids, "tokens")}


async def _text(call: Call, admitted: Admitted, fields: Fields) -> list[int]:
    prompt = fields.required("prompt")
    if not isinstance(prompt, str):
        raise InvalidRequest(
            "Invalid type for 'prompt': expected a string.", code="invalid_type", param="prompt"
        )
    special = fields.boolean("add_special_tokens", True)
    fields.unsupported("add_generation_prompt", (True,))
    for name in _OF_MESSAGES:
        fields.unsupported(name)
    fields.end()
    return await call.unless_gone(call.core.encode(admitted, prompt, add_special=special))


async def _conversation(call: Call, admitted: Admitted, fields: Fields) -> list[int]:
    messages = read_messages(fields)
    use = tools_of(fields)
    effort, given = effort_of(fields), template_variables_of(fields)
    # The template writes the special tokens; the answer's beginning is part of what is computed.
    fields.unsupported("add_special_tokens", (False,))
    fields.unsupported("add_generation_prompt", (True,))
    fields.unsupported("continue_final_message", (False,))
    fields.end()
    conversation = Conversation(
        messages,
        [tool.shown() for tool in use.tools],
        variables(admitted.model.text, effort, given),
        calls_max=None if use.parallel else 1,
    )
    return (await call.unless_gone(call.core.prompt_chat(admitted, conversation))).ids


def _names(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in ids]
