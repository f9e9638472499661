"""A model of mt as lm_eval's LM: log-likelihoods and texts, in any layout, from rank 0."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import chain, islice
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_data.datasets.text_files import bare_encoder
from mt_eval.scoring import Continuation, cut_to, require_decoder, score
from mt_eval.tasks import Journal, Sample
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.in_order import complete
from mt_infer.sampling.noise import request_seed
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.text import TextGenerator

LOG_LIKELIHOOD, IS_GREEDY, TEXT = "log_likelihood", "is_greedy", "text"
OnAnswer = Callable[[str, int, int], None]
"""(kind of request, number of answered ones, number of all)."""
Requests = Mapping[str, Instance]
"""By their keys in the journal."""


class HarnessModel(TemplateLM):
    """Encodes and cuts texts as lm_eval's `hf` model does, so that numbers agree request by request.

    journal: answers, each as soon as it is there; what it has already is not computed again. chat: for tasks with a
    chat template. add_bos: whether texts begin with BOS; default: as the tokenizer does it. seed: of texts that are
    sampled. Raises ConfigError for a model with an encoder, and for a tokenizer without a token that starts a text.
    """

    def __init__(
        self,
        generator: TextGenerator,
        journal: Journal,
        *,
        chat: ChatFormat | None = None,
        add_bos: bool | None = None,
        seed: int = 0,
        on_answer: OnAnswer = lambda kind, done, total: None,
    ) -> None:
        super().__init__()
        require_decoder(generator)
        self.generator, self.journal, self.chat = generator, journal, chat
        self.add_bos, self.seed, self.on_answer = add_bos, seed, on_answer
        self.max_length = generator.longest
        self.truncated: dict[str, set[int | None]] = defaultdict(set)
        """Task -> numbers of its documents of which the model was given less than there is."""
        # Without the tokens that a tokenizer puts around a text.
        self._bare = bare_encoder(generator.tokenizer)
        self._special_texts = _special_texts(generator)

    # -- tokens -----------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        special = self.generator.tokenizer.special
        end = special.eod if special.eod is not None else special.bos
        if end is None:
            raise ConfigError("the tokenizer has neither eod nor bos, one of which starts a text without a context")
        return end

    @property
    def prefix_token_id(self) -> int:
        bos = self.generator.tokenizer.special.bos
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """add_special_tokens: None leaves them out of a text that begins with that of BOS."""
        tokenizer = self.generator.tokenizer
        added = self.add_bos if add_special_tokens is None else add_special_tokens
        # A chat template writes BOS as text; encoding would put a second one before it. "\0": an empty text is a prefix
        # of all.
        if add_special_tokens is None and string.startswith(tokenizer.decode([self.prefix_token_id]) or "\0"):
            added = False
        if added is None:
            return list(tokenizer.encode(string))
        bare = list(self._bare(string))
        return [self.prefix_token_id, *bare] if added else bare

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of context and continuation, as in TemplateLM.loglikelihood: without a context the text follows BOS,
        unless it begins with it."""
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)

    # -- requests of lm_eval ----------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Natural logarithm of the continuation's probability, and whether each of its tokens is the likeliest."""
        answers = self._answers("loglikelihood", requests, self._log_likelihoods)
        return [(answer.values[LOG_LIKELIHOOD], bool(answer.values[IS_GREEDY])) for answer in answers]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the model's length that predict each token once."""
        answers = self._answers("loglikelihood_rolling", requests, self._rolling)
        return [answer.values[LOG_LIKELIHOOD] for answer in answers]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        answers = self._answers("generate_until", requests, self._texts)
        return [answer.details[TEXT] for answer in answers]

    def _answers(
        self, kind: str, requests: Sequence[Instance], answer: Callable[[Requests], Iterator[Sample]]
    ) -> list[Sample]:
        """Those of the journal, and those of `answer` for the rest, which go there."""
        # By content: one request that several tasks make is computed once.
        keys = request_keys(kind, requests)
        known = {sample.name: sample for sample in self.journal.samples(kind)}
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in known}
        total = len(set(keys))
        self.on_answer(kind, total - len(missing), total)
        # Lazy: each answer is in the journal before the next is waited for.
        for done, (key, result) in enumerate(zip(missing, answer(missing), strict=True), total - len(missing) + 1):
            known[key] = replace(result, name=key)
            self.journal.add(kind, known[key])
            self.on_answer(kind, done, total)
        # Answers of the journal count too, and several documents may share one answer.
        for key, request in zip(keys, requests, strict=True):
            if known[key].truncated:
                self.truncated[str(request.task_name)].add(request.doc_id)
        return [known[key] for key in keys]

    def _log_likelihoods(self, requests: Requests) -> Iterator[Sample]:
        windows = [self._window(request) for request in requests.values()]
        scores = score(self.generator, (continuation for continuation, _ in windows))
        for (_, truncated), scored in zip(windows, scores, strict=True):
            # fsum: without the rounding of thousands of additions.
            values = {LOG_LIKELIHOOD: math.fsum(scored.logprobs), IS_GREEDY: float(all(scored.is_greedy))}
            yield Sample("", values, truncated=truncated)

    def _window(self, request: Instance) -> tuple[Continuation, bool]:
        """Raises DataError for a continuation without tokens, or with more than the model has positions."""
        context, continuation = self._pair(*request.args)
        # The last token is only a target, so that max_length targets fit behind one token of context.
        if not 1 <= len(continuation) <= self.max_length:
            raise DataError(
                f"task {request.task_name}, document {request.doc_id}: the continuation has {len(continuation)} tokens;"
                f" it must have from 1 to {self.max_length}, which the model has positions for"
            )
        return cut_to(self.max_length, Continuation([*context, *continuation], len(context)))

    def _rolling(self, requests: Requests) -> Iterator[Sample]:
        windows = [list(self._windows(*request.args)) for request in requests.values()]
        scores = score(self.generator, chain.from_iterable(windows))
        for text_windows in windows:
            logprobs = (value for scored in islice(scores, len(text_windows)) for value in scored.logprobs)
            yield Sample("", {LOG_LIKELIHOOD: math.fsum(logprobs)})

    def _windows(self, text: str) -> Iterator[Continuation]:
        # context_len=1: a window begins with the last token of the one before; each token is predicted once.
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
        for context, continuation in map(make_disjoint_window, windows):
            yield Continuation([*context, *continuation], len(context))

    def _texts(self, requests: Requests) -> Iterator[Sample]:
        prompts = [self._prompt(key, request) for key, request in requests.items()]
        done = complete(self.generator, ((tokens, sampling, {}) for tokens, sampling, _ in prompts))
        for (_, _, truncated), completion in zip(prompts, done, strict=True):
            yield Sample("", details={TEXT: self._shown(completion.text)}, truncated=truncated)

    def _prompt(self, key: str, request: Instance) -> tuple[list[int], SamplingParameters, bool]:
        """The end of the context that leaves enough positions for the text, and whether it is all. Raises ConfigError
        for a text that is as long as the model's sequences."""
        context, gen_kwargs = request.args
        # The seed follows from the request, so that an interrupted evaluation samples the same texts when it goes on.
        sampling = sampling_of(gen_kwargs, request_seed(self.seed, int(key[:8], 16)))
        left = self.max_length - sampling.max_tokens
        if left < 1:
            raise ConfigError(
                f"task {request.task_name}: max_gen_toks={sampling.max_tokens} leaves no position for a context; the "
                f"model has {self.max_length} positions: give fewer with --gen-kwargs max_gen_toks=N"
            )
        if self.chat is not None:
            stop_token_ids = (*sampling.stop_token_ids, *self.chat.stop_token_ids)
            sampling = replace(sampling, stop=(*sampling.stop, *self.chat.stop), stop_token_ids=stop_token_ids)
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        # The end of the context is kept: the question is behind the examples.
        return tokens[-left:], sampling, len(tokens) > left

    def _shown(self, text: str) -> str:
        """Without special tokens, as `hf` decodes."""
        for special in self._special_texts:
            text = text.replace(special, "")
        return text

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """What remains of TemplateLM's interface: of ((context, continuation), their ids)."""
        windows = [
            cut_to(self.max_length, Continuation([*before, *ids], len(before)))[0] for _, before, ids in requests
        ]
        return [(math.fsum(scored.logprobs), all(scored.is_greedy)) for scored in score(self.generator, windows)]

    # -- chats ------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        return self.generator.tokenizer.fingerprint()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self.chat is None else self.chat.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """add_generation_prompt: False lets the last message go on. Raises DataError for messages that the template
        refuses."""
        assert self.chat is not None, "lm_eval applies a template where one is given"
        text = self.chat.render(chat_history, None, {"add_generation_prompt": add_generation_prompt})
        if add_generation_prompt:
            return text
        # The template writes more behind the last message (an end of turn), which is cut: the model is to go on with
        # it.
        last = chat_history[-1]["content"].strip()
        return text[: text.rindex(last) + len(last)]


def request_keys(kind: str, requests: Sequence[Instance]) -> list[str]:
    """A hash of each request. Texts that are generated several times from one request have keys of their own."""
    seen: dict[str, int] = defaultdict(int)
    keys = []
    for request in requests:
        content = json.dumps([kind, *request.args], sort_keys=True)
        # Log-likelihoods of equal requests are equal; repeated texts (pass@k) have to be drawn anew.
        number = seen[content] if kind == "generate_until" else 0
        seen[content] += 1
        keys.append(sha256(f"{number} {content}".encode()).hexdigest())
    return keys


def _special_texts(generator: TextGenerator) -> list[str]:
    special = generator.tokenizer.special
    ids = {special.eod, special.bos, special.eos, special.pad, special.mask, special.cls, special.sep}
    return sorted(text for token in ids if token is not None and (text := generator.tokenizer.decode([token])))


# -- sampling parameters of a task -------------------------------------------------------------------

MAX_GEN_TOKS = 256
"""lm_eval's default for tasks that do not say."""
OF_HARNESS = ("until", "do_sample", "max_gen_toks", "temperature")
RENAMED = {"min_new_tokens": "min_tokens"}
"""transformers' word -> the engine's."""
SAME_NAME = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "num_beams",
    "length_penalty",
    "early_stopping",
)


