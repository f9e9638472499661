"""Chat templates that need no file. Each is a Jinja template as the ones that tokenizers bring along."""

from __future__ import annotations

from dataclasses import dataclass


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
