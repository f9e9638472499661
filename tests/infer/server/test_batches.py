"""Files and batches, by the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from tests.infer.server.served import Live, language_model, live, openai_client, scripted_model, until

from mt_infer.server.options import ServerOptions

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

CHAT = "/v1/chat/completions"


def chat_body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"hi {number}"}]
    return {"model": "alpha", "messages": messages, "max_tokens": 4, "temperature": 0}


def line(name: str, body: Any, url: str = CHAT, method: str = "POST") -> str:
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body})


def upload(client: openai.OpenAI, lines: Sequence[str]) -> str:
    content = "\n".join(lines).encode()
    return client.files.create(file=("requests.jsonl", content), purpose="batch").id


def finished(client: openai.OpenAI, lines: Sequence[str], endpoint: Any = CHAT) -> Batch:
    made = client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
    )
    assert until(lambda: client.batches.retrieve(made.id).status in ("completed", "failed"))
    return client.batches.retrieve(made.id)


def rows(client: openai.OpenAI, number: str | None) -> dict[str, Any]:
    assert number is not None
    return {row["custom_id"]: row for row in map(json.loads, client.files.content(number).text.splitlines())}


@pytest.fixture(scope="module")
def client(served: Live) -> openai.OpenAI:
    return openai_client(served)


def test_a_batch_has_the_answers_of_its_requests(client: openai.OpenAI, served: Live) -> None:
    lines = [line(f"n{number}", chat_body(number)) for number in range(40)]
    lines.insert(3, line("wrong", {**chat_body(0), "max_tokens": 999}))
    done = finished(client, lines)
    assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 40, 1)
    assert (done.metadata, done.endpoint) == ({"a": "b"}, CHAT)
    answers = rows(client, done.output_file_id)
    assert set(answers) == {f"n{number}" for number in range(40)}
    for number in (0, 7, 39):
        _, alone = served.call(CHAT, chat_body(number))
        assert answers[f"n{number}"]["response"]["status_code"] == 200
        assert answers[f"n{number}"]["response"]["body"]["choices"] == alone["choices"]
    failures = rows(client, done.error_file_id)
    assert "context is 256" in failures["wrong"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": "alpha", "prompt": "x", "max_tokens": 2}),
        ("/v1/embeddings", {"model": "bert", "input": "x"}),
        ("/v1/responses", {"model": "alpha", "input": "x", "max_output_tokens": 2}),
    ],
)
def test_batches_of_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    done = finished(client, [line("one", body, endpoint)], endpoint)
    assert rows(client, done.output_file_id)["one"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "JSON"),
        ([line("a", chat_body(0)).replace("{", '{"custom_id": "b", ', 1)], "'custom_id' stands twice"),
        ([line("a", chat_body(0)), line("a", chat_body(1))], "another line"),
        ([line("a", chat_body(0), "/v1/completions")], "the batch is for"),
        ([line("a", chat_body(0), method="GET")], "method"),
        ([line("a", {**chat_body(0), "stream": True})], "stream"),
        ([""], "no line"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_is_no_batch_fails(client: openai.OpenAI, lines: list[str], words: str) -> None:
    done = finished(client, lines)
    assert (done.status, words in done.errors.data[0].message) == ("failed", True)
    assert done.output_file_id is None


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    import openai

    numbers = [upload(client, [str(number)]) for number in range(3)]
    assert [file.id for file in client.files.list(limit=2)][:3] == numbers[::-1]  # over pages
    assert [file.id for file in client.files.list(order="asc", after=numbers[0])] == numbers[1:]
    found = client.files.retrieve(numbers[0])
    assert (found.filename, found.bytes, found.purpose) == ("requests.jsonl", 1, "batch")
    assert client.files.delete(numbers[0]).deleted
    for read in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            read(numbers[0])
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=numbers[0], endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="fine-tune")


def test_a_batch_is_cancelled_and_its_requests_with_it() -> None:
    import openai

    model = scripted_model("ab", forever=True)
    with live([model], ServerOptions(api_key="secret", max_files_bytes=100_000)) as served:
        client = openai_client(served, api_key="secret")
        lines = [line(f"n{number}", {"prompt": "x"}, "/v1/completions") for number in range(50)]
        made = client.batches.create(
            input_file_id=upload(client, lines), endpoint="/v1/completions", completion_window="24h"
        )
        assert until(lambda: len(model.generator._open) == 32)
        assert [batch.id for batch in client.batches.list()] == [made.id]
        client.batches.cancel(made.id)
        assert until(lambda: client.batches.retrieve(made.id).status == "cancelled")
        assert until(lambda: model.generator.is_idle)
        assert served.service._open == 0
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(made.id)
        with pytest.raises(openai.APIStatusError, match="100000 bytes"):
            upload(client, ["x" * 100_000])


def test_requests_of_clients_come_before_those_of_a_batch() -> None:
    model = language_model("alpha", 1)
    seen: list[int] = []
    with live([model]) as served:
        real = model.generator.submit

        def submit(prompt: Any, sampling: Any, inputs: Any, adapter: Any = None) -> int:
            seen.append(sampling.priority)
            return real(prompt, sampling, inputs)

        model.generator.submit = submit  # type: ignore[method-assign]
        finished(openai_client(served), [line("a", chat_body(0)), line("b", {**chat_body(1), "priority": 3})])
        served.call(CHAT, chat_body(0))
    assert sorted(seen) == [0, 3, 1 << 20]
