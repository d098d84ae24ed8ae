"""What can go wrong in text/: bad model files and conversations that a template refuses.

    TextError
    ├── GgufError         the file is not a usable GGUF file
    ├── VocabularyError   its metadata gives no usable tokenizer
    └── TemplateError     a chat template is broken, or refuses these messages

The first two are the operator's to mend (the model cannot be loaded); a `TemplateError` while rendering is
caused by the request. Knows nothing of gRPC or HTTP statuses: services translate.
"""

from __future__ import annotations


class TextError(ValueError):
    """Common ancestor. The message says what was wrong and where, and may be shown to whoever caused it."""


class GgufError(TextError):
    """The file is not a usable GGUF file. The message names the file, the place and the reason."""


class VocabularyError(TextError):
    """The metadata gives no usable tokenizer. The message names the key or the token."""


class TemplateError(TextError):
    """The template is broken, or refuses these messages, in its own words where it has some."""
