"""Text on both sides of a model: tokenizers, chat templates, incremental detokenising, stop strings, GGUF.

Knows neither torch nor gRPC, and imports no other package of the mesh.
"""

from text.answer_parser import AnswerForm, AnswerParser
from text.chat_template import ChatTemplate
from text.detokenizer import Detokenizer, detokenize
from text.errors import GgufError, TemplateError, TextError, VocabularyError
from text.model import TextModel, load_text_model
from text.stop_strings import StopStrings
from text.tokenizer import Tokenizer

__all__ = [
    "AnswerForm",
    "AnswerParser",
    "ChatTemplate",
    "Detokenizer",
    "GgufError",
    "StopStrings",
    "TemplateError",
    "TextError",
    "TextModel",
    "Tokenizer",
    "VocabularyError",
    "detokenize",
    "load_text_model",
]
