"""The page at / in a real browser: Debian's chromium, or the one that playwright has installed."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infer.server.served import Live, chat_format, live, scripted_model, until

from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.server.served_model import ServedModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.long]
NAMES = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    with playwright.sync_playwright() as started:
        if program is None and not Path(started.chromium.executable_path).exists():
            pytest.skip("no chromium: apt-get install chromium, or uv run playwright install chromium")
        # Chromium's sandbox does not start for root, as which containers run.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = started.chromium.launch(executable_path=program, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Browser, served: Live) -> Iterator[Page]:
    """Fails on any message of the console, such as one about the Content-Security-Policy."""
    context = browser.new_context(viewport=DESKTOP)
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: complaints.append(request.url) if "//127.0.0.1:" not in request.url else None)
    opened.goto(served.url)
    opened.wait_for_selector(".pane >> nth=1")
    yield opened
    context.close()
    ignored = ("data:", "Failed to load resource: the server responded with a status of 400")
    assert [complaint for complaint in complaints if not complaint.startswith(ignored)] == []


def wait_for_the_end(page: Page) -> None:
    page.wait_for_selector("#send:not([hidden])")


def test_two_models_side_by_side_by_keyboard(page: Page) -> None:
    page.check("#probabilities")
    page.fill("#max_tokens", "12")
    page.fill("#seed", "1")
    page.fill("#system", "be brief")
    page.focus("#input")
    page.keyboard.type("Hello")
    page.keyboard.press("Enter")
    wait_for_the_end(page)
    assert page.locator(".pane h2").all_inner_texts()[0].startswith("alpha")
    assert page.locator(".turn.user").all_inner_texts() == ["Hello", "Hello"]
    answers = page.locator(".turn.assistant")
    assert answers.count() == 2
    assert all("(length)" in text for text in answers.all_inner_texts())
    # One stop of the tabulator for an answer, arrow keys between its tokens.
    first = answers.first.locator(".token")
    assert [token.get_attribute("tabindex") for token in first.all()].count("0") == 1
    first.first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert page.locator("#tip").is_visible()
    assert page.locator("#tip tr").count() >= 5
    assert page.locator("#tip tr.chosen").count() >= 1
    assert 0 < float(first.first.evaluate("token => token.style.getPropertyValue('--p')")) < 1
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    first.nth(2).hover()
    assert page.locator("#tip").is_visible()
    # A second question goes with the first and its answer.
    with page.expect_request("**/v1/chat/completions") as asked:
        page.fill("#input", "And?")
        page.press("#input", "Enter")
    roles = [message["role"] for message in asked.value.post_data_json["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    wait_for_the_end(page)


def test_stopping(page: Page) -> None:
    model = scripted_model("ab ", forever=True)
    with live([model]) as endless:
        page.goto(endless.url)
        page.wait_for_selector("[aria-selected=true] >> text=Completion")  # it has no chat template
        page.fill("#input", "Once")
        page.press("#input", "Control+Enter")
        page.wait_for_selector(".turn.assistant:has-text('ab ab')")
        page.keyboard.press("Escape")
        page.wait_for_selector(".turn.assistant:has-text('(stopped)')")
        wait_for_the_end(page)
        page.press("#input", "Control+Enter")
        page.wait_for_selector(".turn.assistant >> nth=1")
        page.click("#stop")
        wait_for_the_end(page)
        assert page.locator(".turn.assistant").first.inner_text().startswith("Once")
        assert until(lambda: model.generator.cancelled == [1, 2])


MARKDOWN = """# A head

Some **bold**, *slanted* and `code <b>`.

1. one
2. two
   - inner

```python
print("<script>")
```

| a | b |
|---|--:|
| 1 | 2 |

