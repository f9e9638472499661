"""Records of images with texts, from JSON lines and from shards: captions, questions with answers, conversations.

| keys of a record | |
| --- | --- |
| `text` or `caption` | a text that describes the images |
| `question` and `answer`, or `answers` | of several answers, the most frequent one is the assistant's |
| `conversations` | turns as in LLaVA's files: `{"from": "human" or "gpt", "value": ...}` |
| `image` or `images` | in JSON lines: a path, or a list of paths; without either the record has text alone |
| `audio` or `audios` | in JSON lines: a path, or a list of paths, of WAV files |
| `video` or `videos`, `fps` | in JSON lines: paths of videos, see `videos`; frames of a second, of folders of frames |
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mt_core.errors import DataError, did_you_mean
from mt_data.datasets.images.pixels import SUFFIXES, ImageFile
from mt_data.datasets.images.videos import VIDEO, VideoSampling, VideoViews, opened_videos, video_names
from mt_data.datasets.sft.conversations import Conversation, Message
from mt_data.datasets.sounds import wav
from mt_data.datasets.sounds.rules import MARK as SOUND_MARK
from mt_data.preprocess.readers import MalformedRecord, iter_records, parse_json_line

MARK = "<image>"
"""Where an image stands in a text."""
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""`from` of a turn, and the role that it means."""
TEXTS = ("text", "caption")
OnUnusable = Callable[[int, DataError], None]
"""Called with the number of a record that cannot be used, and why; reading continues unless the call raises."""


@dataclass(frozen=True)
class ImageText:
    """Images, and a text or conversation that has MARK once for each; so it is with sounds and their mark. answers: all
    that a question's record gives."""

    images: tuple[ImageFile, ...]
    text: str | Conversation
    file: str
    number: int
    answers: tuple[str, ...] = ()
    sounds: tuple[ImageFile, ...] = ()

    @property
    def references(self) -> list[str]:
        """What an answer is compared with: the answers to the question, the last answer of the conversation, or the
        text behind the last image."""
        if isinstance(self.text, str):
            return [re.split(f"{MARK}|{SOUND_MARK}" if self.sounds else MARK, self.text)[-1].strip()]
        return list(self.answers) or [self.text.messages[self.text.turns_of("assistant")[-1]]["content"]]

    @property
    def where(self) -> str:
        return place(self.file, self.number)


def place(file: str | Path, number: int) -> str:
    """Place of record `number` of a file, counted from 1, for messages."""
    return f"{file}, {'sample' if is_shard(file) else 'line'} {number}"


def is_shard(path: str | Path) -> bool:
    return str(path).endswith(".tar")


def read_image_texts(
    path: Path,
    folder: Path,
    on_unusable: OnUnusable,
    sampling: VideoSampling | None = None,
    *,
    with_sounds: bool = False,
) -> Iterator[ImageText]:
    """The records of a file, in order. folder: where paths in JSON lines begin. sampling: of videos, where there are
    some. with_sounds: whether records may have sounds.

    Raises DataError for a file that cannot be read at all.
    """
    read = _of_shard(path, on_unusable) if is_shard(path) else _of_lines(path, folder, on_unusable)
    for number, value, images, sounds in read:
        try:
            where = place(path, number)
            if sounds and not with_sounds:
                raise DataError(f"{where} has a sound; set data.audio_token_index, the id that stands for sound")
            if is_shard(path) and video_names(value, where):
                raise DataError(f"{where} has a video, which records in JSON lines can have alone")
            videos = opened_videos(value, folder, sampling, where)
            yield record_of(value, images, str(path), number, videos, sounds if with_sounds else None)
        except DataError as error:
            on_unusable(number, error)


Files = tuple[ImageFile, ...]
Read = Iterator[tuple[int, Mapping[str, Any], Files, Files]]
"""Number, record, images and sounds."""


def _of_lines(path: Path, folder: Path, on_unusable: OnUnusable) -> Read:
    def malformed(error: MalformedRecord) -> None:
        on_unusable(error.line, error)

    for record in iter_records(path, on_malformed=malformed):
        try:
            where = place(path, record.line)
            names = [names_under(record.value, kind, where) for kind in ("image", "audio")]
        except DataError as error:
            on_unusable(record.line, error)
        else:
            images, sounds = (tuple(ImageFile(folder / name) for name in listed) for listed in names)
            yield record.line, record.value, images, sounds


