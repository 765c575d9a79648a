"""One engine: the same options give the same translation on every surface.

The same text and random decoding options go through Python, the command line, ``/translate``, the live stream and a
trace.
"""

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner

from regard.cli.main import app as command_line
from regard.data.glossary import Glossary
from regard.data.recasing import is_all_caps, restore_case, sentence_case, upper_case
from regard.data.words import whole_word_pattern
from regard.inspection.alignment import word_links
from regard.server.app import create_app
from regard.tasks import Translator

TEXTS = [
    *("the dog sees a cat", "no", "a big dog", "the cat sees {name} and 12 dogs"),
    *("THE DOG SEES A CAT", "THE CAT SEES {name} AND 12 DOGS"),
]

beams = st.fixed_dictionaries(
    {},
    optional={
        "beam": st.sampled_from([1, 2, 4, 6]),
        "length_penalty": st.sampled_from([0.0, 0.6, 1.5]),
        "length_normalization": st.sampled_from(["gnmt", "transformers", "ctranslate2"]),
        "extra_length": st.sampled_from([3, 8]),
        "max_length": st.sampled_from([4, 12]),
        "no_repeat_ngram": st.sampled_from([1, 2, 3]),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "coverage_penalty": st.just(0.3),
        "protect": st.sampled_from([["placeholders"], ["numbers"], ["placeholders", "numbers"]]),
    },
)
groups = st.fixed_dictionaries(
    {"beam": st.just(4), "beam_groups": st.sampled_from([2, 4])},
    optional={"diversity_penalty": st.sampled_from([0.0, 2.0])},
)
samples = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.5, 1.0, 2.0])},
    optional={
        "top_k": st.sampled_from([1, 5]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "seed": st.sampled_from([2, 7]),
        "no_repeat_ngram": st.sampled_from([1, 2]),
        "repetition_penalty": st.sampled_from([0.5, 1.5]),
        "max_length": st.sampled_from([4, 12]),
    },
)
least_risk = st.fixed_dictionaries(
    {"mbr": st.sampled_from([2, 4])}, optional={"temperature": st.sampled_from([0.5, 1.5])}
)


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path]) -> Path:
    data = {"train": {"pairs": "pairs.tsv"}, "languages": ["en", "de"]}
    training = {"augment": {"upper": 0.1}}  # recases texts in capitals
    return make_run(data=data, decoding={"extra_length": 6}, training=training)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(options=beams | groups | samples | least_risk, text=st.sampled_from(TEXTS))
def test_every_surface_gives_the_same_translation(
    run: Path, precision: Any, options: dict[str, Any], text: str
) -> None:
    model = Translator.load(run, "cpu", precision)
    (expected,) = model.translate([text], **options)
    assert model.trace(text, **options).translation == expected
    assert by_command(run, text, precision, options) == expected
    model.set_decoding(**options)
    with TestClient(create_app(model), base_url="http://localhost") as client:
        body = {"q": text, "source": "en", "target": "de"}
        assert client.post("/translate", json=body).json()["translatedText"] == expected
        events = client.post("/v1/live", json={"q": text}).text
    assert last_text(events) == expected
    if is_all_caps(text):
        assert all(one == upper_case(one) for one in all_texts(events))


TERMS = {"dog": "Köter", "cat": "Mieze", "old house": "Altbau"}
TERM_TEXTS = ["The dog sees an old house.", "A dog and a cat.", "No terms."]


