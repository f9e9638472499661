"""The messages of a chat, from OpenAI's form to that of chat templates, and their images."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from mt_core.errors import DataError
from mt_data.datasets.images.image_text import ImageTextDataConfig
from mt_data.datasets.images.pixels import ImageFile, decode_image
from mt_data.datasets.images.video_files import container_of
from mt_data.datasets.images.videos import frame_size
from mt_data.datasets.sounds.reading import read_sound, require_length, sound_of_bytes
from mt_data.datasets.sounds.rules import SoundRule
from mt_infer.prompts import ImageViews, Sound, read_video, views_of
from mt_infer.server.errors import ApiError
from mt_infer.server.openai.fields import Body


class TextPart(Body):
    """prompt_cache_breakpoint: of OpenAI's own cache; has no effect."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class RefusalPart(Body):
    """What OpenAI's models answer in place of a text that they refuse; a template gets it as text."""

    type: Literal["refusal"]
    refusal: str


class ImageUrl(Body):
    """url: data:image/...;base64,..., or file:/// in a folder that the server allows. detail: has no effect, since a
    model has one way to cut images."""

    url: Annotated[str, Field(min_length=1)]
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: dict[str, Any] | None = None


class VideoUrl(Body):
    """url: data:video/...;base64,... of a video file, data:image/...;base64,... of an animated one, or file:/// of
    these, or of a folder of frames, in a folder that the server allows."""

    url: Annotated[str, Field(min_length=1)]


class VideoPart(Body):
    """A video in vLLM's words; OpenAI's chats have no videos."""

    type: Literal["video_url"]
    video_url: VideoUrl


class InputAudio(Body):
    """data: the content of a WAV file in base64. format: wav; OpenAI's mp3 is not read."""

    data: Annotated[str, Field(min_length=1)]
    format: Literal["wav", "mp3"]


class InputAudioPart(Body):
    """A sound, as OpenAI's client sends it."""

    type: Literal["input_audio"]
    input_audio: InputAudio
    prompt_cache_breakpoint: dict[str, Any] | None = None


class AudioUrl(Body):
    """url: data:audio/...;base64,... of a WAV file, or file:/// of one in a folder that the server allows."""

    url: Annotated[str, Field(min_length=1)]


class AudioUrlPart(Body):
    """A sound in vLLM's words."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


SoundPart = InputAudioPart | AudioUrlPart
ContentPart = TextPart | ImagePart | VideoPart | InputAudioPart | AudioUrlPart | RefusalPart


class CalledFunction(Body):
    """arguments: a JSON object as text."""

    name: str
    arguments: str


class MessageToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """Text, and images and sounds of the user."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[ContentPart, Field(discriminator="type")]] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    """In place of the content of an answer that was refused."""
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    reasoning_content: str | None = None
    """What an answer has thought, given to templates that write it. `reasoning` is another name of it."""
    reasoning: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000)]


class PictureUrl(NamedTuple):
    url: str
    is_video: bool


def picture_urls(messages: Sequence[Message]) -> list[PictureUrl]:
    """Those of images and videos, in their order. Raises ApiError for one of another than the user."""
    urls: list[PictureUrl] = []
    for number, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        message_urls = [
            PictureUrl(part.video_url.url, True)
            if isinstance(part, VideoPart)
            else PictureUrl(part.image_url.url, False)
            for part in parts
            if isinstance(part, ImagePart | VideoPart)
        ]
        if message_urls and message.role != "user":
            raise ApiError(
                f'messages: message {number} of the role "{message.role}" has an image or video; those of "user" can',
                param="messages",
            )
        urls += message_urls
    return urls


def sound_parts(messages: Sequence[Message]) -> list[SoundPart]:
    """Sounds, in their order. Raises ApiError for one of another than the user."""
    sounds: list[SoundPart] = []
    for number, message in enumerate(messages):
        parts = message.content if isinstance(message.content, list) else []
        message_sounds = [part for part in parts if isinstance(part, InputAudioPart | AudioUrlPart)]
        if message_sounds and message.role != "user":
            raise ApiError(
                f'messages: message {number} of the role "{message.role}" has a sound; those of "user" can',
                param="messages",
            )
        sounds += message_sounds
    return sounds


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Raises ApiError for a call whose arguments are no JSON."""
    return [_for_template(message, number) for number, message in enumerate(messages)]


def _for_template(message: Message, number: int) -> dict[str, Any]:
    content = message.content if isinstance(message.content, str) else [_part(part) for part in message.content or ()]
    content = content or message.refusal or content
    fields: dict[str, Any] = {"role": message.role, "content": content}
    fields |= {key: value for key in ("name", "tool_call_id") if (value := getattr(message, key)) is not None}
    if reasoning := message.reasoning_content or message.reasoning:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call(call, number) for call in message.tool_calls]
    return fields


