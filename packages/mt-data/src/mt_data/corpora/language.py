"""Which language a text is in, by py3langid: it brings its model of 139 languages (4 MB) and needs only NumPy."""

from __future__ import annotations

from functools import cache
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_data.corpora.clean_options import CleanOptions
from mt_data.corpora.document import Document
from mt_data.corpora.requires import require


class LanguageRule:
    """Drops documents in other languages than `options.languages`, or in a language that is not certain enough.

    The probability is of the most likely language among all of the model. Raises ConfigError for a
    language code that the model does not know.
    """

    def __init__(self, options: CleanOptions) -> None:
        self.identifier = language_identifier()
        known = set(self.identifier.labels)
        for language in options.languages:
            if language not in known:
                hint = did_you_mean(language, known)
                raise ConfigError(f"languages={language!r} is not known{hint}; give a code such as en, de or zh")

    def __call__(self, document: Document, options: CleanOptions) -> str | None:
        language, probability = self.identifier.classify(document.text[: options.language_chars])
        if language not in options.languages:
            return f"{language} with probability {probability:.2f}"
        if probability < options.min_language_probability:
            return f"{language} with probability {probability:.2f} only, minimum {options.min_language_probability:g}"
        return None


@cache
def language_identifier() -> Any:
    """py3langid's own model, whose file takes 0.3 s to unpack: once for the check of the options and for the work."""
    langid = require("py3langid.langid")
    # norm_probs gives probabilities; without it py3langid returns unnormalized log scores.
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
