"""An answer as it comes, divided into what the model thinks, what it says, and the tools that it calls.

Text that turns out to be no call is content: nothing of an answer is lost but the marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from mt_infer.chat.reasoning import ReasoningMarks
from mt_infer.chat.tool_calls.form import BodyKind, CallForm, Function, MessageFrame, Schemas, ToolCall
from mt_infer.chat.tool_calls.reading import skip_space
from mt_infer.detokenizer import length_of_beginning

MAYBE = -1
"""The text may go on to be what it is compared with."""
LONGEST_HEADER = 500


@dataclass
class AnswerPart:
    """What is new in an answer, and final."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def __iadd__(self, other: AnswerPart) -> AnswerPart:
        self.reasoning += other.reasoning
        self.content += other.content
        self.calls += other.calls
        return self


class Divider(Protocol):
    """A stage that takes text and gives what is certain."""

    def add(self, text: str, *, is_end: bool) -> AnswerPart: ...


class AnswerParser:
    """Divides one answer. form, reasoning: of the model's template; None: there is no such thing in its answers.
    functions: which the model may call; without them no call is looked for. is_thinking: the prompt has opened the
    reasoning already.
    """

    def __init__(
        self,
        form: CallForm | None,
        reasoning: ReasoningMarks | None = None,
        functions: Sequence[Function] = (),
        *,
        takes_calls: bool = True,
        is_thinking: bool = False,
    ) -> None:
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        self._stages: list[Divider] = []
        if form is not None and form.frame is not None:
            self._stages = [FrameDivider(form.frame, schemas)]
            return
        if reasoning is not None:
            self._stages.append(ReasoningDivider(reasoning, is_thinking=is_thinking))
            if reasoning.answer is not None:
                self._stages.append(MarkRemover(reasoning.answer))
        if form is not None and takes_calls:
            self._stages.append((WholeAnswerDivider if form.at_start else CallDivider)(form, schemas))

    def add(self, text: str) -> AnswerPart:
        """What is certain with this text."""
        return self._through(text, is_end=False)

    def finish(self) -> AnswerPart:
        """The rest."""
        return self._through("", is_end=True)

    def _through(self, text: str, *, is_end: bool) -> AnswerPart:
        """Each stage divides the content of the one before."""
        part = AnswerPart(content=text)
        for stage in self._stages:
            text, part.content = part.content, ""
            part += stage.add(text, is_end=is_end)
        return part


class ReasoningDivider:
    """Text between the marks is reasoning, if the answer begins with it; line breaks beside the marks are dropped."""

    def __init__(self, marks: ReasoningMarks, *, is_thinking: bool) -> None:
        self._marks, self._held = marks, ""
        self._is_thinking: bool | None = True if is_thinking else None
        """None: not decided; False: the reasoning is over."""
        self._drops_space = is_thinking

    def add(self, text: str, *, is_end: bool) -> AnswerPart:
        self._held += text
        part = AnswerPart()
        if self._is_thinking is None:
            self._decide(is_end=is_end)
        # In this order: what follows the reasoning may come with the same text.
        if self._is_thinking:
            part.reasoning = self._reasoning(is_end=is_end)
        if self._is_thinking is False:
            part.content = self._content()
        return part

    def _decide(self, *, is_end: bool) -> None:
        start, mark = self._held.lstrip(), self._marks.open.rstrip()
        if start.startswith(mark):
            self._held, self._is_thinking, self._drops_space = start[len(mark) :], True, True
        elif is_end or not mark.startswith(start):
            self._is_thinking = False

    def _reasoning(self, *, is_end: bool) -> str:
        if self._drops_space:
            self._held = self._held.lstrip("\n")
            self._drops_space = not self._held
        place = self._held.find(self._marks.close)
        if place >= 0:
            reasoning, self._held = self._held[:place], self._held[place + len(self._marks.close) :]
            self._is_thinking, self._drops_space = False, True
            return reasoning.rstrip("\n")
        # Line breaks before the closing mark are dropped, so that they wait for what follows them.
        keep = len(self._held) if is_end else len(self._held) - length_of_beginning(self._marks.close, self._held)
        keep = len(self._held[:keep].rstrip("\n"))
        reasoning, self._held = self._held[:keep], self._held[keep:]
        return reasoning

    def _content(self) -> str:
        if self._drops_space:
            self._held = self._held.lstrip("\n")
            self._drops_space = not self._held
        content, self._held = self._held, ""
        return content


