"""The text side of every model of the catalogue: tokenizer, template, end tokens.

Loaded in a thread as soon as the policy snapshot names the model. Large inputs are
rendered and tokenised in a thread as well, so that one caller's book does not stop
everybody's streams. It does not know who may use what.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from mesh.errors import InvalidRequest, Unavailable
from router.core.deadline import TooSlow, within
from router.core.limits import check_context
from router.core.policy import CatalogueModel, Snapshot
from router.core.request import ChatPrompt, Conversation
from text import AnswerForm, TemplateError, TextModel
from text.conversation import has_calls, plainly
from text.reasoning import open_in

log = logging.getLogger(__name__)

T = TypeVar("T")

# Text that is tokenised on the event loop: a millisecond. A thread costs a third of that to reach.
INLINE_CHARS = 4096
LOAD_WAIT_S = 30.0
RELOAD_AFTER_S = 10.0
# What one conversation may take to render and tokenise, in a thread; and on the loop.
RENDER_S = 5.0
QUICK_S = 0.005


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model's text side. Ids from `known_ids` on are padding and stand for nothing.

    No token has more than `token_bytes_max` bytes.
    """

    name: str
    text: TextModel
    known_ids: int
    token_bytes_max: int


Load = Callable[[str], TextModel]
Adjust = Callable[[str, TextModel], TextModel]


