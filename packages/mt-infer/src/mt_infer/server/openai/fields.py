"""Fields of requests, with what they may be. A field that is not here is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(min_length=1, max_length=500)]
Stop = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """A JSON object whose fields are all known, of the types that they have in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class RequestBody(Body):
    """The body of a request; its text is Unicode that can be written."""

    refused: ClassVar[Mapping[str, str]] = {}
    """OpenAI's fields that this server cannot honour -> the reason."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_by_name(cls, value: Any) -> Any:
        for name, reason in cls.refused.items():
            if isinstance(value, dict) and value.get(name) is not None:
                raise ValueError(f"{name}: {reason}")
        # null is the default of every field, of those that are refused too.
        return (
            {name: entry for name, entry in value.items() if name not in cls.refused}
            if isinstance(value, dict)
            else value
        )

    @model_validator(mode="before")
    @classmethod
    def _refuse_surrogates(cls, value: Any) -> Any:
        try:
            # Half a surrogate pair is valid as a JSON escape, and cannot be encoded later by a tokenizer.
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the body has half of a surrogate pair, which is no character") from None
        except TypeError:
            # FastAPI hands over the bytes of a body of another type.
            raise ValueError('the body must be a JSON object, sent with "Content-Type: application/json"') from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return value


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool | None = None
    """Has no effect: no piece is padded."""


class IgnoredFields(RequestBody):
    """Fields of OpenAI's own service that change nothing in an answer. They are taken and have no effect."""

    user: str | None = None
    """This and the next seven are of the books and the caches of OpenAI's service."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    """`priority` orders requests."""
    store: bool | None = None


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the answer is: any text, any JSON object, or one of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        has_schema = self.json_schema is not None and self.json_schema.json_schema is not None
        if has_schema != (self.type == "json_schema"):
            raise ValueError('type "json_schema" comes with {"json_schema": {"schema": ...}}, and no other type does')
        return self


class StructuredOutputs(Body):
    """What the text has to match, in the form that vLLM has now in place of guided_*: one of the four."""

    json_schema: dict[str, Any] | None = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """In Lark's form."""
    choice: Annotated[list[Stop], Field(min_length=1, max_length=1000)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if sum(value is not None for value in (self.json_schema, self.regex, self.grammar, self.choice)) != 1:
            raise ValueError("give one of json (a schema), regex, grammar, choice")
        return self


class SamplingFields(IgnoredFields):
    """How tokens are chosen: OpenAI's fields, and those that other servers add. null is the default everywhere."""

    model: Name | None = None
    """Needed where the server has several."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Default: 1. 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """0 and -1 keep all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    """Answers. Default: 1."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | None = None
    """A JSON schema. This and the next three have the names that vLLM had before structured_outputs."""
    guided_regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    guided_grammar: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None
    """In Lark's form."""
    guided_choice: Annotated[list[Stop], Field(min_length=1, max_length=1000)] | None = None
    structured_outputs: StructuredOutputs | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_p_decay: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p_bound: Annotated[float, Field(ge=0, le=1)] | None = None
    """This and the one before are Megatron's: top_p is multiplied after each token, down to a bound."""
    bad_words: Annotated[list[Stop], Field(max_length=1000)] | None = None
    """Texts that the answer does not have, as vLLM encodes them: with a space before them, and without."""
    banned_token_ids: Annotated[list[TokenId], Field(max_length=10_000)] | None = None
    forced_tokens: Annotated[list[TokenId], Field(max_length=10_000)] | None = None
    """Ids that the answer begins with."""
    use_beam_search: bool | None = None
    """With n beams, of which all are returned."""
    length_penalty: Annotated[float, Field(ge=-30, le=30)] | None = None
    """Exponent of the length that divides a beam's score; this and early_stopping are those of transformers."""
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Likeliest tokens to report beside each token of the prompt. In vLLM's form; not in a stream."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Requests with a lower number are computed before others. Default: 0. The name is vLLM's."""

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is for answers in one piece; leave out stream")
        return self

    @model_validator(mode="after")
    def _options_of_beams(self) -> SamplingFields:
        if self.use_beam_search and (self.n or 1) < 2:
            raise ValueError("use_beam_search searches with n beams; give n=2 or more")
        if not self.use_beam_search and (self.length_penalty, self.early_stopping) != (None, None):
            raise ValueError("length_penalty and early_stopping are for use_beam_search=true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage
