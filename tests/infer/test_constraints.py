"""Text that is constrained matches, whatever the model, the tokenizer and the batch are."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from tests.infer.engines import configuration, engine_of, run, tokens_of

from mt_core.errors import ConfigError
from mt_core.interfaces import SpecialTokens
from mt_core.testing import run_ranks
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_data.tokenizers.null import NullConfig, NullTokenizer
from mt_infer.engine import InferenceEngine
from mt_infer.lockstep import LockstepEngine
from mt_infer.new_requests import NewSequences
from mt_infer.sampling.constraints import Constraints
from mt_infer.sampling.parameters import SamplingParameters

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "size": {"type": "integer", "maximum": 99, "minimum": 0},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = """
start: sum
sum: NUMBER ("+" NUMBER){1,3}
NUMBER: /[0-9]{1,3}/
"""
MODEL = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
PROMPT = list(b"Say: ")
ODD = ("\t", "a\r\n", "\x7f", "\x00\x1b", '"\\/.*|)', "#-~&")
"""Choices with characters that mean something in grammars, or stand for none."""


class PieceTokenizer:
    """Bytes, and pieces of several, so that a grammar's borders fall inside tokens."""

    pieces = (b'{"', b'":', b'", "', b"yes", b"no, ", b"12", b"+3", b'","size":', "é".encode())
    vocab_size = 256 + len(pieces) + 1
    special = SpecialTokens(eod=vocab_size - 1)

    def token_bytes(self) -> list[bytes | None]:
        return [*(bytes([byte]) for byte in range(256)), *self.pieces, None]

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes()[token] or b"" for token in ids).decode(errors="replace")


def engine(tokenizer: Any = None, **inference: Any) -> InferenceEngine:
    """A vocabulary that is larger than the tokenizer's."""
    tokenizer = tokenizer or PieceTokenizer()
    own = engine_of(configuration(MODEL, inference=inference), longest=128)
    return InferenceEngine(own.model, tokenizer, own.ctx, own.options, longest=128)


def requests(count: int, **constraint: Any) -> list[SamplingParameters]:
    return [SamplingParameters(seed=seed, max_tokens=90, **constraint) for seed in range(count)]


def texts(own: InferenceEngine, asked: Sequence[SamplingParameters]) -> list[str]:
    tokenizer: Any = own.tokenizer
    found = run(own, [PROMPT] * len(asked), asked)
    assert all(events[-1].finish == "stop" for events in found)
    return [tokenizer.decode(tokens_of(events)) for events in found]


def is_record(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "size"} and len(value["name"]) <= 5 and 0 <= value["size"] <= 99


CONSTRAINTS = [
    ({"json_schema": SCHEMA}, is_record),
    ({"json_schema": json.dumps(SCHEMA)}, is_record),
    ({"regex": r"(yes|no), [0-9]{2,4}é"}, re.compile(r"(yes|no), [0-9]{2,4}é").fullmatch),
    ({"grammar": GRAMMAR}, re.compile(r"[0-9]{1,3}(\+[0-9]{1,3}){1,3}").fullmatch),
    ({"choices": ("yes", "no", "élan")}, lambda text: text in ("yes", "no", "élan")),
    ({"choices": ODD}, lambda text: text in ODD),
]


@pytest.mark.parametrize(("constraint", "matches"), CONSTRAINTS, ids=lambda one: str(one)[:25])
@pytest.mark.parametrize("tokenizer", [PieceTokenizer, ByteLevelTokenizer])
def test_texts_match(tokenizer: Any, constraint: dict[str, Any], matches: Any) -> None:
    found = texts(engine(tokenizer()), requests(8, **constraint))
    assert all(matches(text) for text in found)
    assert len(set(found)) > 1


