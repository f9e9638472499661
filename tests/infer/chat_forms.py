"""Forms of tool calls as the models' publishers have them: two calls written by hand, and a short chat template that
reads messages as the published one does."""

from __future__ import annotations

from dataclasses import dataclass

NOTE = 'Zürich, "9°"\n\n— {ok} <b>'
"""An argument with marks, line breaks and letters that need UTF-8."""
PARAMETERS = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "days": {"type": "integer"},
        "code": {"type": "string"},
        "deep": {"type": "object", "properties": {"on": {"type": "boolean"}, "list": {"type": "array"}}},
        "all": {"type": ["boolean", "null"]},
    },
    "required": ["note"],
}
FUNCTIONS = [
    {"name": "get_weather", "parameters": PARAMETERS},
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
]
ARGUMENTS = {"note": NOTE, "days": 3, "code": "007", "deep": {"on": True, "list": [1, 2.5, "x"]}, "all": False}
JSON = (
    r'{"note": "Zürich, \"9°\"\n\n— {ok} <b>", "days": 3, "code": "007", '
    r'"deep": {"on": true, "list": [1, 2.5, "x"]}, "all": false}'
)
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>'
PYTHON = (
    r"get_weather(note='Zürich, \"9°\"\n\n— {ok} <b>', days=3, code=" + '"007", '
    r'deep={"on": True, "list": [1, 2.5, "x"]}, all=False)'
)
DEEP = '{"on": true, "list": [1, 2.5, "x"]}'
VALUES = (
    ("note", NOTE, True),
    ("days", "3", False),
    ("code", "007", True),
    ("deep", DEEP, False),
    ("all", "false", False),
)


def elements(form: str) -> str:
    """form: with {name}, {value} and {kind}."""
    return "".join(
        form.replace("{name}", name).replace("{value}", value).replace("{kind}", "true" if is_text else "false")
        for name, value, is_text in VALUES
    )


@dataclass(frozen=True)
class Published:
    """call: of get_weather with ARGUMENTS. now: of the function without arguments. between: what stands between two
    calls. before, after: the section. template: writes an assistant's calls, in the frame of TEMPLATE.
    """

    call: str
    now: str
    template: str
    between: str = "\n"
    before: str = ""
    after: str = ""
    content: str = "Let me see.\n"

    @property
    def one(self) -> str:
        return f"{self.before}{self.call}{self.after}"

    @property
    def two(self) -> str:
        return f"{self.before}{self.call}{self.between}{self.now}{self.after}"


CALLS = "{%- for call in message.tool_calls %}{%- set f = call.function %}"
END = "{%- endfor %}"
INVOKE = (
    """{{ '<' + tag + 'invoke name="' + f.name + '">\n' }}{% for key, value in f.arguments.items() %}"""
    """{{ '<' + tag + 'parameter name="' + key + '">' }}{{ value if value is string else value | tojson }}"""
    """{{ '</' + tag + 'parameter>\n' }}{% endfor %}{{ '</' + tag + 'invoke>\n' }}"""
)
PAIRS = (
    "{% for key, value in f.arguments.items() %}{{ '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{ value if value is string else value | tojson(ensure_ascii=False) }}{{ '</arg_value>\n' }}{% endfor %}"
)
GEMMA_MACRO = """{%- macro argument(value, key=false) -%}
    {%- if value is string -%}{{- '<|"|>' + value + '<|"|>' -}}
    {%- elif value is boolean -%}{{- 'true' if value else 'false' -}}
    {%- elif value is mapping -%}{{- '{' -}}
        {%- for name, inner in value | dictsort -%}
            {{- name -}}:{{- argument(inner) -}}{{- ',' if not loop.last -}}
        {%- endfor -%}{{- '}' -}}
    {%- elif value is sequence -%}{{- '[' -}}
        {%- for inner in value -%}{{- argument(inner) -}}{{- ',' if not loop.last -}}{%- endfor -%}{{- ']' -}}
    {%- else -%}{{- value -}}{%- endif -%}
{%- endmacro -%}"""
M3_MACRO = """{%- macro content(value) -%}
    {%- if value is mapping -%}
        {%- for key, inner in value.items() -%}{{ space + '<' + key + '>' + content(inner) + space + '</' + key + '>' }}
        {%- endfor -%}
    {%- elif value is string -%}{{ value }}
    {%- elif value is iterable -%}
        {%- for inner in value -%}{{ space + '<item>' + content(inner) + space + '</item>' }}{%- endfor -%}
    {%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}{%- set space = ']<]minimax[>[' -%}"""
M3 = "]<]minimax[>["
HARMONY_CALL = "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>" + JSON + "<|call|>"

