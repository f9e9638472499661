"""Where the rules end a sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_data.preprocess.sentences import build_splitter

CASES = [
    ("english", "He left. She stayed! Why? No.", ["He left.", "She stayed!", "Why?", "No."]),
    ("english", "Dr. J. R. Smith met Mr. Lee at 3.14 p.m. today.", 1),
    ("english", "It is in the U.S. The flag of the U.S. Army.", ["It is in the U.S.", "The flag of the U.S. Army."]),
    ("english", 'He said "Go!" and left. "Why?" she asked. (He ran.) Then "x."', 4),
    ("english", "See e.g. Fig. 3, no. 5. It rose by 1.5 in 1999. Then it fell...", 3),
    ("english", "A heading\n\nA text over\ntwo lines. End", ["A heading", "A text over\ntwo lines.", "End"]),
    ("english", "1. First point.\n2. Second point.", ["1. First point.", "2. Second point."]),
    ("english", "Visit www.example.org?a=b now. Or else.", 2),
    ("english", "Wait... What?! Yes…  so it is.", ["Wait...", "What?!", "Yes…  so it is."]),
    ("english", " \n \n ", []),
    ("german", "Am 3. Oktober kam z.B. Dr. Meier. Er blieb bis 1999. Dann ging er.", 3),
    ("french", "M. Dupont habite ici, cf. Paris. Il part.", 2),
    ("russian", "В 1999 г. он жил в г. Москва и т.д. Он уехал.", 2),
    ("chinese", "你好。今天天气很好！“真的吗？”是的。", ["你好。", "今天天气很好！", "“真的吗？”", "是的。"]),
    ("hindi", "यह पहला वाक्य है। यह दूसरा है।", 2),
]


@pytest.mark.parametrize(("lang", "text", "expected"), CASES)
def test_sentences(lang: str, text: str, expected: list[str] | int) -> None:
    found = build_splitter("rules", lang, False)(text)
    assert (len(found) if isinstance(expected, int) else found) == expected, found


@given(st.text(alphabet="ab Z.!?\n\r\t\"')“”。é1\u2028\u200b🙂", max_size=60))
def test_nothing_is_lost(text: str) -> None:
    sentences = build_splitter("rules", "english", False)(text)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence and sentence == sentence.strip() for sentence in sentences)
    kept = build_splitter("rules", "english", True)(text)
    assert "".join(kept) == text
    assert all(kept)


@pytest.mark.slow
@pytest.mark.parametrize("piece", [".", '."', "a. ", "\n", "a\n ", "! a", ". A", " ", "Dr. ", "a" + " " * 1000])
def test_time_is_linear_in_the_text(piece: str) -> None:
    split = build_splitter("rules", "english", False)
    started = time.process_time()
    split(piece * (400_000 // len(piece)))
    assert time.process_time() - started < 3


def test_unknown_language() -> None:
    with pytest.raises(ConfigError, match=r'--lang germn: there are rules for .*did you mean "german"'):
        build_splitter("rules", "germn", False)


@pytest.mark.slow
def test_punkt_when_its_data_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk", reason="NLTK is not installed")
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    with pytest.raises(DataError, match=r'no Punkt data for "english".*--sentence-splitter rules needs none'):
        build_splitter("nltk", "english", False)
    trainer = PunktTrainer("Mr. A met Mr. B and Mr. C. They left with Mr. D. Mr. E stayed. " * 20)
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    save_punkt_params(trainer.get_params(), str(folder))
    text = " Mr. A left. Mr. B stayed.\n\nWhy?  "
    assert build_splitter("nltk", "english", False)(text) == [" Mr. A left.", "Mr. B stayed.", "Why?"]
    assert "".join(build_splitter("nltk", "english", True)(text)) == text