class CountedTokenizer(PieceTokenizer):
    """With as many ids as requested."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.special = vocab_size, SpecialTokens(eod=vocab_size - 1)

    def token_bytes(self) -> list[bytes | None]:
        others = [b"<%d>" % number for number in range(256 + len(self.pieces), self.vocab_size - 1)]
        return [*PieceTokenizer.token_bytes(self)[:-1], *others, None]


@pytest.mark.parametrize("vocab", [319, 320, 321])
@pytest.mark.parametrize("beside", [-1, 0, 1, 31, 32])
def test_masks_of_any_vocabulary(vocab: int, beside: int) -> None:
    """One id less than words of 32 bits hold, as many, and one more; a model with other logits than the tokenizer."""
    matcher = Constraints(CountedTokenizer(vocab)).matcher(SamplingParameters(choices=("yes", "12")))
    assert matcher is not None
    allowed = matcher.allowed((), vocab + beside)
    assert len(allowed) == vocab + beside
    expected = [ord("y"), ord("1"), 256 + PieceTokenizer.pieces.index(b"yes"), 256 + PieceTokenizer.pieces.index(b"12")]
    assert sorted(expected) == allowed.nonzero().flatten().tolist()
    # At the end of the text the last id of the tokenizer, and nothing behind it.
    matcher = Constraints(CountedTokenizer(vocab)).matcher(SamplingParameters(regex="y?"))
    assert matcher is not None
    matcher.advance(ord("y"))
    ends = matcher.allowed((), vocab + beside).nonzero().flatten().tolist()
    assert ends == ([vocab - 1] if beside >= 0 else [])


@pytest.mark.parametrize("vocab", [319, 320, 321])
def test_texts_match_in_any_vocabulary(vocab: int) -> None:
    own = engine_of(configuration({**MODEL, "vocab_size": vocab}), longest=128)
    own = InferenceEngine(own.model, CountedTokenizer(vocab), own.ctx, own.options, longest=128)
    assert all(text in ("yes", "no") for text in texts(own, requests(3, choices=("yes", "no"))))
    assert own.manager.used_blocks == 0


def test_requests_without_a_constraint_beside_it_are_as_alone() -> None:
    free, bound = SamplingParameters(seed=4, max_tokens=12), requests(1, choices=("yes", "no"))[0]
    together = run(engine(), [PROMPT] * 3, [free, bound, free])
    alone = run(engine(), [PROMPT], free)[0]
    assert tokens_of(together[0]) == tokens_of(together[2]) == tokens_of(alone)


@pytest.mark.slow
def test_preemption_and_speculation_change_nothing() -> None:
    asked = requests(8, json_schema=SCHEMA)
    expected = texts(engine(), asked)
    tight = engine(cache_memory_gb=0.000062, max_requests=8)
    assert texts(tight, asked) == expected
    assert tight.scheduler.preemptions > 0
    drafting = engine(speculative_method="ngram", speculative_ngram=1)
    assert texts(drafting, asked) == expected
    assert 0 < drafting.speculation.accepted < drafting.speculation.drafted


TOO_LARGE = [
    {"regex": "(a?){5000}a{5000}"},
    {"grammar": 'start: "a"{1000000}'},
    {"grammar": "start: A\nA: /(a|b)*c{1000}(a{1,1000}){1000}/", "logit_bias": {ord("c"): 1e6}},
]
"""The package accepts them, and gives up at a token of the text."""


def assert_it_ends_alone(own: InferenceEngine | LockstepEngine) -> None:
    """A request whose constraint is too large ends with an error, sequences and beams, and no other does."""
    free = SamplingParameters(seed=4, max_tokens=12)
    asked = [SamplingParameters(seed=1, n=2, max_tokens=90, **one) for one in TOO_LARGE]
    beams = SamplingParameters(seed=1, n=2, num_beams=2, max_tokens=90, regex=TOO_LARGE[0]["regex"])
    *ended, others = run(own, [PROMPT] * 5, [*asked, beams, free])
    for events in ended:
        last = [event for event in events if event.finish is not None]
        assert [(event.index, event.finish, event.token) for event in last] == [(0, "error", None), (1, "error", None)]
        assert all("cannot be followed any further" in str(event.error) for event in last)
    assert len(tokens_of(others)) == 12


@pytest.mark.parametrize("inference", [{}, {"speculative_method": "ngram", "speculative_ngram": 1}], ids=str)
def test_a_constraint_that_grows_too_large_ends_its_own_request(inference: dict[str, Any]) -> None:
    own = engine(**inference)
    assert_it_ends_alone(own)
    assert own.manager.used_blocks == 0


def ended_on_rank(rank: int, world: int) -> int:
    config = configuration(MODEL, parallel={"pipeline_model_parallel_size": world})
    own = engine_of(config, longest=128, collective=True)
    own.new_sequences = NewSequences(own.manager, PieceTokenizer(), 128)
    lockstep = LockstepEngine(own)
    if rank:
        lockstep.follow()
    else:
        assert_it_ends_alone(lockstep)
        lockstep.close()
    return own.manager.used_blocks


@pytest.mark.dist
@pytest.mark.slow
def test_a_stage_without_logits_ends_the_same_sequences() -> None:
    """It computes no masks: its matchers would find other sizes."""
    assert run_ranks(2, ended_on_rank) == [0, 0]


def test_beams_match_and_differ() -> None:
    """As many as there are: a constraint with two texts has two beams."""
    own, tokenizer = engine(), PieceTokenizer()
    events = run(own, [PROMPT], SamplingParameters(num_beams=3, n=3, max_tokens=9, choices=("yes", "no", "nein")))[0]
    found = [tokenizer.decode(tokens_of([one for one in events if one.index == index])) for index in range(3)]
    assert len(set(found)) >= 2
    assert set(found) <= {"yes", "no", "nein", ""}


@pytest.mark.parametrize(
    ("constraint", "tokenizer", "words"),
    [
        ({"json_schema": "{"}, PieceTokenizer(), "json_schema is not valid: Expecting property name"),
        ({"json_schema": {"type": "objekt"}}, PieceTokenizer(), "json_schema is not valid: Invalid type: objekt"),
        ({"regex": "a("}, PieceTokenizer(), "regex is not valid"),
        ({"grammar": "start: nothing"}, PieceTokenizer(), 'grammar is not valid: .* unknown name: "nothing"'),
        ({"regex": "a"}, NullTokenizer(NullConfig(vocab_size=300)), "with NullTokenizer, whose ids stand for no fixed"),
    ],
)
def test_constraints_that_are_none(constraint: dict[str, Any], tokenizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(tokenizer).add(PROMPT, SamplingParameters(**constraint))


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        ConfigError, match=r"choices needs the package llguidance; pip install 'mt-infer\[constrained\]'"
    ):
        engine().add(PROMPT, SamplingParameters(choices=("yes",)))


def test_stop_tokens_may_come_where_the_text_may_end() -> None:
    """A chat's answer ends with another token than a document."""
    matcher = Constraints(ByteLevelTokenizer()).matcher(SamplingParameters(regex="ab?"))
    assert matcher is not None
    end_of_turn = 257
    assert not matcher.allowed((), 261, (end_of_turn,))[end_of_turn]
    assert matcher.allowed((ord("a"),), 261, (end_of_turn,))[end_of_turn]
    assert not matcher.allowed((ord("a"),), 261)[end_of_turn]