def _of_shard(path: Path, on_unusable: OnUnusable) -> Read:
    for sample in iter_shard(path):
        try:
            value = shard_value(sample, place(path, sample.number))
        except DataError as error:
            on_unusable(sample.number, error)
        else:
            # By extension, since the order of members within a sample is up to the writer of the archive.
            members = [member for name, member in sorted(sample.members.items())]
            images, sounds = (
                tuple(member for member in members if member.suffix in suffixes)
                for suffixes in (SUFFIXES, wav.SUFFIXES)
            )
            yield sample.number, value, images, sounds


def shard_value(sample: ShardSample, where: str) -> Mapping[str, Any]:
    """The object in the member `json`, or {"text": the content of the member `txt`}."""
    if "json" in sample.members:
        try:
            return parse_json_line(sample.members["json"].read()) or {}
        except ValueError as error:
            raise DataError(f"{where} ({sample.key}.json) {error}") from error
    if "txt" not in sample.members:
        raise DataError(f"{where} ({sample.key}) has {', '.join(sample.members)}; its text is expected in json or txt")
    try:
        return {"text": sample.members["txt"].read().decode("utf-8").strip()}
    except UnicodeDecodeError as error:
        raise DataError(f"{where} ({sample.key}.txt) is no UTF-8: {error}") from error


def names_under(value: Mapping[str, Any], kind: str, where: str) -> list[str]:
    """The paths under `image` or `images`: a text or a list of texts. kind: image, or audio."""
    key = f"{kind}s" if f"{kind}s" in value else kind
    names = value.get(key, [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise DataError(f'{where}: expected a path or a list of paths under "{key}", found {value[key]!r:.200}')
    return names


def record_of(
    value: Mapping[str, Any],
    images: tuple[ImageFile, ...],
    file: str,
    number: int,
    videos: Sequence[VideoViews] = (),
    sounds: Files | None = (),
) -> ImageText:
    """Raises DataError for a record with no text, question or conversation, and for more marks than images. sounds:
    None where texts have no marks of them."""
    where = place(file, number)
    if "conversations" in value or "question" in value:
        answers = answers_of(value, where) if "question" in value else []
        turns = _question(value, answers, where) if answers else messages_of(value.get("conversations"), where)
        messages = marked_messages(turns, len(images), where)
        if sounds is not None:
            messages = marked_messages(messages, len(sounds), where, SOUND_MARK)
        if videos:
            messages = marked_messages(messages, len(videos), where, VIDEO)
            contents, images = placed([message["content"] for message in messages], images, videos)
            messages = [{**message, "content": text} for message, text in zip(messages, contents, strict=True)]
        conversation = Conversation(messages, None, file, number)
        return ImageText(images, conversation, file, number, tuple(answers), sounds or ())
    key = next((key for key in TEXTS if key in value), TEXTS[0])
    text = marked_text(text_of(value, key, where), len(images), where)
    if sounds is not None:
        text = marked_text(text, len(sounds), where, SOUND_MARK)
    if videos:
        (text,), images = placed([marked_text(text, len(videos), where, VIDEO)], images, videos)
    return ImageText(images, text, file, number, sounds=sounds or ())


def placed(
    contents: Sequence[str], images: Sequence[ImageFile], videos: Sequence[VideoViews]
) -> tuple[list[str], tuple[ImageFile, ...]]:
    """Texts with the views of videos, and their times, in place of VIDEO; images and views in the order of their
    marks. The texts have a mark for each image and each video."""
    stills, films, files = iter(images), iter(videos), list[ImageFile]()

    def place_one(mark: re.Match[str]) -> str:
        if mark[0] == MARK:
            files.append(next(stills))
            return MARK
        video = next(films)
        files.extend(video.files)
        return video.text(MARK)

    return [re.sub(f"{MARK}|{VIDEO}", place_one, text) for text in contents], tuple(files)


def text_of(value: Mapping[str, object], key: str, where: str) -> str:
    """The text under a key of a record. Raises DataError when there is none."""
    text = value.get(key)
    if not isinstance(text, str) or not text:
        actual = repr(text) if key in value else f"only the keys {', '.join(value)}"
        raise DataError(f'{where}: expected a text under "{key}", found {actual}{did_you_mean(key, value)}')
    return text


def answers_of(value: Mapping[str, Any], where: str) -> list[str]:
    """Under `answers` (texts, or VQAv2's objects with `answer`), or the one under `answer`."""
    if "answers" not in value:
        return [text_of(value, "answer", where)]
    stored = value["answers"]
    entries = stored if isinstance(stored, list) else []
    answers: list[Any] = [entry.get("answer") if isinstance(entry, dict) else entry for entry in entries]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f'{where}: expected a list of texts under "answers", found {stored!r:.200}')
    return answers


def _question(value: Mapping[str, Any], answers: list[str], where: str) -> list[Message]:
    # Of equally frequent answers the first: Counter keeps the order of insertion.
    (answer, _), *_ = Counter(answers).most_common(1)
    return [
        {"role": "user", "content": text_of(value, "question", where)},
        {"role": "assistant", "content": answer},
    ]


def messages_of(turns: Any, where: str) -> list[Message]:
    """Turns with `from` and `value` as messages with role and content."""
    if not isinstance(turns, list) or not turns:
        raise DataError(f'{where}: "conversations" must be a list of at least one turn')
    return [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, 1)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict) or turn.get("from") not in SPEAKERS or not isinstance(turn.get("value"), str):
        raise DataError(
            f'{where}: expected {{"from": one of {", ".join(SPEAKERS)}, "value": a text}}, found {turn!r:.200}'
        )
    return {"role": SPEAKERS[turn["from"]], "content": turn["value"]}