[good](https://example.org) [bad](javascript:alert(1)) [data](data:text/html,x) [file](file:///etc/passwd)

![picture](https://example.org/x.png) <img src=x onerror="document.title='broken'">
<script>document.title='broken'</script>
<a href="javascript:document.title='broken'">click</a> <svg onload="document.title='broken'">
"""


def test_answers_are_markdown_without_any_harm(page: Page) -> None:
    with live([scripted_model(MARKDOWN, chat=chat_format())]) as served:
        page.goto(served.url)
        page.wait_for_selector("#panes .pane")
        page.fill("#max_tokens", "1000")
        page.fill("#input", "Write")
        page.press("#input", "Enter")
        answer = page.locator(".turn.assistant .markdown")
        answer.get_by_text("click").wait_for()
        wait_for_the_end(page)
        assert answer.locator("h1").inner_text() == "A head"
        assert answer.locator("strong").inner_text() == "bold"
        assert answer.locator("p > code").first.inner_text() == "code <b>"
        assert answer.locator("ol > li").count() == 2
        assert answer.locator("ol ul > li").inner_text() == "inner"
        assert answer.locator("pre code").inner_text() == 'print("<script>")\n'
        assert answer.locator("td.right").inner_text() == "2"
        links = answer.locator("a").all()
        assert [link.get_attribute("href") for link in links] == ["https://example.org", "https://example.org/x.png"]
        assert {link.get_attribute("rel") for link in links} == {"noopener noreferrer"}
        assert answer.locator("img, script, svg, [style], [onerror], [onload]").count() == 0
        assert "<script>document.title" in answer.inner_text()
        assert page.title() == "mt"
        # The conversation goes on with the text and not with what is shown.
        with page.expect_request("**/v1/chat/completions") as asked:
            page.fill("#input", "Again")
            page.press("#input", "Enter")
        assert asked.value.post_data_json["messages"][1]["content"] == MARKDOWN
        wait_for_the_end(page)


THINKING = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '|' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content + '<|im_end|>' }}{% endfor %}{{ '<|im_start|>assistant|' }}"""


def test_reasoning_is_folded_up_before_the_answer(page: Page) -> None:
    """As it comes, behind it, and when it is stopped; sent back as the model wrote it, without what the page adds."""
    chat = ChatFormat(ChatTemplate("thinking", THINKING, {}, eod_after_answer=False), ByteLevelTokenizer())
    with live([scripted_model("<think>\nHm <b>*so*</b>.\n</think>\n\nA **yes**.", chat=chat)]) as served:
        page.goto(served.url)
        page.wait_for_selector("#panes .pane")
        page.fill("#input", "Is it?")
        page.press("#input", "Enter")
        page.locator(".turn.assistant .markdown strong").wait_for()
        wait_for_the_end(page)
        turn, thought = page.locator(".turn.assistant"), page.locator(".turn.assistant details.thought")
        assert turn.locator(".markdown").inner_text() == "A yes."
        assert (thought.locator("summary").inner_text(), thought.get_attribute("open")) == ("Reasoning", None)
        assert thought.locator("div").is_hidden()
        # The answer is behind the reasoning, and does not move when that is opened by keyboard.
        assert turn.evaluate("turn => [...turn.children].map((child) => child.className)") == ["thought", "markdown"]
        thought.locator("summary").press("Enter")
        assert thought.locator("div").is_visible()
        assert thought.locator("div").inner_text().strip() == "Hm <b>*so*</b>."
        with page.expect_request("**/v1/chat/completions") as asked:
            page.fill("#input", "Sure?")
            page.press("#input", "Enter")
        answer = asked.value.post_data_json["messages"][1]
        assert (answer["content"], answer["reasoning_content"].strip()) == ("A **yes**.", "Hm <b>*so*</b>.")
        wait_for_the_end(page)
        assert page.locator("details.thought").count() == 2
        # The probability of the answer's first token is its own, without those of the reasoning and its marks.
        page.check("#probabilities")
        page.fill("#input", "Again?")
        page.press("#input", "Enter")
        page.wait_for_selector(".turn.assistant >> nth=2 >> .token:has-text('s')")
        wait_for_the_end(page)
        labels = [token.get_attribute("aria-label") for token in turn.nth(2).locator(".token").all()]
        assert labels == [f"{letter}: 60.7 %" for letter in "A **yes**."]
    with live([scripted_model("<think>" + "so " * 600, chat=chat)]) as served:
        page.goto(served.url)
        page.wait_for_selector("#panes .pane")
        page.fill("#input", "Is it?")
        page.press("#input", "Enter")
        page.wait_for_selector("details.thought summary:has-text('Thinking')")
        page.keyboard.press("Escape")
        page.wait_for_selector(".turn.assistant:has-text('(stopped)')")
        wait_for_the_end(page)
        assert page.locator("details.thought div").text_content().startswith("so so")
        assert page.locator(".turn.assistant .markdown").inner_text() == ""
    chat.close()


def test_an_error_is_shown(page: Page) -> None:
    page.fill("#max_tokens", "9999")
    page.select_option("#second", "")
    page.fill("#input", "Once")
    page.press("#input", "Enter")
    page.wait_for_selector(".turn.error")
    assert "context is 256" in page.locator(".turn.error").inner_text()
    assert page.locator(".pane").count() == 1


DROP = """([bytes, kind]) => {
  const file = new File([Uint8Array.from(bytes)], kind + ".png", { type: "image/png" });
  const data = new DataTransfer();
  data.items.add(file);
  const event = kind === "drop"
    ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
    : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
  document.querySelector(kind === "drop" ? "main" : "#input").dispatchEvent(event);
}"""


def test_images_are_chosen_dropped_and_pasted(page: Page) -> None:
    from tests.infer.server.test_images import new_llava, picture, png

    model = ServedModel("llava", 0, new_llava(), chat=chat_format())
    with live([model, scripted_model("ok", chat=chat_format())]) as served:
        page.goto(served.url)
        page.wait_for_selector("#attach:not([hidden])")
        page.fill("#max_tokens", "4")
        files = [png(picture(seed)) for seed in range(3)]
        with page.expect_file_chooser() as chosen:
            page.press("#attach", "Enter")
        chosen.value.set_files(
            [
                {"name": "chosen.png", "mimeType": "image/png", "buffer": files[0]},
                {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"text"},
            ]
        )
        page.wait_for_selector("#notice:has-text('notes.txt: images are PNG, JPEG, WebP or GIF')")
        for content, kind in zip(files[1:], ("drop", "paste"), strict=True):
            page.evaluate(DROP, [list(content), kind])
            page.wait_for_selector(f"#attached img[alt='{kind}.png']")
        page.get_by_role("button", name="Remove drop.png").press("Enter")
        assert page.locator("#attached img").count() == 2
        with page.expect_request("**/v1/chat/completions") as asked:
            page.keyboard.type("What is it?")
            page.keyboard.press("Enter")
        wait_for_the_end(page)
        (message,) = asked.value.post_data_json["messages"]
        *images, text = message["content"]
        sent = [base64.b64decode(part["image_url"]["url"].removeprefix("data:image/png;base64,")) for part in images]
        assert (sent, text) == ([files[0], files[2]], {"type": "text", "text": "What is it?"})
        assert page.locator(".pane").first.locator(".turn.user img").count() == 2
        assert page.locator("#attached img").count() == 0
        assert page.locator(".pane").first.locator(".turn.error").count() == 0
        # A model of text alone has no images to attach.
        page.select_option("#model", "scripted")
        page.select_option("#second", "")
        assert page.locator("#attach").is_hidden()


def test_it_fits_a_phone(page: Page) -> None:
    page.set_viewport_size(PHONE)
    assert page.locator("#settings").is_hidden()
    page.click("#settings-toggle")
    assert page.locator("#temperature").is_visible()
    page.fill("#max_tokens", "8")
    page.click("#settings-toggle")
    page.fill("#input", "Hello " * 30)
    page.click("#send")
    wait_for_the_end(page)
    assert page.locator(".turn.assistant").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#send").bounding_box()["y"] < PHONE["height"]


def test_the_policy_lets_only_its_own_script_and_style_run(served: Live) -> None:
    import urllib.request

    with urllib.request.urlopen(served.url) as response:
        policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 3
