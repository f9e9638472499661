"""Serves a model on this machine, asks it one question, and ends the server: python served.py FOLDER [QUESTION]"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

QUESTION = "Where is `os.path.join` defined?"
PORT = 8341
SECONDS = 120
"""So long the server may take to start."""


def answer(address: str, question: str) -> str:
    """The greedy answer by OpenAI's interface."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 60}
    request = Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text.strip()


def wait_for(address: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(SECONDS * 10):
        try:
            with urlopen(f"{address}/health"):
                return
        except URLError:
            if server.poll() is not None:
                break
            time.sleep(0.1)
    raise SystemExit(f"mt serve does not answer at {address}")


def main(folder: Path, question: str = QUESTION) -> None:
    server = subprocess.Popen(["mt", "serve", str(folder), "--port", str(PORT)], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{PORT}"
    try:
        wait_for(address, server)
        with urlopen(address) as page:
            print(f"{address} serves a page of {len(page.read()):,} bytes")
        print(f"{question}\n{answer(address, question)}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
