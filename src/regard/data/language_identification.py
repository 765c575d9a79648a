"""Language identification with py3langid: whether a text is in the expected language."""

from __future__ import annotations

from copy import copy
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

from regard.data.language_codes import normalized_code
from regard.errors import RegardError

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

_THREE_LETTERS = {
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
        language = _THREE_LETTERS.get(language, language)
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
