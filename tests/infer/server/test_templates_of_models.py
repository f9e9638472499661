"""Folders of transformers with their chat templates, served: prompts with tools are those of apply_chat_template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mt_infer.server.openai.chat import ChatBody, chat_prompt
from mt_infer.server.served_model import load_models

transformers = pytest.importorskip("transformers")

# Templates as those that the families publish: what each of them asks of the language is in the one of its kind.
CALLS = """{%- for call in message.tool_calls %}{{ '\\n<tool_call>\\n{"name": "' }}{{ call.function.name }}
{{- '", "arguments": ' }}
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}
{%- endif %}{{ '}\\n</tool_call>' }}{% endfor %}"""
QWEN = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.open and message.role == "user" and message.content is string
        and not message.content.startswith('<tool_response>') %}
        {%- set ns.open = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif message.role != 'system' or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- if message.tool_calls %}"""
    + CALLS
    + """{%- endif %}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
)
LLAMA = """{{- bos_token }}
{%- if tools_in_user_message is not defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] }}
        {{- '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or (message.content is iterable and message.content is not string) %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{%- set last = namespace(user=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endfor %}
{%- set system = (messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list) %}
{{- bos_token }}{%- if system %}{{- '[SYSTEM_PROMPT]' + system | join(' ') + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}
        {%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + (tools | map(attribute='function') | list | tojson) }}
        {{- '[/AVAILABLE_TOOLS]' }}{%- endif %}
        {{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
        {{- call.function.arguments | tojson }}{%- endfor %}{{- eos_token }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content | string + '[/TOOL_RESULTS]' }}
    {%- else %}{{- message['content'] + eos_token }}{%- endif %}
{%- endfor %}"""
GEMMA = """{{ bos_token }}{%- set prefix = '' -%}{%- set rest = messages -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\\n\\n' -%}{%- set rest = messages[1:] -%}
{%- endif -%}
{%- for message in rest -%}
    {%- set role = 'model' if message['role'] == 'assistant' else 'user' -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if loop.first and tools -%}
    {{ tools | map(attribute='function') | map(attribute='name') | join(', ') }}: {% endif -%}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
GPT_OSS = """{%- macro kind(spec) -%}
    {%- if spec.type == 'string' -%}{{- '"' + spec.enum | join('" | "') + '"' if spec.enum else 'string' }}
    {%- else -%}{{- spec.type }}{%- endif -%}
{%- endmacro -%}
{%- macro signature(tool) -%}
    {{- 'type ' + tool.name + ' = (_: {' }}
    {%- for name, spec in tool.parameters.properties.items() %}
        {{- ' ' + name + ('' if name in (tool.parameters.required or []) else '?') + ': ' + kind(spec) + ',' }}
    {%- endfor %}{{- ' }) => any;\\n' }}
{%- endmacro -%}
{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort | default('medium')) + '<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{- signature(tool.function) }}{%- endfor %}
{{- '<|end|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}{%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
MARKS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "<start_of_turn>", "<end_of_turn>", "<|start|>", "<|message|>", "<|end|>"),
]
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "max_position_embeddings": 512}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA, {}),
    "qwen3": ("Qwen3", QWEN, {}),
    "mistral": ("Mistral", MISTRAL, {"sliding_window": None}),
    "gemma3_text": ("Gemma3", GEMMA, {"sliding_window": 8}),
    "gpt_oss": ("GptOss", GPT_OSS, {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> in a city & its surroundings",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Köln, Paris"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
QUESTION: list[dict[str, Any]] = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Weather in Köln? "},
]
ANSWERED: list[dict[str, Any]] = [
    *QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
        ],
    },
    {"role": "tool", "content": "rain, 9°", "tool_call_id": "123456789"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nRain."},
    {"role": "user", "content": "And tomorrow?"},
]


def model_folder(folder: Path, kind: str) -> Path:
    """Weights, tokenizer and chat_template.jinja, as transformers saves them."""
    stem, template, keys = KINDS[kind]
    names = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
    config, model = names.get(stem, (f"{stem}Config", f"{stem}ForCausalLM"))
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    getattr(transformers, model)(getattr(transformers, config)(**SIZES, **special, **keys)).save_pretrained(folder)
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=MARKS, show_progress=False)
    engine.train_from_iterator(["the user and the assistant in the weather"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=engine, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Of the server's requests and of `mt chat`, which has the same format: text and ids, with tools, results of calls
    and further names of the template."""
    folder = model_folder(tmp_path / kind, kind)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    (served,) = load_models([folder], device="cpu", settings={"inference": {"cache_memory_gb": 0.01}})
    chat = served.require_chat()
    try:
        for messages, tools, names in (
            (QUESTION, None, {}),
            (QUESTION, TOOLS, {}),
            (ANSWERED, TOOLS, {}),
            (ANSWERED, None, {"enable_thinking": False, "date_string": "1 May", "tools_in_user_message": False}),
        ):
            given = {"tools": tools, "add_generation_prompt": True, **names}
            expected = reference.apply_chat_template(messages, tokenize=False, **given)
            assert chat.text(messages, tools, names) == expected
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=True, **given)["input_ids"]
            asked = {"model": kind, "messages": as_sent(messages), "chat_template_kwargs": names}
            body = ChatBody.model_validate(asked | ({"tools": tools} if tools else {}))
            assert chat_prompt(served, body.messages, body.offered_tools, body.template_names) == ids
    finally:
        chat.close()


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clients send the arguments of calls as texts."""

    def sent(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}

    return [
        {**one, **({"tool_calls": [sent(call) for call in one["tool_calls"]]} if "tool_calls" in one else {})}
        for one in messages
    ]
