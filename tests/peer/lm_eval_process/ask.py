"""Run by lm_eval's environment: local-completions against a server; prints its answers as JSON.

Arguments: address, model, folder of the tokenizer, file of [context, continuation] pairs, file of contexts to continue.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, name, tokenizer, pairs, contexts = sys.argv[1:]
model = LocalCompletionsAPI(
    model=name,
    base_url=f"{url}/v1/completions",
    tokenizer=tokenizer,
    tokenizer_backend="huggingface",
    max_length=256,
    batch_size=3,
    num_concurrent=2,
)


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


scored = model.loglikelihood(instances("loglikelihood", [tuple(pair) for pair in json.loads(Path(pairs).read_text())]))
texts = json.loads(Path(contexts).read_text())
rolling = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,) for text in texts]))
settings = {"until": ["e"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
generated = model.generate_until(instances("generate_until", [(text, settings) for text in texts]))
print(json.dumps({"scored": scored, "rolling": rolling, "generated": generated}))
