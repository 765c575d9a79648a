"""Language identification with py3langid: whether a text is in the expected language; and language codes in files."""

from __future__ import annotations

import re
from copy import copy
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from regard.errors import RegardError

# ---------------------------------------------------------------------------------------------
# Language codes as they occur in headers, keys, ``xml:lang`` and file names


_TWO_LETTERS = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_THREE_LETTERS = """
afr amh ara arb asm ast azj bel ben bos bul cat ceb ces ckb cmn cym dan deu dsb ell eng epo est eus fas fil fin fra fry
gla gle glg guj hat hau heb hin hrv hsb hun hye ibo ind isl ita jav jpn kab kan kat kaz khm kin kir kmr kor kur lao
lat lav lin lit ltz lug lvs mal mar mkd mlt mon mri msa mya nds nep nld nno nob nor npi nya oci ory pan pbt pes pol por
prs pus ron rus san sin slk slv sme smo sna snd som sot spa sqi srp sun swa swe swh szl tam tat tel tgk tgl tha tir tsn
tuk tur uig ukr urd uzb uzn vec vie wol xho yid yor yue zho zsm zul
"""
KNOWN_CODES = frozenset((_TWO_LETTERS + _THREE_LETTERS).split())
"""ISO 639-1, and the codes of ISO 639-3 that parallel corpora use"""

_NAMES = """
afrikaans af, albanian sq, amharic am, arabic ar, armenian hy, basque eu, belarusian be, bengali bn, bosnian bs,
bulgarian bg, catalan ca, chinese zh, croatian hr, czech cs, danish da, dutch nl, english en, esperanto eo,
estonian et, finnish fi, french fr, galician gl, georgian ka, german de, greek el, gujarati gu, hausa ha, hebrew
he, hindi hi, hungarian hu, icelandic is, igbo ig, indonesian id, irish ga, italian it, japanese ja, kazakh kk,
korean ko, latin la, latvian lv, lithuanian lt, macedonian mk, malay ms, maltese mt, mongolian mn, nepali ne,
norwegian no, persian fa, polish pl, portuguese pt, romanian ro, russian ru, serbian sr, slovak sk, slovenian
sl, spanish es, swahili sw, swedish sv, tamil ta, thai th, turkish tr, ukrainian uk, urdu ur, vietnamese vi,
welsh cy, wolof wo, xhosa xh, yiddish yi, yoruba yo, zulu zu
"""
_NATIVE_NAMES = """
deutsch de, englisch en, français fr, anglais en, español es, inglés en, italiano it, inglese en, português pt,
inglês en, nederlands nl, engels en, dansk da, norsk no, svenska sv, engelska en, suomi fi, polski pl, čeština
cs, slovenčina sk, magyar hu, română ro, türkçe tr, ελληνικά el, русский ru, английский en, українська uk,
العربية ar, 中文 zh, 英文 en, 日本語 ja, 英語 en, 한국어 ko, 영어 en, kiswahili sw
"""
_CODES = dict(entry.split() for entry in (_NAMES + "," + _NATIVE_NAMES).split(","))
"""by English name, native name and native name of English, which spreadsheets have as headings"""
LANGUAGE_NAMES = {
    code: name.capitalize() for name, code in (entry.split() for entry in _NAMES.split(","))
}
"""English names by code"""

_CODE = re.compile(r"([A-Za-z]{2,3})(?:[-_][A-Za-z]{4})?(?:[-_](?:[A-Za-z]{2}|\d{3}))?")
"""a language, perhaps with a script and a region: de, de-AT, zh_Hans_CN, deu_Latn"""


def language_code(text: str) -> str | None:
    """The language code that a heading, a key or a suffix consists of; None if it is not one.

    ``de``, ``DE``, ``de-AT``, ``deu_Latn`` and ``German`` are language codes, ``id`` as the name of a column is not.
    """
    text = text.strip()
    if code := _CODES.get(text.casefold()):
        return code
    match = _CODE.fullmatch(text)
    return text if match and match[1].lower() in KNOWN_CODES else None


def primary_subtag(code: str) -> str:
    """The language of a code without script and region: ``zh`` for ``zh-Hant``."""
    return normalized_code(code).partition("-")[0]


