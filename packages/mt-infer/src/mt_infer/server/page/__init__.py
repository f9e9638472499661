"""The page at /: one file without other resources."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files


def page() -> tuple[bytes, dict[str, str]]:
    """The HTML, and headers that let it run its own script and style and nothing else."""
    html = files(__package__).joinpath("index.html").read_text(encoding="utf-8")
    # Computed from the file, so that an edit of the page needs no change here. A script that is injected has no
    # matching hash, and does not run.
    script, style = _hash(html, "script"), _hash(html, "style")
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


def _hash(html: str, tag: str) -> str:
    """As a Content-Security-Policy names an inline element."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    assert found is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"
