"""A request of another dialect, read as the chat request that it amounts to.

So every rule about sampling, tools and formats is written once. What the chat reader
says of a field is said again in the client's own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh.errors import InvalidRequest
from router.core.core import Admitted, Core
from router.core.request import Ask
from router.openai.chat import ChatRequest
from router.openai.fields import Fields


class Translated:
    """`names` maps chat's names, or beginnings of them, to the client's; the longest that fits counts."""

    def __init__(self, body: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._names = names
        self._chat = ChatRequest(body)
        try:
            self._chat.read()
        except InvalidRequest as error:
            raise self.said(error) from None
        self.tools = self._chat.tools

    async def ask(self, core: Core, admitted: Admitted) -> Ask:
        """Renders and tokenises; raises InvalidRequest in the client's words."""
        try:
            return await self._chat.ask(core, admitted)
        except InvalidRequest as error:
            raise self.said(error) from None

    def said(self, error: InvalidRequest) -> InvalidRequest:
        """The same error, of the field that the client wrote."""
        param = error.param
        if param is None:
            return error
        known = [name for name in self._names if param == name or param.startswith((f"{name}.", f"{name}["))]
        if not known:
            return error
        name = max(known, key=len)
        rest = param[len(name) :]
        named = (self._names[name] + rest).replace(".function.", ".").removesuffix(".function")
        return InvalidRequest(error.message.replace(f"'{param}'", f"'{named}'"), code=error.code, param=named)


def moved(fields: Fields, body: dict[str, Any], names: Mapping[str, str]) -> None:
    """Takes fields that only have another name in chat."""
    for name, chat_name in names.items():
        value = fields.take(name)
        if value is not None:
            body[chat_name] = value