class MarkRemover:
    """Removes the marks around what is said, with the line breaks inside of them."""

    def __init__(self, marks: tuple[str, str]) -> None:
        self._open, self._close = marks
        self._held = ""
        self._begun = False

    def add(self, text: str, *, is_end: bool) -> AnswerPart:
        self._held += text
        if not self._begun and not self._begin(is_end=is_end):
            return AnswerPart()
        place = self._held.find(self._close)
        if place >= 0:
            self._held = self._held[:place].rstrip("\n") + self._held[place + len(self._close) :]
        keep = len(self._held)
        if not is_end:
            keep -= length_of_beginning(self._close, self._held)
        # Line breaks wait: behind the last text they are dropped.
        keep = len(self._held[:keep].rstrip("\n"))
        content, self._held = self._held[:keep], self._held[keep:]
        return AnswerPart(content=content)

    def _begin(self, *, is_end: bool) -> bool:
        """Whether the beginning is decided."""
        start = self._held.lstrip()
        if start.startswith(self._open):
            inside = start[len(self._open) :].lstrip("\n")
            if not inside and not is_end:
                return False
            self._held = inside
        elif self._open.startswith(start) and not is_end:
            return False
        self._begun = True
        return True


# -- calls within the text -------------------------------------------------------------------------


@dataclass(frozen=True)
class Opening:
    """Marks one after another with which a call begins, white space between them or none: that of the section, of the
    call, and what follows. call_index: which of them is the call's."""

    marks: tuple[str, ...]
    call_index: int

    def begin(self, text: str, start: int) -> int | None:
        """Where the call's own mark is, if the marks begin at a place; MAYBE where the text ends within them."""
        place, begin = start, start
        for number, mark in enumerate(self.marks):
            if number:
                place = skip_space(text, place)
            if not text.startswith(mark, place):
                return MAYBE if mark.startswith(text[place:]) else None
            begin = place if number == self.call_index else begin
            place += len(mark)
        return begin


def openings_of(form: CallForm) -> list[Opening]:
    """Those with the mark of the section are the first ones."""
    sections: list[tuple[str, ...]] = [form.section[:1], ()] if form.section else [()]
    follows: list[tuple[str, ...]] = [(text,) for text in form.then] or [()]
    marks = (form.begin, *form.also)
    return [
        Opening((*section, mark, *follow), len(section)) for section in sections for mark in marks for follow in follows
    ]


class CallDivider:
    """Finds calls in a text, each as soon as it is complete."""

    def __init__(self, form: CallForm, schemas: Schemas) -> None:
        self.form, self.schemas = form, schemas
        self._held = ""
        self._is_behind_call = False
        self._openings = openings_of(form)
        self._marks_behind = (*form.after, *form.section[1:]) if form.section else form.after

    def add(self, text: str, *, is_end: bool) -> AnswerPart:
        self._held += text
        part = AnswerPart()
        while self._step(part, is_end=is_end):
            pass
        return part

    def _step(self, part: AnswerPart, *, is_end: bool) -> bool:
        """Takes content, or a call; False where more text is needed."""
        if self._is_behind_call and not self._drop_marks(is_end=is_end):
            return False
        place, begin = self._opening(is_end=is_end)
        part.content += self._held[:place]
        self._held = self._held[place:]
        if not self._held or begin is None:
            return False
        reading = self.form.read(self._held[begin - place :], self.schemas, is_end)
        if reading is not None:
            part.calls += reading[0]
            self._held = self._held[begin - place + reading[1] :]
            self._is_behind_call = True
        elif is_end:
            # The mark begins no call.
            part.content += self._held[0]
            self._held = self._held[1:]
        return reading is not None or is_end

    def _opening(self, *, is_end: bool) -> tuple[int, int | None]:
        """Where a call begins or may begin, and the place of its own mark; None: more text decides. The end of the
        text: nowhere."""
        firsts = {opening.marks[0] for opening in self._openings}
        place = 0
        while (place := min(next_place(self._held, first, place, is_end=is_end) for first in firsts)) < len(self._held):
            begins = [opening.begin(self._held, place) for opening in self._openings]
            certain = [begin for begin in begins if begin is not None and begin != MAYBE]
            if certain:
                return place, certain[0]
            if MAYBE in begins and not is_end:
                return place, None
            place += 1
        return place, None

    def _drop_marks(self, *, is_end: bool) -> bool:
        """Marks behind a call are dropped, and white space before another one; False where more text decides."""
        rest = self._held.lstrip()
        while (mark := next((mark for mark in self._marks_behind if rest.startswith(mark)), None)) is not None:
            self._held = rest[len(mark) :]
            rest = self._held.lstrip()
        begins = [opening.begin(rest, 0) for opening in self._openings]
        if not is_end and (MAYBE in begins or any(mark.startswith(rest) for mark in self._marks_behind)):
            return False
        if not rest or any(begin is not None and begin != MAYBE for begin in begins):
            self._held = rest
        self._is_behind_call = False
        return True