def marked_text(text: str, images: int, where: str, mark: str = MARK) -> str:
    """With a mark for each image: those that it lacks are put before it. Raises DataError for more marks."""
    return mark * _lacking(text.count(mark), images, where, mark) + text


def marked_messages(messages: list[Message], images: int, where: str, mark: str = MARK) -> list[Message]:
    """With a mark for each image: those that they lack are lines before what the user says first."""
    lacking = _lacking(sum(message["content"].count(mark) for message in messages), images, where, mark)
    if not lacking:
        return messages
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), 0)
    content = f"{mark}\n" * lacking + messages[first]["content"]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _lacking(marks: int, images: int, where: str, mark: str) -> int:
    if marks > images:
        raise DataError(
            f'{where} has "{mark}" {marks} times, and the number of {mark[1:-1]}s is {images}; '
            "there can be at most one for each"
        )
    return images - marks


# -- shards in webdataset's layout: consecutive members of a tar archive with one key are a sample ---
#
# The key of a member is its path up to the first dot of its file name, the rest is its extension:
# `train/0001.jpg` and `train/0001.json` are `jpg` and `json` of the sample `train/0001`. Samples are read at random
# places, so that their order does not depend on the number of workers; that needs archives that are not compressed.


@dataclass
class ShardSample:
    """members: extension (lower case, without its dot) -> where its bytes are. number: of the sample, from 1."""

    key: str
    number: int
    members: dict[str, ImageFile] = field(default_factory=dict)


def iter_shard(path: Path) -> Iterator[ShardSample]:
    """The samples of an archive, in its order.

    Raises DataError for a file that is no tar archive, is compressed or cut short, and for a sample that has an
    extension twice.
    """
    sample: ShardSample | None = None
    for member in _members(path):
        key, extension = key_and_extension(member.member)
        if not extension:
            continue
        if sample is None or sample.key != key:
            if sample is not None:
                yield sample
            sample = ShardSample(key, 1 if sample is None else sample.number + 1)
        if extension in sample.members:
            raise DataError(f"{path}: the sample {key} has two members with the extension {extension}; rename one")
        sample.members[extension] = member
    if sample is not None:
        yield sample


def key_and_extension(name: str) -> tuple[str, str]:
    """ "a/b.x.jpg" -> ("a/b", "x.jpg"); names without a dot have no extension."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _members(path: Path) -> Iterator[ImageFile]:
    try:
        # "r:" refuses compressed archives, in which members have no offset in the file. Only headers are read here.
        with tarfile.open(path, "r:") as archive:
            end = path.stat().st_size
            for member in archive:
                if member.isfile():
                    yield _within(path, member, end)
    except tarfile.TarError as error:
        raise DataError(
            f"{path} cannot be read as a tar archive: {error}; shards are tar archives without compression"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _within(path: Path, member: tarfile.TarInfo, end: int) -> ImageFile:
    file = ImageFile(path, member.name, member.offset_data, member.size)
    if file.offset + file.size > end:
        raise DataError(f"{file} ends behind the archive, which is cut short; write it again")
    return file
