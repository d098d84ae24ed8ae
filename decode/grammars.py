"""Grammars of this worker's model: compiled beside the loop, and brought to where an answer already is.

The vocabulary is read when the first request with a grammar comes. It does not know what a grammar says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from decode.opening import Opening
from mesh.errors import InternalError, InvalidRequest
from text.grammar import GrammarError, Grammars, Matcher


class WorkerGrammars:
    """`load` blocks, once."""

    def __init__(self, load: Callable[[], Grammars]) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def matcher(self, opening: Opening) -> Matcher | None:
        """Where the answer is in its grammar, None if it has none. Raises InvalidRequest."""
        if not opening.grammar:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._make, opening)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, opening: Opening) -> Matcher:
        try:
            if self._grammars is None:
                self._grammars = self._load()
            matcher = self._grammars.compile(opening.grammar)
        except GrammarError as error:
            raise InvalidRequest(f"the grammar is refused: {error}", param="grammar") from error
        generated = opening.tokens[len(opening.tokens) - opening.generated :]
        if generated and not matcher.take(generated):
            raise InternalError("what was generated does not obey the grammar")
        return matcher
