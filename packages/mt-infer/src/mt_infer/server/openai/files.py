"""/v1/files: what a batch reads and writes. Files live in a folder of the server and end with it."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from starlette.datastructures import UploadFile
from starlette.requests import Request as HttpRequest

from mt_infer.server.errors import ApiError
from mt_infer.server.openai.answers import Piece

BATCH, BATCH_OUTPUT = "batch", "batch_output"
MOST_LISTED = 10_000


@dataclass(frozen=True)
class StoredFile:
    """created: seconds since 1970."""

    id: str
    name: str
    purpose: str
    size: int
    created: int

    def described(self) -> Piece:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class StoredFiles:
    """By their ids, in order of arrival. most_bytes: of all together."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_id: dict[str, StoredFile] = {}
        self._folder: Path | None = None

    def add(self, name: str, purpose: str, content: bytes) -> StoredFile:
        """Raises ApiError for more than fits."""
        taken = sum(file.size for file in self._by_id.values())
        if taken + len(content) > self._most_bytes:
            raise ApiError(
                f"the files of this server have {taken} of {self._most_bytes} bytes; delete some",
                status=413,
                param="file",
            )
        file = StoredFile(f"file-{secrets.token_hex(12)}", name, purpose, len(content), int(time.time()))
        self._path(file.id).write_bytes(content)
        self._by_id[file.id] = file
        return file

    def begin(self, name: str) -> StoredFile:
        """An empty file of results, which `append` writes."""
        return self.add(name, BATCH_OUTPUT, b"")

    def append(self, number: str, line: bytes) -> None:
        """Writes a line at the end; nothing if the file was deleted meanwhile."""
        file = self._by_id.get(number)
        if file is None:
            return
        with self._path(number).open("ab") as opened:
            opened.write(line)
        self._by_id[number] = replace(file, size=file.size + len(line))

    def find(self, number: str, param: str | None = None) -> StoredFile:
        """Raises ApiError."""
        if number not in self._by_id:
            raise ApiError(f'there is no file "{number[:100]}"', status=404, param=param, code="not_found")
        return self._by_id[number]

    def content(self, number: str) -> bytes:
        return self._path(self.find(number).id).read_bytes()

    def remove(self, number: str) -> Piece:
        self._path(self.find(number).id).unlink(missing_ok=True)
        del self._by_id[number]
        return {"id": number, "object": "file", "deleted": True}

    def all(self) -> list[StoredFile]:
        return list(self._by_id.values())

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: str) -> Path:
        # Ids are this server's own: no name of a client is part of a path.
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="mt-serve-"))
        return self._folder / number


async def create_file(files: StoredFiles, http: HttpRequest) -> Piece:
    """From multipart/form-data with `file` and `purpose`. Raises ApiError."""
    if not http.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError("a file is sent as multipart/form-data, with the fields file and purpose")
    async with http.form(max_files=1, max_fields=10) as form:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError("file is missing", param="file")
        if purpose != BATCH:
            raise ApiError(f'purpose: this server has files of the purpose "{BATCH}" only', param="purpose")
        content = await file.read()
    stored = await asyncio.to_thread(files.add, file.filename or "unnamed", BATCH, content)
    return stored.described()


def page_of(
    rows: Sequence[Piece], after: str | None, limit: int, order: Literal["asc", "desc"] = "desc"
) -> dict[str, Any]:
    """A page of a list. rows: in order of arrival. after: the id before the first of the page. Raises ApiError."""
    ordered = list(rows) if order == "asc" else list(reversed(rows))
    ids = [row["id"] for row in ordered]
    if after is not None and after not in ids:
        raise ApiError(f'after: there is no "{after[:100]}" in this list', param="after")
    start = 0 if after is None else ids.index(after) + 1
    shown = ordered[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(ordered),
    }
