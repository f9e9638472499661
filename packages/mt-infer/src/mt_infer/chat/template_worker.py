"""The process that renders chat templates: one JSON object a line in, one out. Run with `python -m`.

A template of a checkpoint is a program that somebody else wrote. Jinja's sandbox keeps it from Python's objects, but
not from looping or filling the memory: it runs in a process that has little memory, and that can be ended.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

from mt_core.errors import MtError
from mt_data.datasets.sft.jinja_sandbox import CompiledTemplate, compile_template

MEMORY_BYTES = 1 << 30
LONGEST_TEXT = 32 << 20
"""Characters that a rendered conversation may have."""
ADVICE = "correct the messages, or serve the model with another --chat-template"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server that started it ends it
    # Address space: Linux does not enforce RLIMIT_RSS, the limit of resident memory.
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    template: CompiledTemplate | None = None
    for line in sys.stdin:
        message = json.loads(line)
        try:
            # The first line is the template, all others are values for it.
            if template is None:
                template = compile_template(message["source"], message["name"])
                reply = {"text": ""}
            else:
                reply = {"text": rendered(template, message)}
        except (MtError, MemoryError) as error:
            reply = {"error": str(error) or "the chat template needs too much memory"}
        print(json.dumps(reply), flush=True)


def rendered(template: CompiledTemplate, values: dict[str, Any]) -> str:
    text, _ = template.render({**values, "strftime_now": strftime_now}, "the messages", ADVICE)
    # In the worker, before the text is sent and encoded.
    if len(text) > LONGEST_TEXT:
        raise MemoryError(f"the chat template writes {len(text)} characters; {LONGEST_TEXT} are allowed")
    return text


def strftime_now(form: str) -> str:
    """The function that Hugging Face's templates call."""
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