def sampling_of(gen_kwargs: Mapping[str, Any], seed: int) -> SamplingParameters:
    """Greedy, unless `do_sample` or a temperature above 0 is given. The end of a document ends a text too.

    Raises ConfigError for a keyword that the engine has not, and for values that it does not take.
    """
    try:
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), MAX_GEN_TOKS)}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"gen_kwargs: {error}; check their values in --gen-kwargs") from error
    # normalize_gen_kwargs always sets do_sample, until and max_gen_toks.
    is_sampled, temperature = kwargs.pop("do_sample"), kwargs.pop("temperature", 1.0)
    # An empty stop text would end every answer before it begins.
    stop = tuple(text for text in kwargs.pop("until") if text)
    max_tokens = kwargs.pop("max_gen_toks")
    named: dict[str, Any] = {RENAMED.get(name, name): value for name, value in kwargs.items()}
    for name in named:
        if name not in (*SAME_NAME, *RENAMED.values()):
            known = [*OF_HARNESS, *RENAMED, *SAME_NAME]
            raise ConfigError(
                f"gen_kwargs: {name}{did_you_mean(name, known)} is no option of the engine; it has {', '.join(known)}"
            )
    temperature = temperature if is_sampled else 0.0
    return SamplingParameters(temperature=temperature, max_tokens=max_tokens, stop=stop, seed=seed, **named)
