"""A chromium for tests of pages: the system's, or the one that playwright has installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """Skips the test where there is none."""
    from playwright.sync_api import sync_playwright

    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    with sync_playwright() as started:
        if program is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("no chromium: apt-get install chromium, or uv run playwright install chromium")
        # Chromium's sandbox does not start for root, as which containers run.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = started.chromium.launch(executable_path=program, args=arguments)
        yield opened
        opened.close()