class TextModels:
    """`load(source)` blocks; it finds the file and reads it. `adjust(name, text)` has the last word."""

    def __init__(self, load: Load, *, adjust: Adjust | None = None, threads: int = 2) -> None:
        self._load = load
        self._adjust = adjust
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="text")
        self._quick: dict[str, ServedModel] = {}
        self._loading: dict[str, tuple[str, asyncio.Task[ServedModel]]] = {}

    def on_snapshot(self, snapshot: Snapshot) -> None:
        """Loads what is new in the catalogue and forgets what has left it."""
        for name in set(self._loading) - set(snapshot.models):
            self._forget(name)
        for model in snapshot.models.values():
            self._ensure(model)

    async def get(self, model: CatalogueModel) -> ServedModel:
        """The model's text side; raises Unavailable while it cannot be had."""
        task = self._ensure(model)
        try:
            async with asyncio.timeout(LOAD_WAIT_S):
                return await asyncio.shield(task)
        except TimeoutError:
            raise Unavailable("The model is being loaded. Try again.", retry_after_s=5.0) from None
        except asyncio.CancelledError:
            if not task.cancelled():
                raise
            raise Unavailable("The model has just been changed. Try again.", retry_after_s=1.0) from None
        except Unavailable:
            raise
        except Exception:
            raise Unavailable("The model cannot be loaded.", code="model_broken") from None

    def loaded(self, name: str) -> ServedModel | None:
        """The model, if it is ready now."""
        known = self._loading.get(name)
        if known is None or not known[1].done() or known[1].cancelled() or known[1].exception():
            return None
        return known[1].result()

    async def encode(self, model: ServedModel, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of raw text, with the begin token where the model's rules add one."""
        return await self._run(len(text), _encode, model, text, add_special)

    async def encode_infill(self, model: ServedModel, prefix: str | list[int], suffix: str) -> list[int]:
        """Ids after which the model writes what stands between the two; raises InvalidRequest."""
        return await self._run(len(prefix) + len(suffix), _encode_infill, model, prefix, suffix)

    async def encode_chat(self, model: ServedModel, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation, ready for the assistant's answer; raises InvalidRequest."""
        return (await self.prompt_chat(model, Conversation(messages))).ids

    async def prompt_chat(self, model: ServedModel, conversation: Conversation) -> ChatPrompt:
        """A conversation with all that belongs to it, ready for the answer; raises InvalidRequest."""
        size = INLINE_CHARS + 1 if conversation.tools else _size(conversation.messages)
        # On the loop only what is small, by a template that has shown itself to be quick.
        if size <= INLINE_CHARS and self._quick.get(model.name) is model:
            return self._timed(model, conversation)
        try:
            return await within(RENDER_S, self._pool, self._timed, model, conversation)
        except TooSlow:
            raise InvalidRequest(
                f"The model's chat template takes more than {RENDER_S:g} s for these messages.",
                code="template_too_slow",
                param="messages",
            ) from None

    def _timed(self, model: ServedModel, conversation: Conversation) -> ChatPrompt:
        started = time.thread_time()
        prompt = _prompt_chat(model, conversation)
        if time.thread_time() - started < QUICK_S:
            self._quick[model.name] = model
        else:
            self._quick.pop(model.name, None)
        return prompt

    async def close(self) -> None:
        for name in list(self._loading):
            self._forget(name)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _run(self, size: int, work: Callable[..., T], *args: Any) -> T:
        if size <= INLINE_CHARS:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def _ensure(self, model: CatalogueModel) -> asyncio.Task[ServedModel]:
        known = self._loading.get(model.name)
        if known is not None and known[0] == model.source:
            return known[1]
        if known is not None:
            self._forget(model.name)
        task = asyncio.get_running_loop().create_task(self._read(model))
        self._loading[model.name] = (model.source, task)
        return task

    async def _read(self, model: CatalogueModel) -> ServedModel:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _read, self._load, self._adjust, model)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.error("model cannot be loaded", extra={"model": model.name, "reason": str(error)[:300]})
            loop.call_later(RELOAD_AFTER_S, self._retry, model)
            raise Unavailable("The model cannot be loaded.", code="model_broken") from error

    def _retry(self, model: CatalogueModel) -> None:
        """A failed load is forgotten after a while, so that a later request tries again."""
        known = self._loading.get(model.name)
        if known is not None and known[0] == model.source and self.loaded(model.name) is None:
            self._forget(model.name)

    def _forget(self, name: str) -> None:
        self._quick.pop(name, None)
        _, task = self._loading.pop(name)
        task.cancel()
        if task.done() and not task.cancelled():
            task.exception()


def text_of(model: ServedModel, ids: Sequence[int], param: str) -> str:
    """The text of token ids, control tokens by their names.

    Raises InvalidRequest for an id that stands for nothing.
    """
    known = model.known_ids
    if ids and max(ids) >= known:
        raise InvalidRequest(
            f"Invalid '{param}': a token id is outside the vocabulary of {known}.",
            code="invalid_value",
            param=param,
        )
    token_bytes = model.text.tokenizer.token_bytes
    return b"".join([token_bytes(token) for token in ids]).decode(errors="replace")


def _read(load: Load, adjust: Adjust | None, model: CatalogueModel) -> ServedModel:
    text = load(model.source)
    if adjust is not None:
        text = adjust(model.name, text)
    sizes = [len(text.tokenizer.token_bytes(token)) for token in range(text.vocab_size)]
    known = max((token + 1 for token, size in enumerate(sizes) if size), default=0)
    return ServedModel(model.name, text, known, max(sizes, default=1) or 1)


def _encode(model: ServedModel, text: str, add_special: bool) -> list[int]:
    _check_size(model, text, "prompt")
    return model.text.tokenizer.encode(text, add_special=add_special, parse_special=True)


def _encode_infill(model: ServedModel, prefix: str | list[int], suffix: str) -> list[int]:
    infill = model.text.infill
    if infill is None:
        raise InvalidRequest(
            "Unsupported parameter: 'suffix' is not supported with this model: it cannot fill in the middle.",
            code="unsupported_parameter",
            param="suffix",
        )
    if isinstance(prefix, str):
        _check_size(model, prefix, "prompt")
    _check_size(model, suffix, "suffix")
    encode = model.text.tokenizer.encode
    before = encode(prefix, add_special=False, parse_special=True) if isinstance(prefix, str) else prefix
    return infill.prompt(before, encode(suffix, add_special=False, parse_special=True))


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Characters to render, about; calls are never few."""
    calls = INLINE_CHARS * sum(bool(message.get("tool_calls")) for message in messages)
    return calls + sum(len(content) for m in messages if isinstance(content := m.get("content"), str))


def _prompt_chat(model: ServedModel, conversation: Conversation) -> ChatPrompt:
    text = model.text
    template = text.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template. Use the completions endpoint.",
            code="unsupported_model",
            param="model",
        )
    unknown = sorted(set(conversation.variables) - template.names)
    if unknown:
        raise InvalidRequest(
            f"Invalid 'chat_template_kwargs': this model's chat template does not use '{unknown[0][:64]}'.",
            code="invalid_value",
            param="chat_template_kwargs",
        )
    messages, tools = conversation.messages, list(conversation.tools) or None
    try:
        if "tools" not in template.names and (tools or has_calls(messages)):
            messages, tools = plainly(messages, tools, text.tool_format), None
        rendered = template.render(messages, tools=tools, variables=conversation.variables)
    except TemplateError as error:
        raise InvalidRequest(
            f"The model's chat template refuses these messages: {error}", param="messages"
        ) from error
    _check_size(model, rendered, "messages")
    ids = text.tokenizer.encode(rendered, add_special=False, parse_special=True)
    return ChatPrompt(ids, _form(text, conversation, rendered))


def _form(text: TextModel, conversation: Conversation, rendered: str) -> AnswerForm | None:
    if not conversation.tools and text.reasoning is None:
        return None
    return AnswerForm(
        tools=text.tool_format if conversation.tools else None,
        functions=frozenset(str(tool["function"]["name"]) for tool in conversation.tools),
        reasoning=text.reasoning,
        calls_max=conversation.calls_max,
        thinking=text.reasoning is not None and open_in(rendered, text.reasoning),
    )


def _check_size(model: ServedModel, text: str, param: str) -> None:
    """Refuses what cannot fit before it is tokenised, which takes long."""
    least = len(text) // model.token_bytes_max
    if least >= model.text.context_length:
        raise check_context(least, None, model.text.context_length, param)
