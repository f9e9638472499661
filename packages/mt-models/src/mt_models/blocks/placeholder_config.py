"""Tokens in whose place pictures, videos or sound would be, in a decoder that computes text alone."""

from __future__ import annotations

from pydantic import Field

from mt_core.config.fields import NonNegativeInt
from mt_core.config.schema import Section


class PlaceholderKeys(Section):
    """A decoder that files hold beside towers for other media."""

    placeholder_token_ids: list[NonNegativeInt] = Field(default_factory=list)
    """Tokens in whose place pictures, videos or sound would be, which this family has not: they are embedded as token
    placeholder_embedding_id, as the class with towers does in a text without them."""
    placeholder_embedding_id: NonNegativeInt = 0
    """The token as which they are embedded, which files name as that of padding."""
