"""One server with two language models and an encoder, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.infer.server.served import Live, encoder, language_model, live

from mt_infer.server.options import ServerOptions


@pytest.fixture(scope="module")
def served() -> Iterator[Live]:
    models = [language_model("alpha", 1), language_model("beta", 2), encoder("bert")]
    with live(models, ServerOptions(max_queue=256)) as found:
        yield found