def next_place(text: str, mark: str, start: int, *, is_end: bool) -> int:
    """Where a mark is, or may begin at the end of the text; the end for nowhere."""
    place = text.find(mark, start)
    if place >= 0:
        return place
    place = len(text) if is_end else len(text) - length_of_beginning(mark, text)
    return place if place >= start else len(text)


class WholeAnswerDivider:
    """Calls that are the whole answer: the beginning decides whether it may be calls, and the end whether it is."""

    def __init__(self, form: CallForm, schemas: Schemas) -> None:
        self.form, self.schemas = form, schemas
        self._held = ""
        self._is_text = False

    def add(self, text: str, *, is_end: bool) -> AnswerPart:
        self._held += text
        if not self._is_text:
            start = self._held.lstrip()
            marks = (self.form.begin, *self.form.also)
            self._is_text = not any(start.startswith(mark) or mark.startswith(start) for mark in marks)
        if not self._is_text and not is_end:
            return AnswerPart()
        calls = None if self._is_text else self._calls()
        content, self._held = self._held, ""
        return AnswerPart(content=content) if calls is None else AnswerPart(calls=calls)

    def _calls(self) -> list[ToolCall] | None:
        """None unless all of the text is calls."""
        rest, calls = self._held.strip(), list[ToolCall]()
        while rest:
            reading = self.form.read(rest, self.schemas, True)
            if reading is None:
                return None
            calls += reading[0]
            rest = rest[reading[1] :].strip()
            for mark in self.form.after:
                rest = rest.removeprefix(mark).lstrip()
        return calls


# -- answers of messages ---------------------------------------------------------------------------


class FrameDivider:
    """Divides an answer into messages by their headers. A message without one is content."""

    def __init__(self, frame: MessageFrame, schemas: Schemas) -> None:
        self.frame, self.schemas = frame, schemas
        self._held = ""
        self._body: tuple[BodyKind, str] | None = None
        """Kind and function of the message whose body is read; None: a header is next."""
        self._head = ""
        """The header and its mark, as they came."""
        self._seen: set[BodyKind] = set()
        self._ends = (*frame.ends, frame.start)

    def add(self, text: str, *, is_end: bool) -> AnswerPart:
        self._held += text
        part = AnswerPart()
        while self._step(part, is_end=is_end):
            pass
        return part

    def _step(self, part: AnswerPart, *, is_end: bool) -> bool:
        if self._body is None and not self._read_header(part, is_end=is_end):
            return False
        assert self._body is not None
        places = [(place, mark) for mark in self._ends if (place := self._held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            # The mark of the next header belongs to that.
            end = place if mark == self.frame.start else place + len(mark)
            self._show(part, self._held[:place], is_whole=True, mark=self._held[place:end])
            self._held, self._body = self._held[end:], None
            return bool(self._held)
        if is_end:
            self._show(part, self._held, is_whole=True)
            self._held, self._body = "", None
        elif self._body[0] != "call":
            keep = len(self._held) - max(length_of_beginning(mark, self._held) for mark in self._ends)
            self._show(part, self._held[:keep], is_whole=False)
            self._held = self._held[keep:]
        return False

    def _read_header(self, part: AnswerPart, *, is_end: bool) -> bool:
        """False where more text is needed, or nothing is left."""
        start = self._held.lstrip()
        if not start:
            return False
        may_be = any(start.startswith(text) or text.startswith(start) for text in self.frame.headers)
        place = self._held.find(self.frame.message)
        if may_be and place >= 0:
            body = self.frame.kind_of(self._held[:place])
            self._head = self._held[: place + len(self.frame.message)]
            self._held = self._held[len(self._head) :]
        elif may_be and not is_end and len(start) < LONGEST_HEADER:
            return False
        else:
            body = ("content", "")
        self._body = body
        self._begin_paragraph(part, body[0])
        if body[0] == "content" and self._held.lstrip().startswith(self.frame.start) and place < 0:
            # Its header is not complete. The mark would end the message that it begins.
            end = self._held.index(self.frame.start) + len(self.frame.start)
            part.content += self._held[:end]
            self._held = self._held[end:]
        return True

    def _begin_paragraph(self, part: AnswerPart, kind: BodyKind) -> None:
        """Messages of one kind are paragraphs."""
        if kind in self._seen and kind != "call":
            self._show(part, "\n\n", is_whole=False)
        self._seen.add(kind)

    def _show(self, part: AnswerPart, text: str, *, is_whole: bool, mark: str = "") -> None:
        """mark: the one that ended the text."""
        assert self._body is not None
        kind, name = self._body
        calls = self.frame.read(name, text, self.schemas) if kind == "call" and is_whole else None
        if calls is not None:
            part.calls += calls
        elif kind == "reasoning":
            part.reasoning += text
        elif kind == "call":
            # No complete call: as it came, with the name of the function.
            part.content += self._head + text + mark
        else:
            part.content += text
