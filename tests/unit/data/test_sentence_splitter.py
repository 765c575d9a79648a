"""Splitting text into sentences, and joining their translations."""

import pytest
from hypothesis import given, strategies as st

from regard.data.sentence_splitter import MAX_SENTENCE_LENGTH, count_sentences, split_text

LANGUAGES = st.sampled_from(["", "en", "de", "zh-CN"])
PIECES = [
    *(
        "Dr. Who",
        "3.",
        "e.g.",
        "Yes!”",
        "«No.»",
        "好。",
        "“嗯？”",
        "…",
        " ",
        "\n",
        "\r\n",
        "\u2028",
    ),
    *("a" * 700, "x y "),
]
TEXTS = st.text() | st.lists(st.sampled_from(PIECES)).map("".join)


@given(TEXTS, LANGUAGES)
def test_joining_unchanged_sentences_gives_the_same_text(text: str, language: str) -> None:
    assert split_text(text, language).join(split_text(text, language).sentences) == text


@given(TEXTS, LANGUAGES)
def test_sentences_are_short_lines_with_content(text: str, language: str) -> None:
    for sentence in split_text(text, language).sentences:
        assert sentence == sentence.strip()
        assert len(sentence.splitlines()) == 1
        assert len(sentence) <= MAX_SENTENCE_LENGTH
        assert any(map(str.isalnum, sentence))


@pytest.mark.parametrize(
    ("language", "sentences"),
    [
        (
            "en",
            ["Dr. J. Smith of the U.S. Army came on Jan. 3, e.g. at 3.30 p.m. or so.", "He left."],
        ),
        (
            "en",
            ["It was 1990.", "He said “Wait!”", "She did (of course).", "Why?!", "Well… so be it."],
        ),
        ("en", ["No end", "here"]),
        ("de", ["Am 3. Mai kam z. B. Hr. Meier.", "„Gut!“", "Das war 1990.", "Ende."]),
        ("zh", ["他说：“你好！”", "真的吗？", "3.5元。", "好"]),
        ("hi", ["यह एक घर है।", "हाँ।"]),
    ],
)
def test_where_sentences_end(language: str, sentences: list[str]) -> None:
    space = "" if language == "zh" else "\n" if sentences[0] == "No end" else "  "
    assert split_text(space.join(sentences), language).sentences == sentences


def test_a_sentence_does_not_begin_with_a_small_letter() -> None:
    text = "It sold well, e.g. in May.  iPhones are small."
    assert split_text(text, "en").sentences == [text]


def test_a_long_sentence_is_split_between_words() -> None:
    words = [f"word{number}" for number in range(1000)]
    found = split_text(" ".join(words)).sentences
    assert [word for sentence in found for word in sentence.split()] == words
    assert min(map(len, found[:-1])) > MAX_SENTENCE_LENGTH - 20
    assert [len(piece) for piece in split_text("字" * 1500).sentences] == [600, 600, 300]
    assert split_text("字" * 500 + "，" + "字" * 300).sentences[1] == "字" * 300


@given(TEXTS, LANGUAGES)
def test_the_count_equals_the_split_except_for_long_sentences(text: str, language: str) -> None:
    short = text.replace("a" * 700, "aaa")
    assert count_sentences(text, language) == count_sentences(short, language)
    if len(short) <= MAX_SENTENCE_LENGTH:
        assert count_sentences(short, language) == len(split_text(short, language).sentences)


@pytest.mark.parametrize(
    ("text", "translations", "joined"),
    [
        ("他来了。她走了。", ["He came.", "She left."], "He came. She left."),
        ("他来了。她走了。", ["彼は来た。", "彼女は去った。"], "彼は来た。彼女は去った。"),
        ("好。Dr. Who", ["好。", "Dr. Who"], "好。Dr. Who"),
        ("好。 她走了。\n", ["Good.", "She left."], "Good. She left.\n"),
        ("好。好！", ["", "…"], "…"),
        ("He came. She left.", ["他来了。", "她走了。"], "他来了。 她走了。"),
    ],
)
def test_a_space_is_added_where_only_the_target_script_needs_one(
    text: str, translations: list[str], joined: str
) -> None:
    assert split_text(text).join(translations) == joined
