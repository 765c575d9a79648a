"""Recasing: texts in capitals become sentence case, in Python and in the page's JavaScript."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from regard.data.protected_spans import ProtectedSpans
from regard.data.recasing import (
    is_all_caps,
    is_upper_case,
    restore_case,
    sentence_case,
    upper_case,
)

SCRIPT = Path(__file__).parents[3] / "src/regard/inspection/web/model/recasing.js"
RECASED = {
    "A MAN IN A BLUE SHIRT.": "A man in a blue shirt.",
    'STOP! "DO NOT GO." HE WENT … AWAY': 'Stop! "Do not go." He went … Away',
    "USE {name} NOW. SEE https://a.org/Bc OR %1$s": "Use {name} now. See https://a.org/Bc or %1$s",
    "{name} IS HERE, <b>NOW</b> &nbsp; a.b@c.org": "{name} is here, <b>now</b> &nbsp; a.b@c.org",
    "2 MEN WALK": "2 men walk",
    "¿QUÉ TAL? ÉL ES N.º 5": "¿Qué tal? Él es n.º 5",
    "ДВЕ СОБАКИ": "Две собаки",
    "Η ΟΔΟΣ ΜΑΣ": "Η οδος μας",
    "İKİ KEDİ": "Iki kedi",
    "ПʼЯТЬ СЛІВ": "Пʼять слів",
    "DON'T STOP": "Don't stop",
}
UNCHANGED = [
    *("", " ", "NATO", "OK", "CD-ROM", "A B", "I AM", "12 34", "NATO meets", "Hello World"),
    *("我 爱 NBA USB", "日本", "שלום", "{NAME} %S", "HTTP://A.ORG/B C", "NATO {name} 12", "ა ბგ"),
]


@pytest.mark.parametrize(("text", "recased"), RECASED.items())
def test_a_text_in_capitals_becomes_sentence_case(text: str, recased: str) -> None:
    assert is_all_caps(text)
    assert restore_case(text) == recased
    assert restore_case(recased) == recased


@pytest.mark.parametrize("text", UNCHANGED)
def test_acronyms_and_other_texts_stay(text: str) -> None:
    assert not is_all_caps(text)
    assert restore_case(text) == text


def test_upper_case_keeps_placeholders_and_terms() -> None:
    text = "der iPhone-Köter von {name} und Köters Köter"
    expected = "DER iPhone-KÖTER VON {name} UND KÖTERS KÖTER"
    assert upper_case(text, ["iPhone"]) == expected
    assert upper_case(text, ["Köter", "iPhone-Köter", " "]).endswith("{name} UND KÖTERS Köter")
    assert upper_case("die Straße") == "DIE STRASSE"


@given(st.text(st.sampled_from("aBßÉİσς. !{}x%s<b>@我1'\n"), max_size=30))
def test_case_alone_changes(text: str) -> None:
    changed = upper_case(text)
    placeholders = ProtectedSpans(("placeholders",))
    assert placeholders.find(text) == placeholders.find(restore_case(text))
    if is_upper_case(text):
        assert changed == text
    if is_all_caps(text):
        same = sentence_case(text).replace("\u0307", "").casefold()
        assert same == text.replace("\u0307", "").replace("İ", "i").casefold()


@pytest.mark.parametrize("part", [". ", "GO. {x} "])
def test_the_time_grows_in_proportion_to_the_text(part: str) -> None:
    text = "AB CD" + part * 20_000
    start = time.process_time()
    sentence_case(text)
    assert (
        time.process_time() - start < 3
    )  # 0.2 s; if it grew with the square, it would take longer


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_javascript_does_the_same() -> None:
    texts = [*RECASED, *RECASED.values(), *UNCHANGED, "die Straße {a} ǆ ß", "ß. éa", "%s 100%"]
    code = f"""
        import {{ isAllCaps, isUpperCase, sentenceCase, upperCase }} from {json.dumps(SCRIPT.as_uri())};
        const found = {json.dumps(texts)}.map((text) => [
          isAllCaps(text), isUpperCase(text), sentenceCase(text), upperCase(text)]);
        console.log(JSON.stringify(found));
    """
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code],
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for text, found in zip(texts, json.loads(done.stdout), strict=True):
        expected = [is_all_caps(text), is_upper_case(text), sentence_case(text), upper_case(text)]
        assert found == expected, text
