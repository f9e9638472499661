"""What all corpus commands share: restarts, workers, refusing stale results, reports that add up."""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.covering import EXHAUSTIVE

from mt_core.errors import ConfigError, DataError
from mt_data.corpora.clean_options import CleanOptions, preset
from mt_data.corpora.cleaning import clean
from mt_data.corpora.deduplication import dedup
from mt_data.corpora.options import DedupOptions
from mt_data.corpora.report import EXAMPLES_PER_REASON, Report
from mt_data.corpora.state import locked
from mt_data.corpora.streaming import Reading
from mt_data.preprocess.readers import MalformedRecord

WORDS = ["river", "the", "of", "mountain", "city", "people", "and", "history", "with", "music"]
SHORT = preset("none").replace(["min_words=6"])


def corpus(write_jsonl: Any, files: int, documents: int) -> list[Path]:
    source = random.Random(files)
    return [
        write_jsonl(
            f"in/{number:02d}.jsonl",
            [" ".join(source.choices(WORDS, k=source.randint(2, 30))) for _ in range(documents)],
        )
        for number in range(files)
    ]


def test_a_report_adds_up_and_names_the_first_places(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    corpus(write_jsonl, 3, 40)
    report = clean([tmp_path / "in/*.jsonl"], SHORT, run(dropped=tmp_path / "dropped"))
    total = report.total
    assert total.read == 120
    assert total.kept + total.dropped_total == total.read
    assert 0 < total.dropped["too_few_words"].count < 120
    assert len(total.dropped["too_few_words"].examples) == EXAMPLES_PER_REASON
    assert total.dropped["too_few_words"].examples[0].startswith(f"{tmp_path}/in/00.jsonl:")
    saved = json.loads((tmp_path / "out/report.json").read_text())
    assert saved["documents"] == {
        "read": 120,
        "kept": total.kept,
        "dropped": total.dropped_total,
        "written": total.kept,
    }
    assert sum(file["kept"] for file in saved["files"]) == total.kept
    dropped = [json.loads(line) for path in (tmp_path / "dropped").glob("*.jsonl") for line in path.open()]
    assert len(dropped) == total.dropped_total
    assert all(value["mt_dropped"]["reason"] == "too_few_words" for value in dropped)


def test_reports_survive_json() -> None:
    report = Report(read=3, kept=1, written=2, characters_read=9, characters_written=4)
    report.drop("short", "a:1")
    report.change("cut", 2, "a:2")
    assert Report.from_json(json.loads(json.dumps(report.to_json()))) == report


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "ending"),
    [
        (1, ".jsonl"),
        (4, ".jsonl.gz"),
        (1, ".jsonl.zst"),
        pytest.param(4, ".jsonl", marks=EXHAUSTIVE),
        pytest.param(1, ".jsonl.gz", marks=EXHAUSTIVE),
        pytest.param(4, ".jsonl.zst", marks=EXHAUSTIVE),
    ],
)
def test_workers_do_not_change_a_byte(
    files: int, ending: str, write_jsonl: Any, run: Any, tmp_path: Path, files_below: Any
) -> None:
    corpus(write_jsonl, files, 700)
    reports = [
        clean([tmp_path / "in/*"], SHORT, run(f"out{n}", ending=ending, workers=n, dropped=tmp_path / f"dropped{n}"))
        for n in (1, 2)
    ]
    assert len(files_below(tmp_path / "out1")) == files
    assert files_below(tmp_path / "out1") == files_below(tmp_path / "out2")
    assert files_below(tmp_path / "dropped1") == files_below(tmp_path / "dropped2")
    assert reports[0].total == reports[1].total