def _part(part: ContentPart) -> dict[str, str]:
    if isinstance(part, ImagePart | VideoPart):
        return {"type": "video" if isinstance(part, VideoPart) else "image"}
    if isinstance(part, InputAudioPart | AudioUrlPart):
        return {"type": "audio"}
    return {"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text}


def _call(call: MessageToolCall, number: int) -> dict[str, Any]:
    """Templates write the arguments themselves, as JSON."""
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(
            f"messages: in message {number}, the arguments of the call {call.id} are no JSON object", param="messages"
        )
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""OpenAI's. Pillow decodes some others with programs of their own."""
MAX_PIXELS = 32_000_000
"""Limit of an image; a small file may hold many."""


def read_pictures(
    urls: Sequence[PictureUrl], folders: Sequence[Path], data: ImageTextDataConfig
) -> Iterator[ImageViews]:
    """The views of each, decoded when it is taken. folders: those that file: URLs may name. Raises ApiError for all
    other URLs, and for what is no image or no video."""
    for number, (url, is_video) in enumerate(urls, 1):
        if is_video:
            yield _read_video(url, f"messages: video {number}", folders, data)
        else:
            yield views_of([_read(url, f"messages: image {number}", folders)], data)[0]


def read_sounds(parts: Sequence[SoundPart], folders: Sequence[Path], rule: SoundRule) -> list[Sound]:
    """Samples at 16 kHz of each. folders: those that file: URLs may name. Raises ApiError for all other URLs, and for
    what is no sound of a length that the rule takes."""
    return [_read_sound(part, f"messages: sound {number}", folders, rule) for number, part in enumerate(parts, 1)]


def _read_sound(part: SoundPart, name: str, folders: Sequence[Path], rule: SoundRule) -> Sound:
    try:
        if isinstance(part, AudioUrlPart) and not part.audio_url.url.startswith("data:"):
            path = _file(part.audio_url.url, name, folders, "audio")
            sound = read_sound(ImageFile(path))
        else:
            sound = sound_of_bytes(_content_of(part, name), name)
        require_length(len(sound), rule, None, name)
    except DataError as error:
        raise _refused(str(error) if str(error).startswith(name) else f"{name}: {error}") from error
    return sound


def _content_of(part: SoundPart, name: str) -> bytes:
    if isinstance(part, AudioUrlPart):
        return _data(part.audio_url.url, name, ("audio/",))
    if part.input_audio.format != "wav":
        raise _refused(f'{name} has the format "{part.input_audio.format}"; this server reads "wav", convert it')
    return _base64(part.input_audio.data, name)


def _read_video(url: str, name: str, folders: Sequence[Path], data: ImageTextDataConfig) -> ImageViews:
    try:
        if not url.startswith("data:"):
            path = _file(url, name, folders)
            if path.is_file():
                _require_small(path, name)
            return read_video(path, data)
        # Frames are sought one after the other in a file.
        with TemporaryDirectory() as folder:
            (path := Path(folder) / "video").write_bytes(_data(url, name, ("video/", "image/")))
            _require_small(path, name)
            return read_video(path, data)
    except DataError as error:
        raise _refused(f"{name}: {error}") from error


def _require_small(path: Path, name: str) -> None:
    """Raises DataError for what is no video or animated file, or has too many pixels in a frame."""
    if container_of(path) is None:
        decode_image(path, name, FORMATS, MAX_PIXELS)
        return
    height, width = frame_size(path)
    if height * width > MAX_PIXELS:
        raise DataError(f"{name} has {width} x {height} pixels, more than the {MAX_PIXELS} allowed")


def _read(url: str, name: str, folders: Sequence[Path]) -> NDArray[np.uint8]:
    source = BytesIO(_data(url, name)) if url.startswith("data:") else _file(url, name, folders)
    try:
        return decode_image(source, name, FORMATS, MAX_PIXELS)
    except DataError as error:
        raise _refused(str(error)) from error


def _data(url: str, name: str, kinds: tuple[str, ...] = ("image/",)) -> bytes:
    """Content of data:image/...;base64,... (RFC 2397), or of another of the kinds."""
    head, _, encoded = url.removeprefix("data:").partition(",")
    if not head.startswith(kinds) or not head.endswith(";base64"):
        allowed = " or ".join(f"data:{kind}...;base64" for kind in kinds)
        raise _refused(f"{name} is data:{head[:50]}; it must be {allowed}, with the file behind the comma")
    return _base64(encoded, name)


def _base64(encoded: str, name: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"{name} is not valid base64: {error}") from error


def _file(url: str, name: str, folders: Sequence[Path], kind: str = "image") -> Path:
    """kind: of data: URLs that would be taken."""
    try:
        path = _path_of(url)
    except ValueError as error:
        raise _refused(f"{name} is at {url[:50]!r}, which is no URL: {error}") from error
    if path is None:
        raise _refused(
            f"{name} is at {url[:50]!r}, which this server does not fetch; send it as data:{kind}/...;base64,..."
        )
    # After links and `..` are resolved: a link inside the folder that leads outside is refused.
    if not any(path.is_relative_to(folder.resolve()) for folder in folders):
        raise _refused(
            f"{name} is a file outside the folders that this server reads {kind}s from (--allowed-local-media-path "
            f"of mt serve); send it as data:{kind}/...;base64,..."
        )
    return path


def _path_of(url: str) -> Path | None:
    """Path of a file: URL, without links and `..`; None for others. Raises ValueError for what is no URL or no path."""
    parts = urlsplit(url)
    # http: URLs are never fetched: a request could reach addresses inside the server's network.
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        return None
    return Path(unquote(parts.path)).resolve()


def _refused(message: str) -> ApiError:
    return ApiError(message, param="messages")
