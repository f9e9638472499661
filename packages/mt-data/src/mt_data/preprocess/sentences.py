"""Cutting text into sentences: by rules (the default; needs nothing), or by NLTK's Punkt when its data is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from mt_core.errors import ConfigError, DataError, did_you_mean

if TYPE_CHECKING:
    from mt_data.preprocess.options import Splitter


# -- languages: abbreviations whose period ends no sentence ------------------------------------------


@dataclass(frozen=True)
class Language:
    """titles: never end a sentence. abbreviations: end one only before a word of `starters`.

    All are in small letters and without their last period. ordinal_period: "3." may mean "third".
    """

    titles: frozenset[str] = frozenset()
    abbreviations: frozenset[str] = frozenset()
    starters: frozenset[str] = frozenset()
    ordinal_period: bool = False


def _language(titles: str = "", abbreviations: str = "", starters: str = "", ordinal: bool = False) -> Language:
    return Language(frozenset(titles.split()), frozenset(abbreviations.split()), frozenset(starters.split()), ordinal)


LANGUAGES: dict[str, Language] = {
    "english": _language(
        "mr mrs ms mx dr prof rev hon gen col lt sgt capt cpt cmdr maj gov sen rep pres st messrs mmes "
        "vs viz cf al fig figs eq eqs sec ch vol pp ed eds approx no nos art arts ref refs tab",
        "etc inc ltd co corp bros jr sr ph.d dept est ave blvd rd mt ft ca jan feb mar apr jun jul aug sep "
        "sept oct nov dec mon tue wed thu fri sat sun univ assn gal min max avg",
        "the a an this that these those he she it we they you his her its our their there here in on at as "
        "but and or so if when while after before since because although however moreover then now yet "
        "what who why how where which no not all some many most one two",
    ),
    "german": _language(
        "hr hrn fr dr prof dipl ing st bzw vgl z.b d.h u.a i.d.r s.o s.u z.t o.ä sog ca abs art nr bd hrsg "
        "kap abb tab evtl ggf inkl exkl max min tel str geb gest verh bes insb allg",
        "usw etc jan feb apr jun jul aug sep okt nov dez jh mio mrd u.s.w",
        "der die das ein eine er sie es wir ihr ich du im in am an auf bei mit nach von vor zu doch aber und "
        "dann so wenn als da dies diese dieser dieses man nun nur hier auch",
        ordinal=True,
    ),
    "french": _language(
        "m mm mme mlle dr pr me mgr st ste cf p.ex env art fig chap vol p pp n° no éd trad",
        "etc av janv févr avr juil sept oct nov déc apr j.-c",
        "le la les un une il elle ils elles on nous vous je tu ce cette ces dans en au aux mais et ou donc "
        "or ni car si quand comme pour par sur",
    ),
    "spanish": _language(
        "sr sra srta sres dr dra prof profa lic ing d dña ud uds vd vds p.ej cf art fig cap vol pág págs núm "
        "tel av avda st sto sta",
        "etc ee.uu s.a a.c d.c aprox ene feb mar abr may jun jul ago sept oct nov dic",
        "el la los las un una él ella ellos ellas nosotros yo tú este esta esto estos en por para con pero y "
        "o si cuando como no se",
    ),
    "italian": _language(
        "sig sigg sig.ra sig.na dott dott.ssa prof prof.ssa ing avv geom arch on s st cfr art fig cap vol "
        "pag pagg p pp n tel ad es p.es",
        "ecc etc s.p.a s.r.l a.c d.c gen feb mar apr mag giu lug ago set ott nov dic",
        "il lo la i gli le un una egli ella essi io tu noi voi questo questa in nel per con ma e o se quando "
        "come non si",
    ),
    "portuguese": _language(
        "sr sra srta dr dra prof profa eng d exmo exma v.ex p.ex cf art fig cap vol pág págs núm tel av",
        "etc ltda s.a e.u.a a.c d.c jan fev mar abr mai jun jul ago set out nov dez",
        "o a os as um uma ele ela eles elas nós eu este esta isto em no na por para com mas e ou se quando como não",
    ),
    "dutch": _language(
        "dhr mevr mw dr drs prof ir ing mr st bijv bv d.w.z o.a m.a.w t.a.v t.o.v n.a.v i.v.m a.d.h.v vgl ca "
        "nr art blz fig hfst max min",
        "enz etc jan feb mrt apr jun jul aug sept okt nov dec jl",
        "de het een hij zij ze wij we ik je dit dat deze die in op aan bij met na van voor maar en of als toen dan er",
    ),
    "swedish": _language(
        "hr fr dr prof st t.ex bl.a d.v.s dvs s.k t.o.m fr.o.m jfr ca nr art fig kap kl tel",
        "etc osv m.m m.fl jan feb mar apr jun jul aug sept okt nov dec",
        "en ett den det de han hon vi jag du i på av för med men och eller om när då som",
    ),
    "danish": _language(
        "hr fr dr prof skt f.eks bl.a dvs d.v.s jf ca nr art fig kap kl tlf pga",
        "etc osv m.m m.fl jan feb mar apr jun jul aug sep okt nov dec",
        "en et den det de han hun vi jeg du i på af for med men og eller hvis når da som",
        ordinal=True,
    ),
    "norwegian": _language(
        "hr fr dr prof st f.eks bl.a dvs d.v.s jf ca nr art fig kap kl tlf pga",
        "etc osv m.m m.fl jan feb mar apr jun jul aug sep okt nov des",
        "en et ei den det de han hun vi jeg du i på av for med men og eller hvis når da som",
        ordinal=True,
    ),
    "finnish": _language(
        "hra rva nti tri prof dos esim mm ts ks vrt nro art kpl klo puh n",
        "jne ym yms tms jaa",
        "hän he se ne tämä nämä minä sinä me te mutta ja tai jos kun niin",
        ordinal=True,
    ),
    "czech": _language(
        "p pí sl dr mudr judr phdr rndr ing mgr bc prof doc sv např tzn tj tzv mj srov viz č čl obr kap str tel",
        "atd apod aj",
        "ten ta to on ona oni my já ty v na po před ale a nebo když pokud jak",
        ordinal=True,
    ),
    "polish": _language(
        "p pan pani dr prof doc mgr inż ks św hab np m.in tj tzn tzw por ok nr art rys rozdz str tel ul im",
        "itd itp r w",
        "ten ta to on ona oni my ja ty w na po przed ale i lub albo gdy jeśli jak",
        ordinal=True,
    ),
    "russian": _language(
        "г гр гг ул пр просп пл пер д корп кв обл р-н им проф акад доц инж т.е т.н т.к ср см рис табл гл стр с напр",
        "др пр т.д т.п руб коп тыс млн млрд н.э",
        "он она они оно мы я ты вы это этот эта эти в на по при но и а или если когда как так",
    ),
    "greek": _language("κ κα κος δρ καθ π.χ δηλ βλ σελ αρ κεφ εικ πρβλ", "κ.λπ κ.ά κλπ", "ο η το οι τα ένας μια"),
    "turkish": _language(
        "dr prof doç av sn bkz örn yy no", "vb vs vd", "bu şu o bir biz ben sen ve ama fakat eğer", ordinal=True
    ),
    "chinese": _language(),
    "japanese": _language(),
    "hindi": _language(),
    "arabic": _language(),
    "generic": _language(),
}
"""`--lang` by name. "generic" has no abbreviation: marks, white space and capital letters alone decide."""


SplitSentences = Callable[[str], list[str]]
"""A text to its sentences. Without their white space, or (keep_newlines) such that joined they are the text."""

Spans = Callable[[str], Iterable[tuple[int, int]]]
"""A text to (begin, end) of its sentences, in order, without the white space between them."""

RULES_VERSION = 1
"""Grows when the rules cut any text differently: unfinished runs by other rules are not continued."""

_CLOSERS = "\"'”’»›)]}」』】》）"
_OPENERS = "\"'“‘„«‹([{「『【《（¿¡-–—•*"
_CLOSER, _OPENER = f"[{re.escape(_CLOSERS)}]", f"[{re.escape(_OPENERS)}]"
_WIDE_MARKS = "。！？｡"
"""Marks of scripts that write no space behind them."""
# No part of the pattern goes back over what it took, so that its time is linear in the text.
# Marks with closing quotes and brackets behind them, or a blank line. ++ and *+ are possessive (Python 3.11).
_CANDIDATE = re.compile(rf"[.!?…؟۔।॥{_WIDE_MARKS}]++{_CLOSER}*+|\n[^\S\n]*+\n")
_LAST_WORD = re.compile(r"\S*$")
_MAX_WORD = 40
"""Characters looked back for the word before a period; abbreviations are shorter."""
_NEXT_WORD = re.compile(rf"\s*{_OPENER}*([^\s.,;:]*)")


def build_splitter(splitter: Splitter, lang: str, keep_newlines: bool) -> SplitSentences:
    """The function that `--sentence-splitter` and `--lang` name. ConfigError for a language it has no rules for."""
    spans = _punkt_spans(lang) if splitter == "nltk" else _rule_spans(lang)
    if keep_newlines:
        return lambda text: _covering(text, spans(text))
    return lambda text: [text[begin:end] for begin, end in spans(text)]


def splitter_identity(splitter: Splitter, lang: str, keep_newlines: bool) -> str:
    """Names what decides where sentences end, so that data cut by different rules is distinguished."""
    if splitter == "nltk":
        import nltk

        return f"nltk {nltk.__version__} punkt {lang} keep_newlines={keep_newlines}"
    return f"rules {RULES_VERSION} {lang} keep_newlines={keep_newlines}"


def sentence_spans(text: str, language: Language) -> Iterator[tuple[int, int]]:
    """(begin, end) of each sentence, without the white space around it; a sentence is never empty."""
    begin = 0
    for match in _CANDIDATE.finditer(text):
        if _ends_sentence(text, begin, match, language):
            yield from _stripped(text, begin, match.end())
            begin = match.end()
    yield from _stripped(text, begin, len(text))


def _ends_sentence(text: str, begin: int, match: re.Match[str], language: Language) -> bool:
    candidate, end = match.group(), match.end()
    # A blank line and marks such as U+3002 end a sentence whatever follows; the rest needs white space behind it, which
    # excludes "3.14" and "example.com".
    mark = candidate[0]
    if mark == "\n" or candidate.rstrip(_CLOSERS)[-1] in _WIDE_MARKS:
        return True
    if not text[end : end + 1].isspace():
        return False
    following = _NEXT_WORD.match(text, end)
    next_word = following.group(1) if following else ""
    # The sentence goes on: "approx. ten", "Wait... what". In scripts without case no letter is a small one.
    if mark in ".!?…" and next_word[:1].islower():
        return False
    # "!", "?", "..." and a period with a quote behind it end the sentence; only a lone period may be an abbreviation's.
    if candidate != ".":
        return True
    # search with bounds instead of a slice; `end - 1` is the place of the period. $ matches at the given end.
    word = _LAST_WORD.search(text, max(begin, end - 1 - _MAX_WORD), end - 1)
    return word is None or _period_ends(text, word, next_word, language)


def _period_ends(text: str, match: re.Match[str], next_word: str, language: Language) -> bool:
    """Whether the period behind a word ends a sentence, when `next_word` follows and does not begin small."""
    word = match.group().lstrip(_OPENERS)
    lower = word.lower()
    if lower in language.titles or (len(word) == 1 and word.isupper() and word != "I"):
        return False  # "Dr. Smith", "J. Smith"
    if word.isdecimal():
        begins_line = match.start() == 0 or text[match.start() - 1] == "\n"
        return not begins_line and not (language.ordinal_period and len(word) <= 2)  # "1. Item", "3. Oktober"
    if "." in word or lower in language.abbreviations:
        return next_word.lower() in language.starters  # "the U.S. Army", but "in the U.S. The"
    return True


def _stripped(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    piece = text[begin:end]
    left = len(piece) - len(piece.lstrip())
    if left < len(piece):
        yield begin + left, begin + len(piece.rstrip())


def _covering(text: str, spans: Iterable[tuple[int, int]]) -> list[str]:
    """The text cut where the sentences after the first begin."""
    # The first sentence takes the white space before it too, so that nothing of the text is lost.
    cuts = [0, *[begin for begin, _ in spans][1:], len(text)]
    return [text[begin:end] for begin, end in pairwise(cuts) if begin < end]


def _rule_spans(lang: str) -> Spans:
    if lang not in LANGUAGES:
        raise ConfigError(
            f"--lang {lang}: there are rules for {', '.join(LANGUAGES)}{did_you_mean(lang, LANGUAGES)}; "
            "generic serves any other"
        )
    language = LANGUAGES[lang]
    return lambda text: sentence_spans(text, language)


def _punkt_spans(lang: str) -> Spans:
    try:
        from nltk.tokenize import PunktTokenizer
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--sentence-splitter nltk needs NLTK (pip install nltk, or mt-data[nltk]); --sentence-splitter rules "
            "needs nothing"
        ) from error
    try:
        return PunktTokenizer(lang).span_tokenize
    except LookupError as error:
        raise DataError(
            f'NLTK has no Punkt data for "{lang}" on this machine (python -m nltk.downloader punkt_tab gets it); '
            "--sentence-splitter rules needs none"
        ) from error