FORMS = {
    "hermes": Published(
        HERMES_CALL,
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        CALLS
        + """{{ '\n<tool_call>\n{"name": "' + f.name + '", "arguments": ' }}{{ f.arguments if f.arguments is string else
        f.arguments | tojson }}{{ '}\n</tool_call>' }}"""
        + END,
    ),
    "llama3_json": Published(
        f'{{"name": "get_weather", "parameters": {JSON}}}',
        '{"name": "now", "parameters": {}}',
        """{#- ipython <|python_tag|> #}{{- '{"name": "' + message.tool_calls[0].function.name + '", ' }}"""
        """{{- '"parameters": ' }}{{- message.tool_calls[0].function.arguments | tojson }}{{- "}" }}""",
        between="; ",
        content="",
    ),
    "qwen3_coder": Published(
        "<tool_call>\n<function=get_weather>\n"
        + elements("<parameter={name}>\n{value}\n</parameter>\n")
        + "</function>\n</tool_call>",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        CALLS
        + """{{- '\n<tool_call>\n<function=' + f.name + '>\n' }}{%- for name, value in f.arguments | items %}
        {{- '<parameter=' + name + '>\n' }}
        {%- set is_list = value is sequence and value is not string %}
        {%- set value = value | tojson if value is mapping or is_list else value | string %}
        {{- value }}{{- '\n</parameter>\n' }}{%- endfor %}{{- '</function>\n</tool_call>' }}"""
        + END,
    ),
    "seed_oss": Published(
        "<seed:tool_call>\n<function=get_weather>\n"
        + elements("<parameter={name}>{value}</parameter>\n")
        + "</function>\n</seed:tool_call>",
        "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        CALLS
        + """{{ '\n<seed:tool_call>\n<function=' + f.name + '>\n' }}{% for name, value in f.arguments.items() %}
        {{- '<parameter=' + name + '>' }}{{ value if value is string else value | tojson }}{{ '</parameter>\n' }}
        {%- endfor %}{{ '</function>\n</seed:tool_call>' }}"""
        + END,
    ),
    "glm": Published(
        "<tool_call>get_weather\n"
        + elements("<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n")
        + "</tool_call>",
        "<tool_call>now\n</tool_call>",
        CALLS + "{{ '\n<tool_call>' + f.name + '\n' }}" + PAIRS + "{{ '</tool_call>' }}" + END,
    ),
    "hunyuan_v3": Published(
        "<tool_call>get_weather<tool_sep>\n"
        + elements("<arg_key>{name}</arg_key>\n<arg_value>{value}</arg_value>\n")
        + "</tool_call>",
        "<tool_call>now<tool_sep>\n</tool_call>",
        "{{ '<tool_calls>\n' }}"
        + CALLS
        + "{{ '<tool_call>' + f.name + '<tool_sep>\n' }}"
        + PAIRS
        + "{{ '</tool_call>\n' }}"
        + END
        + "{{ '</tool_calls>' }}",
        before="<tool_calls>\n",
        after="\n</tool_calls>",
    ),
    "longcat": Published(
        "<longcat_tool_call>get_weather\n"
        + elements("<longcat_arg_key>{name}</longcat_arg_key>\n<longcat_arg_value>{value}</longcat_arg_value>\n")
        + "</longcat_tool_call>",
        "<longcat_tool_call>now\n</longcat_tool_call>",
        CALLS
        + "{{ '<longcat_tool_call>' + f.name + '\n' }}"
        + PAIRS.replace("arg_", "longcat_arg_")
        + "{{ '</longcat_tool_call>\n' }}"
        + END,
    ),
    "longcat_json": Published(
        HERMES_CALL.replace("tool_call", "longcat_tool_call"),
        '<longcat_tool_call>\n{"name": "now", "arguments": {}}\n</longcat_tool_call>',
        CALLS
        + """{{ '<longcat_tool_call>\n' }}{{ {'name': f.name, 'arguments': f.arguments} | tojson }}
        {{- '\n</longcat_tool_call>' }}"""
        + END,
    ),
    "minimax_m2": Published(
        '<invoke name="get_weather">\n' + elements('<parameter name="{name}">{value}</parameter>\n') + "</invoke>",
        '<invoke name="now">\n</invoke>',
        "{%- set tag = '' %}{{ '\n<minimax:tool_call>\n' }}"
        + CALLS
        + INVOKE
        + END
        + "{{ '</minimax:tool_call>' }}{#<invoke#}",
        before="<minimax:tool_call>\n",
        after="\n</minimax:tool_call>",
    ),
    "minimax_m3": Published(
        f'{M3}<invoke name="get_weather">{M3}<note>{NOTE}{M3}</note>{M3}<days>3{M3}</days>{M3}<code>007{M3}</code>'
        f"{M3}<deep>{M3}<on>true{M3}</on>{M3}<list>{M3}<item>1{M3}</item>{M3}<item>2.5{M3}</item>{M3}<item>x{M3}</item>{M3}</list>"
        f"{M3}</deep>{M3}<all>false{M3}</all>{M3}</invoke>",
        f'{M3}<invoke name="now">{M3}</invoke>',
        M3_MACRO
        + "{{ space + '<tool_call>\n' }}"
        + CALLS
        + """{{ space + '<invoke name="' + f.name + '">' + content(f.arguments) + space + '</invoke>\n' }}"""
        + END
        + "{{ space + '</tool_call>' }}",
        before=f"{M3}<tool_call>\n",
        after=f"\n{M3}</tool_call>",
    ),
    "deepseek_v3": Published(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{JSON}\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜>",
        "{%- if message['content'] is none %}{{ '<｜tool▁calls▁begin｜>' }}"
        + CALLS
        + "{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + f['name'] + '\n' + '```json' + '\n'"
        " + f['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>' }}"
        + END
        + "{{ '<｜tool▁calls▁end｜>' }}{%- endif %}",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Published(
        f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "{{ '<｜tool▁calls▁begin｜>' }}"
        + CALLS
        + "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}"
        + END
        + "{{ '<｜tool▁calls▁end｜>' }}",
        between="",
        before="<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": Published(
        '<｜DSML｜invoke name="get_weather">\n'
        + elements('<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n')
        + "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
        "{%- set tag = '｜DSML｜' %}{{ '<｜DSML｜function_calls>\n' }}"
        + CALLS
        + INVOKE.replace("key + '\">'", """key + '" string="' + ('true' if value is string else 'false') + '">'""")
        + END
        + "{{ '</｜DSML｜function_calls>' }}",
        before="<｜DSML｜function_calls>\n",
        after="\n</｜DSML｜function_calls>",
    ),
    "deepseek_v4": Published(
        '<｜DSML｜invoke name="get_weather">\n'
        + elements('<｜DSML｜parameter name="{name}" string="{kind}">{value}</｜DSML｜parameter>\n')
        + "</｜DSML｜invoke>",
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>',
        "{%- set tag = '｜DSML｜' %}{{ '<｜DSML｜tool_calls>\n' }}"
        + CALLS
        + INVOKE.replace("key + '\">'", """key + '" string="' + ('true' if value is string else 'false') + '">'""")
        + END
        + "{{ '</｜DSML｜tool_calls>' }}",
        before="<｜DSML｜tool_calls>\n",
        after="\n</｜DSML｜tool_calls>",
    ),
    "kimi_k2": Published(
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{JSON}<|tool_call_end|>",
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        "{{ '<|tool_calls_section_begin|>' }}"
        + CALLS
        + "{{ '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}{% if f['arguments'] is string %}"
        "{{ f['arguments'] }}{% else %}{{ f['arguments'] | tojson }}{% endif %}{{ '<|tool_call_end|>' }}"
        + END
        + "{{ '<|tool_calls_section_end|>' }}",
        between="",
        before="<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "mistral": Published(
        f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
        "[TOOL_CALLS]now[ARGS]{}",
        CALLS
        + "{%- if call.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}"
        + "{{ '[TOOL_CALLS]' + f.name + '[ARGS]' }}"
        + "{{ f.arguments if f.arguments is string else f.arguments | tojson | safe }}"
        + END,
        between="",
        content="Let me see.",
    ),
    "mistral_list": Published(
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}, "id": "abcdefghi"}}',
        '{"name": "now", "arguments": {}, "id": "123456789"}',
        "{{- '[TOOL_CALLS] [' }}"
        + CALLS
        + """{%- if call.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}
        {{- '{"name": "' + f.name + '", "arguments": ' }}{{- f.arguments | tojson }}{{- ', "id": "' + call.id + '"}' }}
        {{- ', ' if not loop.last }}"""
        + END
        + "{{- ']' }}",
        between=", ",
        after="]",
        content="Let me see.",
    ),
    "gemma4": Published(
        f'<|tool_call>call:get_weather{{note:<|"|>{NOTE}<|"|>,days:3,code:<|"|>007<|"|>,deep:{{on:true,list:[1,2.5,'
        '<|"|>x<|"|>]},all:false}<tool_call|>',
        "<|tool_call>call:now{}<tool_call|>",
        GEMMA_MACRO
        + CALLS
        + """{{- '<|tool_call>call:' + f.name + '{' }}{%- for name, value in f.arguments | dictsort -%}
        {{- name + ':' }}{{- argument(value) }}{{- ',' if not loop.last }}{%- endfor %}{{- '}<tool_call|>' }}"""
        + END,
        between="",
    ),
    "function_gemma": Published(
        f"<start_function_call>call:get_weather{{note:<escape>{NOTE}<escape>,days:3,code:<escape>007<escape>,deep:{{on:true,"
        "list:[1,2.5,<escape>x<escape>]},all:false}<end_function_call>",
        "<start_function_call>call:now{}<end_function_call>",
        GEMMA_MACRO.replace('<|"|>', "<escape>")
        + CALLS
        + """{{- '<start_function_call>call:' + f.name + '{' }}{%- for name, value in f.arguments | dictsort -%}
        {{- name + ':' }}{{- argument(value) }}{{- ',' if not loop.last }}{%- endfor %}{{- '}<end_function_call>' }}"""
        + END,
        between="",
    ),
    "lfm2": Published(
        f"<|tool_call_start|>[{PYTHON}",
        "now()",
        "{{- '<|tool_call_start|>[' }}"
        + CALLS
        + """{{- f.name + '(' }}{%- for name, value in f.arguments.items() %}{{- name + '=' }}
        {{- value | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}{{- ', ' if not loop.last }}"""
        + END
        + "{{- ']<|tool_call_end|>' }}",
        between=", ",
        after="]<|tool_call_end|>",
    ),
    "pythonic": Published(
        f"[{PYTHON}",
        "now()",
        "{#- [func_name1(params_name1=value), func_name2(x)] ipython #}{{- '<|python_start|>[' }}"
        + CALLS
        + """{{- f.name + '(' }}{%- for name, value in f.arguments.items() %}{{- name + '=' }}
        {{- value | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}{{- ', ' if not loop.last }}"""
        + END
        + "{{- ']<|python_end|>' }}",
        between=", ",
        after="]",
        content="",
    ),
    "olmo3": Published(
        f"<function_calls>{PYTHON}",
        "now()",
        "{{- '<function_calls>' }}"
        + CALLS
        + """{{- f.name + '(' }}{%- for name, value in f.arguments.items() %}{{- name + '=' }}
        {{- value | tojson }}{{- ', ' if not loop.last }}{%- endfor %}{{- ')' }}{{- '\n' if not loop.last }}"""
        + END
        + "{{- '</function_calls>' }}",
        after="</function_calls>",
    ),
    "granite": Published(
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON}}}',
        '{"name": "now", "arguments": {}}',
        "{{- '<|tool_call|>[' }}"
        + CALLS
        + "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}{{- ', ' if not loop.last }}"
        + END
        + "{{- ']' }}",
        between=", ",
        after="]",
    ),
    "phi4_mini": Published(
        f'{{"name": "get_weather", "arguments": {JSON}}}',
        '{"name": "now", "arguments": {}}',
        # Earlier calls are texts of the assistant.
        "{#- <|tool|> <|/tool|> #}",
        before="functools[",
        between=", ",
        after="]",
    ),
    "tool_calls_list": Published(
        f'<tool_calls>[{{"name": "get_weather", "arguments": {JSON}}}',
        '{"name": "now", "arguments": {}}',
        "{{- '<tool_calls>[' }}"
        + CALLS
        + "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}{{- ', ' if not loop.last }}"
        + END
        + "{{- ']</tool_calls>' }}",
        between=", ",
        after="]</tool_calls>",
    ),
    "nemotron": Published(
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {JSON}}}',
        '{"name": "now", "arguments": {}}',
        "{{- '<TOOLCALL>[' }}"
        + CALLS
        + "{{- {'name': f.name, 'arguments': f.arguments} | tojson }}{{- ', ' if not loop.last }}"
        + END
        + "{{- ']</TOOLCALL>' }}",
        between=", ",
        after="]</TOOLCALL>",
    ),
    "harmony": Published(
        HARMONY_CALL,
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        """{%- set call = message.tool_calls[0].function %}
        {%- if message.content and message.thinking %}{{- raise_exception('one of both') }}{%- endif %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson }}{{- '<|call|>' }}""",
        between="",
        before="<|channel|>analysis<|message|>Hm.<|end|>",
        content="",
    ),
    "muse_glimmer": Published(
        ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        + elements('<atem:parameter name="{name}">{value}</atem:parameter>\n')
        + "</atem:invoke>\n</atem:function_calls><|eom|>",
        '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now.now">\n</atem:invoke>\n'
        "</atem:function_calls><|eot|>",
        "{%- set tag = 'atem:' %}{#- to=self -#}"
        + CALLS
        + "{{ '<|start|>assistant to=' + f.name + '<|message|><atem:function_calls>\n' }}"
        + INVOKE
        + "{{ '</atem:function_calls><|eom|>' }}"
        + END,
        between="",
        content="",
    ),
}
TEMPLATE = """{%- for message in messages %}
{%- if message.tool_calls %}{{- '<|im_start|>' + message.role + '|' }}CALLS{{- '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + message.role + '|' + (message.content or '') + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant|' }}{%- endif %}"""
