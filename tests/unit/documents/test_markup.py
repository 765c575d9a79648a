"""Documents are split into sentences and joined again: no tag is lost, and splitting takes linear time."""

import time
from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from regard.data.words import word_and_symbol_spans
from regard.documents.markup import Document, split_html, split_plain, tokenize_html
from tests.unit.data.test_sentence_splitter import LANGUAGES, PIECES

MARKUP = [
    *("<p>", "</p>", "<b class='a>b'>", "</B >", "<br/>", '<i title="x.">', "</i>", "<a href=x/>"),
    *(
        "<!-- No. Yes. -->",
        "<!-->",
        "<!--",
        "<!DOCTYPE html>",
        "<?php ?>",
        "</>",
        "<",
        "< b",
        "<a b='",
    ),
    *("<script>", "</script>", "<code>", "</code>", "<p translate=no>", "<style>", "</style >"),
    *("&", "&amp;", "&lt;b>", "&nbsp;", "&#60;", "&#xD800;", "&copy", ">", '"'),
]
DOCUMENTS = st.text() | st.lists(st.sampled_from(MARKUP + PIECES)).map("".join)


def rejoin(document: Document) -> str:
    return document.join(document.sentences)


def test_plain_text_is_not_escaped() -> None:
    document = split_plain("a < b. C &amp; d", "en")
    assert document.join([sentence.upper() for sentence in document.sentences]) == (
        "A < B. C &AMP; D"
    )


@given(DOCUMENTS, LANGUAGES, st.booleans())
def test_an_untranslated_document_is_unchanged(source: str, language: str, atoms: bool) -> None:
    assert rejoin(split_html(source, language, atoms=atoms)) == source


INLINE_MARKUP = [
    "<b>",
    "</b>",
    "<i x='>'>",
    "</i>",
    "<A href=y>",
    "</a>",
    "a dog",
    " ",
    "cat. Dog",
    "。",
    "<p>",
    "犬",
]


@given(DOCUMENTS | st.lists(st.sampled_from(INLINE_MARKUP)).map("".join), st.text(), st.randoms())
def test_no_tag_is_lost_for_any_translation_and_alignment(
    source: str, translation: str, random: Random
) -> None:
    document = split_html(source)
    alignments = [
        np.array(
            [
                [random.random() for _ in word_and_symbol_spans(sentence)]
                for _ in word_and_symbol_spans(translation)
            ],
            dtype=np.float32,
        ).reshape(len(word_and_symbol_spans(translation)), len(word_and_symbol_spans(sentence)))
        for sentence in document.sentences
    ]
    translated = document.join([translation] * len(document.sentences), alignments)
    tags = [token.text for token in tokenize_html(source) if token.tag]
    assert sorted(tags_of(translated)) == sorted(tags)


def tags_of(source: str) -> list[str]:
    return [token.text for token in tokenize_html(source) if token.tag]


TREES = st.recursive(
    st.sampled_from(["the dog", "犬が", "x", " ", "It sleeps. No", "&amp;", ""]),
    lambda inner: st.tuples(st.sampled_from(["b", "i", "a", "span"]), st.lists(inner, max_size=4)),
    max_leaves=20,
)
Tree = str | tuple[str, list["Tree"]]


def write_tree(tree: Tree, count: Iterator[int]) -> str:
    if isinstance(tree, str):
        return tree
    name, inner = tree
    number = next(count)
    return f"<{name} n={number}>{''.join(write_tree(one, count) for one in inner)}</{name} >"


@given(TREES, st.text("ab 犬.", max_size=20), st.randoms())
def test_elements_stay_nested_for_any_alignment(
    tree: Tree, translation: str, random: Random
) -> None:
    source = write_tree(("b", [tree]), count())
    document = split_html(f"<p>{source}</p>")
    alignments = [
        np.random.default_rng(random.randrange(99)).random(
            (len(word_and_symbol_spans(translation)), len(word_and_symbol_spans(sentence))),
            dtype=np.float32,
        )
        for sentence in document.sentences
    ]
    translated = document.join([translation] * len(document.sentences), alignments)
    open_tags: list[str] = []
    for token in tokenize_html(translated):
        if token.tag and token.tag["close"]:
            assert open_tags.pop() == token.tag["name"], "closes the innermost element"
        elif token.tag:
            open_tags.append(token.tag["name"])
    assert open_tags == []
    assert sorted(tags_of(translated)) == sorted(tags_of(f"<p>{source}</p>"))
    assert document.join(document.sentences) == f"<p>{source}</p>"


