"""SentencePiece's BPE (`tokenizer.ggml.model = llama`: Llama 2, Gemma): the best score merges first.

The scores of the file rank the merges; characters without a token become byte tokens. Two observations make
it fast in Python, and keep time near linear in the text: no merge can join two characters that are neighbours
in no token, so the text is cut there first, exactly; and the short stretches between such cuts repeat, so
their ids are remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from text.errors import VocabularyError
from text.tokenizer import VocabularyTokenizer, byte_value
from text.vocabulary import TokenType, Vocabulary

BLANK = "▁"
_MEMORY_STRETCHES = 1 << 16
_MEMORY_CHARS = 48  # longer stretches are not remembered
_START_BITS = 32
_START_MASK = (1 << _START_BITS) - 1


def sentencepiece_tokenizer(vocabulary: Vocabulary) -> VocabularyTokenizer:
    """Raises `VocabularyError` where the file has no scores, or neither byte tokens nor an unknown token."""
    return VocabularyTokenizer(vocabulary, _SentencePieceEncoder(vocabulary), prepare=_show_blanks)


class _SentencePieceEncoder:
    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.scores:
            raise VocabularyError("tokenizer.ggml.scores is missing")
        self._ids = vocabulary.texts(TokenType.NORMAL, TokenType.USER_DEFINED)
        self._length_bits = max(map(len, self._ids), default=0).bit_length()
        self._orders = self._ordered(vocabulary.scores)
        self._neighbours = {text[i : i + 2] for text in self._ids for i in range(len(text) - 1)}
        self._byte_ids = _byte_ids(vocabulary)
        self._unk_id = vocabulary.unk_id
        if self._byte_ids is None and self._unk_id is None:
            raise VocabularyError("the vocabulary has neither the 256 byte tokens nor an unknown token")
        self._add_space_prefix = vocabulary.add_space_prefix
        self._memory: dict[str, list[int]] = {}

    def encode_plain(self, text: str, *, first: bool) -> list[int]:
        if first and self._add_space_prefix:
            text = BLANK + text
        out: list[int] = []
        memory = self._memory
        for stretch in self._stretches(text):
            ids = memory.get(stretch)
            if ids is None:
                ids = self._merge(stretch)
                if len(stretch) <= _MEMORY_CHARS:
                    if len(memory) >= _MEMORY_STRETCHES:
                        memory.clear()
                    memory[stretch] = ids
            out += ids
        return out if self._byte_ids is not None else self._unknowns_joined(out)

    def text_bytes(self, token: str) -> bytes:
        return token.replace(BLANK, " ").encode()

    def _ordered(self, scores: Sequence[float]) -> dict[str, int]:
        """For each token: the rank of its score (best first), room for a position, and the token's length."""
        used = sorted({scores[token_id] for token_id in self._ids.values()}, reverse=True)
        ranks = {score: rank << (_START_BITS + self._length_bits) for rank, score in enumerate(used)}
        return {text: ranks[scores[token_id]] + len(text) for text, token_id in self._ids.items()}

    def _stretches(self, text: str) -> list[str]:
        """`text`, cut between all characters that are neighbours in no token."""
        neighbours, start = self._neighbours, 0
        out: list[str] = []
        for i in range(1, len(text)):
            if text[i - 1 : i + 1] not in neighbours:
                out.append(text[start:i])
                start = i
        out.append(text[start:])
        return out

    def _merge(self, text: str) -> list[int]:
        """Joins the pair with the best score, the leftmost of equals, until no pair is a token."""
        size = len(text)
        orders, bits, length_mask = self._orders, self._length_bits, (1 << self._length_bits) - 1
        # Symbols are named by where they start: ends[i] is where symbol i ends, and begins[e] the start of
        # the symbol that ends at e. A symbol that was joined to its left neighbour has end 0.
        ends = list(range(1, size + 1))
        begins = [-1, *range(size)]
        # One integer per pair, as these compare fast: order of the score, start, length.
        queue = [
            order + (i << bits) for i in range(size - 1) if (order := orders.get(text[i : i + 2])) is not None
        ]
        heapify(queue)
        while queue:
            entry = heappop(queue)
            left = (entry >> bits) & _START_MASK
            end = left + (entry & length_mask)
            middle = ends[left]
            if middle == 0 or middle >= size or ends[middle] != end:
                continue  # one of the two has been joined to something else
            ends[left], ends[middle], begins[end] = end, 0, left
            if left > 0 and (order := orders.get(text[begins[left] : end])) is not None:
                heappush(queue, order + (begins[left] << bits))
            if end < size and (order := orders.get(text[left : ends[end]])) is not None:
                heappush(queue, order + (left << bits))
        out: list[int] = []
        at = 0
        while at < size:
            out += self._symbol(text[at : ends[at]])
            at = ends[at]
        return out

    def _symbol(self, text: str) -> list[int]:
        token_id = self._ids.get(text)
        if token_id is not None:
            return [token_id]
        if self._byte_ids is not None:
            return [self._byte_ids[byte] for byte in text.encode()]
        return [] if self._unk_id is None else [self._unk_id]

    def _unknowns_joined(self, ids: list[int]) -> list[int]:
        unk = self._unk_id
        return [token for i, token in enumerate(ids) if token != unk or i == 0 or ids[i - 1] != unk]


def _byte_ids(vocabulary: Vocabulary) -> list[int] | None:
    found: dict[int, int] = {}
    for text, token_id in vocabulary.texts(TokenType.BYTE).items():
        value = byte_value(text)
        if value is not None:
            found[value] = token_id
    return [found[byte] for byte in range(256)] if len(found) == 256 else None


def _show_blanks(text: str) -> str:
    return text.replace(" ", BLANK)