@pytest.mark.parametrize("texts", [TERM_TEXTS, ["A DOG AND AN OLD HOUSE."]])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_glossary_gives_the_same_translation_on_every_surface(
    run: Path, precision: Any, texts: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "terms.tsv"
    file.write_text("".join(f"{one}\t{other}\n" for one, other in TERMS.items()), encoding="utf-8")
    glossary = Glossary.read(file)
    assert glossary.terms == TERMS
    model = Translator.load(run, "cpu", precision)
    constraints = [glossary.target_terms(text) for text in texts]
    expected = model.translate(texts, constraints=constraints)
    for text, required in zip(expected, constraints, strict=True):
        assert all(whole_word_pattern(term).search(text) for term in required)
    assert expected[:2] != model.translate(texts[:2])
    options = [f"--glossary={file}"]
    assert [by_command(run, text, precision, {}, options) for text in texts] == expected
    form = {"source": "en", "target": "de", "glossary": file.read_text(encoding="utf-8")}
    body = {**form, "glossary": TERMS}
    with TestClient(create_app(model), base_url="http://localhost") as client:

        def post(path: str, **request: Any) -> Any:
            response = client.post(path, **request)
            assert response.status_code == 200, response.text
            return response

        together = post("/translate", json={**body, "q": texts}).json()
        assert together["translatedText"] == expected
        for text, translation in zip(texts, expected, strict=True):
            assert post("/translate", data={**form, "q": text}).json() == {
                "translatedText": translation
            }
            html = {**body, "q": f"<p>{text}</p>", "format": "html"}
            assert post("/translate", json=html).json()["translatedText"] == (
                f"<p>{escape(translation, quote=False)}</p>"
            )
            assert last_text(post("/v1/live", json={"q": text, "glossary": TERMS}).text) == (
                translation
            )
            streamed = all_texts(post("/v1/translate/stream", json={**body, "q": text}).text)
            assert "".join(streamed) == translation
        upload = {"file": ("a.txt", "\n\n".join(texts).encode(), "text/plain")}
        address = post("/translate_file", data=form, files=upload).json()["translatedFileUrl"]
        assert client.get(address).text == "\n\n".join(expected)


def by_command(
    run: Path, text: str, precision: str, options: dict[str, Any], more: Sequence[str] = ()
) -> str:
    changes = [f"--set={key}={json.dumps(value)}" for key, value in options.items()]
    arguments = ["translate", str(run), text, "--precision", precision, *changes, *more]
    result = CliRunner().invoke(command_line, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip("\n")


def all_texts(events: str) -> list[str]:
    """The texts of server-sent events."""
    data = [line[len("data: ") :] for line in events.split("\n") if line.startswith("data: ")]
    texts = [json.loads(one) for one in data]
    assert not any("error" in one for one in texts), texts
    return [one["text"] for one in texts if "text" in one]


def last_text(events: str) -> str:
    return all_texts(events)[-1]


CAPITALS = "THE DOG SEES A CAT AND {name}"


def test_a_text_in_capitals_is_read_in_sentence_case_and_its_translation_upper_cased(
    run: Path,
) -> None:
    model = Translator.load(run, "cpu")
    recased = restore_case(CAPITALS)
    for options in ({}, {"beam": 3}, {"protect": ["placeholders"]}, {"mbr": 3}):
        expected = model.search([recased], **options)[0][0]
        (found, *_) = model.search([CAPITALS], **options)[0]
        assert found == expected._replace(text=upper_case(expected.text))
    assert model.encode([CAPITALS]) == model.encode([recased])
    assert model.count_tokens([CAPITALS]) == model.count_tokens([recased])
    both = model.search([CAPITALS, recased], nbest=3, beam=3)
    assert [upper_case(one.text) for one in both[1]] == [one.text for one in both[0]]
    # A prefix in capitals is recased too, and a prefix of the page is the same.
    (begins,) = model.translate([CAPITALS], prefixes=["DER HUND"])
    assert begins.startswith("DER HUND")
    assert begins == upper_case(*model.translate([recased], prefixes=["Der hund"]))
    assert model.trace(CAPITALS, prefix="DER HUND").translation == begins
    # A prefix in mixed case stays as it was given.
    for prefix in ("Der", "Der Hund"):
        (begins_mixed,) = model.translate([CAPITALS], prefixes=[prefix])
        (plain,) = model.translate([recased], prefixes=[prefix])
        assert begins_mixed == prefix + upper_case(plain[len(prefix) :])
        assert model.trace(CAPITALS, prefix=prefix).translation == begins_mixed
        assert by_command(run, CAPITALS, "fp32", {}, [f"--prefix={prefix}"]) == begins_mixed
    # Required terms keep their case.
    (term,) = model.translate([CAPITALS], constraints=[["Köter"]])
    assert whole_word_pattern("Köter").search(term)
    assert term == upper_case(term, keep=["Köter"])
    # The alignment has the words of the texts that were given.
    translation = begins
    assert word_links(model, CAPITALS, translation) == word_links(
        model, recased, sentence_case(translation)
    )
    for text in ("NATO", "The dog", "no"):
        assert model.encode([text]) == [model.tokenizer.source.encode([text])[0]]


def test_without_augmentation_texts_in_capitals_stay(make_run: Callable[..., Path]) -> None:
    model = Translator.load(make_run(decoding={"extra_length": 6}), "cpu")
    assert model.encode([CAPITALS]) == model.tokenizer.source.encode([CAPITALS])
    (translation,) = model.translate([CAPITALS], prefixes=["Der Hund"])
    assert translation.startswith("Der Hund")


def test_prefix_and_sampling_are_options_of_the_command(run: Path) -> None:
    text = TEXTS[0]
    model = Translator.load(run, "cpu")
    (begins,) = model.translate(
        [text], prefixes=["Der"], temperature=0.7, top_k=5, top_p=0.9, seed=3
    )
    arguments = ["translate", str(run), text, "--precision", "fp32", "--prefix", "Der"]
    sampling = ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9", "--seed", "3"]
    result = CliRunner().invoke(command_line, [*arguments, *sampling])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip("\n") == begins
    assert begins.startswith("Der")