def normalized_code(code: str) -> str:
    """A code as it is compared: lower case, with hyphens."""
    return code.strip().casefold().replace("_", "-")


@lru_cache(maxsize=1024)  # a large file asks for every text
def is_language(code: str, language: str) -> bool:
    """Whether ``code`` is the language or a variant of it: ``de-AT`` is ``de``, but not the reverse."""
    code, language = normalized_code(code), normalized_code(language)
    return code == language or code.startswith(f"{language}-")


# ---------------------------------------------------------------------------------------------
# Identification


_WIDESPREAD = """
ar bg bn ca cs da de el en es et fa fi fr he hi hr hu id it ja ko lt lv nl no pl pt ro ru sk sl sv ta th tr uk ur vi zh
"""
WIDESPREAD = frozenset(_WIDESPREAD.split())
"""languages that stray texts are in; with fewer candidates, short texts are recognised better"""

_FAMILIES = (
    *(
        "af nl",
        "an ca es",
        "az tr tk crh",
        "be ru uk",
        "bg mk",
        "bs hr sr sl",
        "ca oc",
        "cs sk",
        "da nn no sv fo",
    ),
    *(
        "de lb",
        "en pcm",
        "es gl pt an ext",
        "et fi",
        "fa ps tg",
        "fr wa oc",
        "gd ga",
        "hi mr ne sa",
        "id ms jv",
    ),
    *(
        "it lij vec",
        "kk ky tt ba",
        "lt lv ltg",
        "nso st",
        "rw sn",
        "xh zu",
        "zh yue wuu",
        "ar ary arz",
        "uz uzs",
    ),
)
"""languages that are hard to tell apart in one sentence"""

_SHORT_CODES = {
    "deu": "de",
    "eng": "en",
    "fra": "fr",
    "spa": "es",
    "ita": "it",
    "por": "pt",
    "nld": "nl",
    "rus": "ru",
    "ukr": "uk",
    "pol": "pl",
    "ces": "cs",
    "zho": "zh",
    "cmn": "zh",
    "jpn": "ja",
    "ara": "ar",
    "arb": "ar",
    "hau": "ha",
    "ibo": "ig",
    "yor": "yo",
    "swa": "sw",
    "zul": "zu",
    "nb": "no",
    "nob": "no",
    "nno": "nn",
    "swe": "sv",
    "dan": "da",
    "fin": "fi",
    "tur": "tr",
}
"""codes that py3langid has by another name"""


class LanguageIdentifier:
    """Decides whether texts are in one expected language."""

    def __init__(self, language: str, model: Any) -> None:
        self.model = model
        related = {
            code for family in _FAMILIES if language in family.split() for code in family.split()
        }
        self.expected = {language, *related}
        """languages that count as the expected one"""
        candidates = (WIDESPREAD | self.expected) & {*model.labels}
        model.set_languages(sorted(candidates))

    @classmethod
    def create(cls, code: str) -> LanguageIdentifier | None:
        """The identifier of a language, or None if py3langid does not know the language."""
        model = copy(_load_model())
        language = normalized_code(code).split("-")[0]
        language = _SHORT_CODES.get(language, language)
        return cls(language, model) if language in model.labels else None

    def is_other(self, text: str, min_probability: float) -> bool:
        """Whether a text is in another language with at least this probability."""
        language, probability = self.model.classify(text)
        return language not in self.expected and probability >= min_probability


@cache
@lru_cache(32)
def identify_among(*languages: str) -> Any:
    """py3langid restricted to some languages; None if it is not installed or does not know one of them."""
    if not is_installed():
        return None
    model = copy(_load_model())
    if not {*languages} <= {*model.labels}:
        return None
    model.set_languages([*languages])
    return model


@cache
def _load_model() -> Any:
    """The model of all languages; loading it takes half a second."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier as Model
    except ImportError:
        raise RegardError(
            "language identification needs py3langid: pip install 'regard[language-id]', or --skip language"
        ) from None
    return Model.from_model_file(MODEL_FILE, norm_probs=True)


def is_installed() -> bool:
    """Whether py3langid is installed."""
    return find_spec("py3langid") is not None
