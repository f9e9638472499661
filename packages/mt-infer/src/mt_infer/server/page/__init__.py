"""The page at /: one file without other resources."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

MARKDOWN = "markdown-it.umd.min.js"
"""Makes HTML of Markdown (https://github.com/markdown-it/markdown-it, MIT). HTML of a text stays text."""


def page() -> tuple[bytes, dict[str, str]]:
    """The HTML, and headers that let it run its own script and style and nothing else."""
    html = _read("index.html").replace(f'<script src="{MARKDOWN}">', f"<script>{_read(MARKDOWN)}")
    # Computed from the file, so that an edit of the page needs no change here. A script that is injected has no
    # matching hash, and does not run.
    script, style = _hashes(html, "script"), _hashes(html, "style")
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return html.encode(), headers


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hashes(html: str, tag: str) -> str:
    """Hashes by which a Content-Security-Policy names inline elements."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
