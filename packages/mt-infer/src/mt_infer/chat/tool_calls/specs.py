"""The forms that mt-infer registers. See docs/commands/serve.md for the models that have them."""

from __future__ import annotations

from mt_core.kinds import Lazy
from mt_infer.chat.tool_calls.form import ToolCallFormSpec

Marks = tuple[str, ...]


def _spec(name: str, doc: str, reference: str, *marks: Marks) -> ToolCallFormSpec:
    return ToolCallFormSpec(name=name, doc=doc, marks=marks, form=Lazy(f"mt_infer.chat.tool_calls.{reference}"))


FORMS = [
    _spec("hermes", '<tool_call>{"name", "arguments"}</tool_call>', "json_forms:HERMES", ("<tool_call>",)),
    _spec(
        "llama3_json",
        'the whole answer is {"name", "parameters"}',
        "json_forms:LLAMA3_JSON",
        ("<|python_tag|>",),
        ('"parameters"', "ipython"),
    ),
    _spec(
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>",
        "element_forms:QWEN3_CODER",
        ("<tool_call>", "<function="),
    ),
    _spec(
        "seed_oss",
        "<seed:tool_call><function=f><parameter=x>",
        "element_forms:SEED_OSS",
        ("<seed:tool_call>", "<function="),
    ),
    _spec("glm", "<tool_call>f<arg_key>x</arg_key><arg_value>", "element_forms:GLM", ("<tool_call>", "<arg_key>")),
    _spec(
        "hunyuan_v3",
        "<tool_calls><tool_call>f<tool_sep><arg_key>",
        "element_forms:HUNYUAN_V3",
        ("<tool_calls>", "<tool_sep>", "<arg_key>"),
    ),
    _spec(
        "longcat",
        "<longcat_tool_call>f<longcat_arg_key>",
        "element_forms:LONGCAT",
        ("<longcat_tool_call>", "<longcat_arg_key>"),
    ),
    _spec(
        "longcat_json",
        '<longcat_tool_call>{"name", "arguments"}',
        "json_forms:LONGCAT_JSON",
        ("<longcat_tool_call>",),
    ),
    _spec(
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"><parameter name="x">',
        "element_forms:MINIMAX_M2",
        ("<minimax:tool_call>", "<invoke"),
    ),
    _spec(
        "minimax_m3",
        "]<]minimax[>[<invoke>, arguments as nested tags",
        "element_forms:MINIMAX_M3",
        ("]<]minimax[>[", "<tool_call>", "<invoke"),
    ),
    _spec(
        "deepseek_v3",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f, a block of JSON",
        "json_forms:DEEPSEEK_V3",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "```json"),
    ),
    _spec(
        "deepseek_v31",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}",
        "json_forms:DEEPSEEK_V31",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    ),
    _spec(
        "deepseek_v32",
        "<｜DSML｜function_calls><｜DSML｜invoke name>",
        "element_forms:DEEPSEEK_V32",
        ("｜DSML｜", "function_calls"),
    ),
    _spec(
        "deepseek_v4",
        "<｜DSML｜tool_calls><｜DSML｜invoke name>",
        "element_forms:DEEPSEEK_V4",
        ("｜DSML｜", "｜tool_calls"),
    ),
    _spec(
        "kimi_k2",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}",
        "json_forms:KIMI_K2",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    ),
    _spec("mistral", "[TOOL_CALLS]f[ARGS]{...}", "json_forms:MISTRAL", ("[TOOL_CALLS]", "[ARGS]")),
    _spec("mistral_list", '[TOOL_CALLS][{"name", "arguments"}]', "json_forms:MISTRAL_LIST", ("[TOOL_CALLS]",)),
    _spec("gemma4", '<|tool_call>call:f{x:<|"|>text<|"|>}', "code_forms:GEMMA4", ("<|tool_call>", "call:")),
    _spec(
        "function_gemma",
        "<start_function_call>call:f{x:<escape>text<escape>}",
        "code_forms:FUNCTION_GEMMA",
        ("<start_function_call>", "call:"),
    ),
    _spec(
        "lfm2",
        "<|tool_call_start|>[f(x=1)]<|tool_call_end|>",
        "code_forms:LFM2",
        ("<|tool_call_start|>",),
        ("<|tool_list_start|>",),
        ("List of tools: [", "<|im_start|>"),
    ),
    _spec(
        "pythonic",
        "the whole answer is [f(x=1)]",
        "code_forms:PYTHONIC",
        ("[func_name1(", "func_name2(", "params_name1="),
    ),
    _spec("olmo3", "<function_calls>f(x=1)</function_calls>", "code_forms:OLMO3", ("<function_calls>",)),
    _spec("granite", '<|tool_call|>[{"name", "arguments"}]', "json_forms:GRANITE", ("<|tool_call|>",)),
    _spec(
        "phi4_mini",
        'functools[{"name", "arguments"}]',
        "json_forms:PHI4_MINI",
        ("<|tool|>", "<|/tool|>"),
    ),
    _spec(
        "tool_calls_list",
        '<tool_calls>[{"name", "arguments"}]</tool_calls>',
        "json_forms:TOOL_CALLS_LIST",
        ("<tool_calls>",),
    ),
    _spec("nemotron", '<TOOLCALL>[{"name", "arguments"}]</TOOLCALL>', "json_forms:NEMOTRON", ("<TOOLCALL>",)),
    _spec(
        "harmony",
        "<|channel|>commentary to=functions.f<|message|>{...}",
        "framed_forms:HARMONY",
        ("<|channel|>", "<|message|>", "commentary"),
    ),
    _spec(
        "muse_glimmer",
        " to=f<|message|><atem:function_calls><atem:invoke name>",
        "framed_forms:MUSE",
        ("<atem:function_calls>", "<|message|>", "to=self"),
    ),
]