def test_tags_follow_their_words() -> None:
    document = split_html('Yes. I have seen the <a href="x">big <b>dog</b></a> <i>today</i>!', "en")
    assert document.sentences == ["Yes.", "I have seen the big dog today!"]
    translation = "Heute habe ich den großen Hund gesehen!"
    pairs = [(0, 6), (1, 1), (2, 0), (3, 3), (4, 4), (5, 5), (6, 2), (7, 7)]
    alignment = np.zeros((8, 8), dtype=np.float32)
    for target, sentence in pairs:
        alignment[target, sentence] = 1
    assert document.join(["Ja.", translation], [None, alignment]) == (
        'Ja. <i>Heute</i> habe ich den <a href="x">großen <b>Hund</b></a> gesehen!'
    )


def test_an_unpaired_tag_ends_its_sentence() -> None:
    assert split_html("a <b>dog. A</b> cat").sentences == ["a", "dog.", "A", "cat"]
    assert split_html("<b>A dog. A cat.</b>", "en").sentences == ["A dog.", "A cat."]
    assert split_html("a <b><i>dog</b></i> cat").sentences == ["a", "dog", "cat"]
    # Without a space between sentences, a closing tag belongs to the sentence before it.
    assert split_html("犬が<b>走る。</b>猫が寝る。", "ja").sentences == ["犬が走る。", "猫が寝る。"]
    assert split_html("犬が走る。<b>猫</b>が寝る。", "ja").sentences == ["犬が走る。", "猫が寝る。"]
    many = "a " + "<b>dog</b> " * 65
    assert len(split_html(many).sentences) == 66


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("<p>a <b>b <i>c</i></b>\n d. E</p>", "<p>A <b>B <i>C</i></b> D. E</p>"),
        ("<pre>a\n b</pre>", "<pre>A\n B</pre>"),
        ('<P TITLE="a > b">a</P >', '<P TITLE="a > b">A</P >'),
        ("a &lt;b&gt; &amp; c&nbsp;d", "A &lt;B&gt; &amp; C&nbsp;D"),
        ("<script>a < b</script>c", "<script>a < b</script>C"),
        ("<SCRIPT>'</p>' x</Script >c", "<SCRIPT>'</p>' x</Script >C"),
        ("<code>a <code>b</code> c</code>d", "<code>a <code>b</code> c</code>D"),
        (
            "<div translate='no'>a<br>b<div>c</div>d</div>e",
            "<div translate='no'>a<br>b<div>c</div>d</div>E",
        ),
        ("<img translate=no>a<code/>b", "<img translate=no>A<code/>B"),
        ('<b class="x notranslate">a</b>b', '<b class="x notranslate">a</b>B'),
        ('<b class="notranslated">a</b> b', '<b class="notranslated">A</b> B'),
        ("<!-- a -->b<!-->c<!DOCTYPE html>d", "<!-- a -->B<!-->C<!DOCTYPE html>D"),
        ("a < b <3 c", "A &lt; B &lt;3 C"),
        ("a <b unclosed", "A <b unclosed"),
        (f"&#{'9' * 5000}; a", f"&#{'9' * 5000}; a"),
    ],
)
def test_which_parts_of_a_document_are_translated(source: str, translated: str) -> None:
    document = split_html(source, "en")
    assert document.join([sentence.upper() for sentence in document.sentences]) == translated


@pytest.mark.parametrize(
    "unit",
    [
        "<!--",
        "<a b='",
        "<a b= ",
        "<a",
        "<",
        "</",
        "<script>",
        "<b>",
        "<b>a</b>",
        "<b>a ",
        "<b></b>",
        "&",
        "&#9",
        ".",
        "Dr. ",
        " ",
        "。”",
    ],
)
def test_splitting_takes_linear_time(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    split_plain(text, "en")
    split_html(text, "en")
    assert time.process_time() - start < 3  # quadratic time would take minutes