def test_a_rerun_repeats_nothing(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    corpus(write_jsonl, 3, 10)
    first = clean([tmp_path / "in/*"], SHORT, run())
    (tmp_path / "out/01.jsonl").unlink()
    second = clean([tmp_path / "in/*"], SHORT, run())
    assert [file["reused"] for file in second.files] == [True, False, True]
    assert second.total == first.total
    assert (tmp_path / "out/01.jsonl").exists()


def test_stale_results_are_refused_until_overwritten(write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any) -> None:
    path = write_jsonl("a.jsonl", ["one two three", "one"])
    clean([path], preset("none").replace(["min_words=2"]), run())
    with pytest.raises(ConfigError, match=r"min_words=2, now 1; give another --output, or --overwrite"):
        clean([path], preset("none").replace(["min_words=1"]), run())
    clean([path], preset("none").replace(["min_words=1"]), run(overwrite=True))
    assert texts_of(tmp_path / "out/a.jsonl") == ["one two three", "one"]
    write_jsonl("a.jsonl", ["other"])
    with pytest.raises(ConfigError, match=r"an earlier content of .*a.jsonl"):
        clean([path], preset("none").replace(["min_words=1"]), run())


def test_an_output_of_another_input_is_refused(write_jsonl: Any, run: Any) -> None:
    clean([write_jsonl("one/a.jsonl", ["x"])], preset("none"), run())
    with pytest.raises(ConfigError, match=r"made with input .*one/a.jsonl, not .*two/a.jsonl"):
        clean([write_jsonl("two/a.jsonl", ["x"])], preset("none"), run())


def test_an_input_is_never_overwritten(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    path = write_jsonl("out/a.jsonl", ["x"])
    with pytest.raises(ConfigError, match="is an input and would be overwritten"):
        clean([path], preset("none"), run())
    with pytest.raises(ConfigError, match="give --dropped a folder of its own"):
        run(dropped=tmp_path / "out")


def test_two_inputs_of_one_output_name_are_refused(write_jsonl: Any, run: Any) -> None:
    paths = [write_jsonl("a.jsonl", ["x"]), write_jsonl("a.json", ["y"])]
    with pytest.raises(ConfigError, match=r"a.jsonl and .*a.json would both be written to a.jsonl"):
        clean(paths, preset("none"), run())


def test_inputs_of_one_name_keep_their_folders(write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any) -> None:
    clean([write_jsonl("p/a.jsonl", ["x"]), write_jsonl("q/a.jsonl", ["y"])], preset("none"), run())
    assert texts_of(tmp_path / "out/q/a.jsonl") == ["y"]


def test_compression_follows_the_input(run: Any, tmp_path: Path, texts_of: Any) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x y"}\n'))
    clean([tmp_path / "a.jsonl.gz"], preset("none"), run())
    assert texts_of(tmp_path / "out/a.jsonl.gz") == ["x y"]


def test_other_keys_and_awkward_text_pass_unchanged(run: Any, tmp_path: Path) -> None:
    line = r'{"text": "emoji 😀 \u0000 \ud800 end", "meta": {"big": 123456789012345678901234567890, "nan": NaN}}'
    (tmp_path / "a.jsonl").write_text(line + "\n", encoding="utf-8")
    clean([tmp_path / "a.jsonl"], preset("none"), run())
    wanted = json.loads(line)
    written = json.loads((tmp_path / "out/a.jsonl").read_text("utf-8"))
    assert repr(written) == repr(wanted)


def test_unusable_lines_stop_or_are_counted(write_jsonl: Any, run: Any, tmp_path: Path, texts_of: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n{"txt": "y"}\nno json\n{"text": 5}\n{"text": "z"}\n')
    with pytest.raises(MalformedRecord, match=r"a.jsonl, line 2: has no key 'text' \(its keys: 'txt'\)"):
        clean([path], preset("none"), run())
    assert not (tmp_path / "out/a.jsonl").exists()
    total = clean([path], preset("none"), run(reading=Reading(on_error="skip"))).total
    assert (total.read, total.kept) == (5, 2)
    assert total.dropped["no_text"].count == 2
    assert total.dropped["malformed_line"].examples[0].startswith(f"{path}:3: ")
    assert texts_of(tmp_path / "out/a.jsonl") == ["x", "z"]


@pytest.mark.slow
def test_an_error_in_a_worker_names_the_line(write_jsonl: Any, run: Any) -> None:
    paths = [write_jsonl("a.jsonl", ["x"]), write_jsonl("b.jsonl", [{"other": 1}])]
    with pytest.raises(MalformedRecord, match=r"b.jsonl, line 1"):
        clean(paths, preset("none"), run(workers=2))


def test_a_full_disk_leaves_no_output(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    path = write_jsonl("a.jsonl", ["long text " * 1000] * 50)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(DataError, match=r"out/a.jsonl could not be written: File too large"):
            clean([path], preset("none"), run())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == [".state"]


def test_two_jobs_do_not_share_a_folder(write_jsonl: Any, run: Any, tmp_path: Path) -> None:
    path = write_jsonl("a.jsonl", ["x"])
    with locked(tmp_path / "out"), pytest.raises(DataError, match="another job is writing"):
        clean([path], preset("none"), run())


def test_a_missing_package_is_named(write_jsonl: Any, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ConfigError, match=r'pip install "mt-data\[corpus\]"'):
        clean([write_jsonl("a.jsonl", ["x"])], CleanOptions(fix_text=True), run())


STREAM = """
import sys
from pathlib import Path
from mt_data.corpora.cleaning import clean
from mt_data.corpora.clean_options import preset
from mt_data.corpora.running import RunOptions
path = Path(sys.argv[1])
clean([path], preset("none"), RunOptions(path.with_suffix(".out")))
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak.split()[1]) * 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    line = json.dumps({"text": "some words " * 400}) + "\n"

    def peak(megabytes: int) -> int:
        path = tmp_path / f"{megabytes}.jsonl"
        with open(path, "w", encoding="utf-8") as stream:
            stream.writelines(line for _ in range(megabytes * 2**20 // len(line)))
        command = [sys.executable, "-c", STREAM, str(path)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert peak(64) - peak(8) < 8 * 2**20


# Below a number of finished files it goes on; from then on each worker stops after the file that it is at.
SCRIPT = """
import signal
import sys
from pathlib import Path
from mt_data.corpora import streaming
from mt_data.corpora.deduplication import dedup
from mt_data.corpora.options import DedupOptions
from mt_data.corpora.running import RunOptions
folder, enough = Path(sys.argv[1]), float(sys.argv[2])
save_finished = streaming.save_finished
def save_and_wait(*arguments):
    save_finished(*arguments)
    while len(list(folder.glob("out/.state/**/files/*.json"))) >= enough:
        signal.pause()
streaming.save_finished = save_and_wait
if __name__ == "__main__":
    dedup([folder / "in/*"], DedupOptions(threshold=0.6, ngram=2), RunOptions(folder / "out", workers=2))
"""


def processes_of(group: int) -> list[int]:
    """The living processes of a group, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(pgrp) == group and state != "Z" else []
    return found


@pytest.mark.slow
def test_killed_at_any_moment_a_rerun_gives_the_same_bytes(
    write_jsonl: Any, run: Any, tmp_path: Path, files_below: Any
) -> None:
    corpus(write_jsonl, 8, 250)
    dedup([tmp_path / "in/*"], DedupOptions(threshold=0.6, ngram=2), run("whole"))
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    # Of 16 files: 8 of fingerprints, and 8 that are written.
    for enough in (3, 12):
        job = subprocess.Popen([sys.executable, str(script), str(tmp_path), str(enough)], start_new_session=True)
        while len(list(tmp_path.glob("out/.state/**/files/*.json"))) < enough:
            assert job.poll() is None
            time.sleep(0.02)
        job.kill()
        job.wait()
        deadline = time.monotonic() + 120
        while processes_of(job.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of(job.pid), "workers outlive a killed job"
        whole = files_below(tmp_path / "whole")
        # A worker may have been in the middle of a file, which has its name only once it is whole.
        found = {name: data for name, data in files_below(tmp_path / "out").items() if not name.endswith(".tmp")}
        assert all(whole[name] == data for name, data in found.items())
    subprocess.run([sys.executable, str(script), str(tmp_path), "inf"], check=True)
    assert files_below(tmp_path / "out") == files_below(tmp_path / "whole")
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert not (tmp_path / "out/.state/work").exists()
