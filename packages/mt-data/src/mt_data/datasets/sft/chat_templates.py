"""Writing a conversation as text with a Jinja chat template, in a sandbox.

Templates see what Hugging Face's tokenizers give them: messages, tools, add_generation_prompt, the special
tokens by name, raise_exception and the `{% generation %}` tag. There is no strftime_now: a date of the day
of the run would make different training data every day.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.interfaces import Tokenizer

if TYPE_CHECKING:
    from mt_data.datasets.sft.conversations import Conversation, Message


OF_TOKENIZER = "tokenizer"
ADVICE = "data.chat_template or data.chat_template_file chooses another template"
Span = tuple[int, int]


class ChatTemplate:
    """A compiled template.

    has_marks: it marks the answers itself with `{% generation %}`. markers: texts that should be one id each.
    """

    def __init__(
        self,
        name: str,
        source: str,
        special_tokens: Mapping[str, str],
        eod_after_answer: bool,
        markers: Sequence[str] = (),
    ) -> None:
        # jinja2 is imported only where a template is compiled.
        from mt_data.datasets.sft.jinja_sandbox import compile_template

        self.name = name
        self.source = source
        self.special_tokens = dict(special_tokens)
        self.eod_after_answer = eod_after_answer
        self.markers = markers
        self._template = compile_template(source, name)
        self.has_marks = self._template.has_marks

    def fingerprint(self) -> str:
        """SHA-256 of all that changes the text."""
        content = json.dumps([self.source, self.special_tokens, self.eod_after_answer], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def render(
        self, conversation: Conversation, messages: Sequence[Message], *, add_generation_prompt: bool = False
    ) -> tuple[str, list[Span]]:
        """The text of `messages` (some of the conversation's) and the characters marked as answers.

        Raises DataError, naming the line of the conversation, when the template refuses them.
        """
        values = {
            **self.special_tokens,
            "messages": messages,
            "tools": conversation.tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(values, conversation.where, ADVICE)


class NoChatTemplateError(ConfigError):
    """The tokenizer brings no chat template along; one that cannot be used is another ConfigError."""


def load_chat_template(
    name: str, file: str | None, tokenizer: Tokenizer, eod_after_answer: bool | None = None
) -> ChatTemplate:
    """The template of data.chat_template_file, a built-in one, or (name "tokenizer") the tokenizer's own.

    Raises ConfigError for an unknown name, a tokenizer without a template and a template that is no Jinja.
    """
    special = _special_tokens(tokenizer)
    if file is not None:
        return ChatTemplate(file, _read(file), special, bool(eod_after_answer))
    if name == OF_TOKENIZER:
        return ChatTemplate(_OWN, _of_tokenizer(tokenizer), special, bool(eod_after_answer))
    if name not in BUILTIN_TEMPLATES:
        known = [OF_TOKENIZER, *BUILTIN_TEMPLATES]
        raise ConfigError(
            f'data.chat_template="{name}" must be one of {", ".join(known)}{did_you_mean(name, known)}; '
            "a template in a file of its own is named with data.chat_template_file"
        )
    builtin = BUILTIN_TEMPLATES[name]
    eod = builtin.eod_after_answer if eod_after_answer is None else eod_after_answer
    return ChatTemplate(name, builtin.source, special, eod, builtin.markers)


_OWN = "the tokenizer's chat template"


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.chat_template_file={file} cannot be read: {error}") from error


def _of_tokenizer(tokenizer: Tokenizer) -> str:
    files = tokenizer.files()
    # Hugging Face's order: a file of its own, then the key of the tokenizer's configuration, which may hold several by
    # name.
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = _json(files, name).get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):
            named = {entry["name"]: entry["template"] for entry in template}
            if "default" in named:
                return named["default"]
            raise ConfigError(
                f'the tokenizer has the chat templates {", ".join(named)} and none named "default"; save the one '
                "to use in a file and name it with data.chat_template_file"
            )
    raise NoChatTemplateError(
        f'data.chat_template="{OF_TOKENIZER}", but the tokenizer brings no chat template along; set '
        f"data.chat_template to {', '.join(BUILTIN_TEMPLATES)}, or data.chat_template_file to a Jinja file"
    )


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Special tokens by name ("bos_token") as the tokenizer's files give them; empty without such files."""
    tokens: dict[str, str] = {}
    # The second overrides the first. Values are texts, or objects with a text under "content" (AddedToken).
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _json(tokenizer.files(), name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                tokens[key] = text
    return tokens


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        content = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"the tokenizer's {name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"the tokenizer's {name} holds no JSON object")
    return content


# -- builtin templates -------------------------------------------------------------------------------


@dataclass(frozen=True)
class BuiltinTemplate:
    """source: Jinja. markers: text that a fitting tokenizer has single ids for. eod_after_answer: answers are
    ended by the tokenizer's end-of-document id, since the text has no mark for it.
    """

    source: str
    markers: tuple[str, ...] = ()
    eod_after_answer: bool = False


_NO_TOOLS = (
    "{%- if tools %}{{ raise_exception('this template cannot describe tools') }}{% endif -%}"
    "{%- for message in messages if message.tool_calls -%}"
    "{{ raise_exception('this template cannot write tool calls') }}"
    "{%- endfor -%}"
)

CHATML = BuiltinTemplate(
    _NO_TOOLS + "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}",
    markers=("<|im_start|>", "<|im_end|>"),
)
LLAMA3 = BuiltinTemplate(
    _NO_TOOLS + "{{- '<|begin_of_text|>' -}}"
    "{%- for message in messages -%}"
    "{%- set role = 'ipython' if message.role == 'tool' else message.role -%}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}",
    markers=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
PLAIN = BuiltinTemplate(
    _NO_TOOLS + "{%- for message in messages -%}"
    "{{ '' if loop.first else '\n\n' }}{{ message.role | capitalize + ': ' + message.content }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '\n\nAssistant:' if messages else 'Assistant:' }}{% endif -%}",
    eod_after_answer=True,
)
BUILTIN_TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
