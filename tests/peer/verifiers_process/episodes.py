"""Run in the environment with verifiers: conversations of our environment with scripted turns of a model.

episodes.py OUT, with our sources on PYTHONPATH, writes what came back as JSON.
"""

import json
import sys
import time
from pathlib import Path

from mt_core.errors import MtError
from mt_tune.environments.verifiers import build_verifiers, rows_of

sys.path.insert(0, str(Path(__file__).parent))


def played(source, row, *turns):
    """Replies to turns; None is a turn that was cut off, and a dict calls the only tool."""
    began = time.perf_counter()
    dialogue = source.begin(row)
    found = {"prompt": list(dialogue.prompt), "tools": dialogue.tools, "replies": []}
    for turn in turns:
        print(row, turn, file=sys.stderr, flush=True)
        if isinstance(turn, dict):
            (name,) = [tool["function"]["name"] for tool in dialogue.tools]
            turn = said("", (name, turn))
        reply = dialogue.end() if turn is None else dialogue.reply(said(turn) if isinstance(turn, str) else turn)
        found["replies"].append(vars(reply))
    source.release(dialogue)
    return {**found, "seconds": time.perf_counter() - began}


def refused(act):
    try:
        act()
    except MtError as error:
        return f"{type(error).__name__}: {error}"
    return None


def said(text, *calls):
    listed = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": listed} if listed else {})}


def main():
    counting, adding, asking = (
        build_verifiers({"taskset": name}) for name in ("counting_tasks", "adding_tasks", "asking_user")
    )
    rows, numbers = rows_of(counting.tasks), {"a": 2, "b": 2}
    with_tool = rows_of(adding.tasks)[0]
    found = {
        "rows": rows,
        "right": played(counting, rows[1], "It is 3."),
        "wrong": played(counting, rows[1], "It is 4."),
        "tool": played(adding, with_tool, numbers, "So it is 4."),
        "cut": played(adding, with_tool, numbers, None),
        "user": played(asking, rows_of(asking.tasks)[0], "What?", "What, please?"),
        "other prompt": refused(lambda: counting.begin({**rows[0], "prompt": [{"role": "user", "content": "1?"}]})),
        "no item": refused(lambda: counting.begin({**rows[0], "item": 3})),
        "no taskset": refused(lambda: build_verifiers({"taskset": "not_installed"})),
        "unknown key": refused(lambda: build_verifiers({"taskset": "counting_tasks", "agents": {}})),
    }
    adding.close()
    counting.close()
    asking.close()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
