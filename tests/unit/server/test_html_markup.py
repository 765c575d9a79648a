"""Documents are taken apart and put together again: no tag is lost, no text takes long."""

import re
import time
from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st
from test_sentences import LANGUAGES, PIECES

from regard.data.words import units
from regard.server.html_markup import Document, parts_of, split_html, split_plain

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


def same(document: Document) -> str:
    return document.join(document.sentences)


def test_a_plain_text_is_written_as_it_is() -> None:
    document = split_plain("a < b. C &amp; d", "en")
    assert document.join([sentence.upper() for sentence in document.sentences]) == (
        "A < B. C &AMP; D"
    )


@given(DOCUMENTS, LANGUAGES)
def test_a_document_left_alone_is_the_same_but_for_entities(source: str, language: str) -> None:
    once = same(split_html(source, language))
    assert same(split_html(once, language)) == once
    if not re.search("[&<>\xa0]", source):
        assert once == source


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
def test_no_tag_is_lost_whatever_translation_and_alignment_are(
    source: str, translation: str, random: Random
) -> None:
    document = split_html(source)
    alignments = [
        np.array(
            [[random.random() for _ in units(sentence)] for _ in units(translation)],
            dtype=np.float32,
        ).reshape(len(units(translation)), len(units(sentence)))
        for sentence in document.sentences
    ]
    translated = document.join([translation] * len(document.sentences), alignments)
    tags = [stretch.text for stretch in parts_of(source) if stretch.tag]
    assert sorted(tags_of(translated)) == sorted(tags)


def tags_of(source: str) -> list[str]:
    return [stretch.text for stretch in parts_of(source) if stretch.tag]


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
def test_elements_stay_nested_whatever_the_alignment_is(
    tree: Tree, translation: str, random: Random
) -> None:
    source = write_tree(("b", [tree]), count())
    document = split_html(f"<p>{source}</p>")
    alignments = [
        np.random.default_rng(random.randrange(99)).random(
            (len(units(translation)), len(units(sentence))), dtype=np.float32
        )
        for sentence in document.sentences
    ]
    translated = document.join([translation] * len(document.sentences), alignments)
    begun: list[str] = []
    for stretch in parts_of(translated):
        if stretch.tag and stretch.tag["close"]:
            assert begun.pop() == stretch.tag["name"], "ends what was begun last"
        elif stretch.tag:
            begun.append(stretch.tag["name"])
    assert begun == []
    assert sorted(tags_of(translated)) == sorted(tags_of(f"<p>{source}</p>"))
    alone = document.join(document.sentences)
    assert alone.replace(" ", "") == f"<p>{source}</p>".replace(" ", ""), "the same, left alone"


def test_tags_go_where_their_words_go() -> None:
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


def test_a_tag_without_a_partner_in_its_sentence_ends_it() -> None:
    assert split_html("a <b>dog. A</b> cat").sentences == ["a", "dog.", "A", "cat"]
    assert split_html("<b>A dog. A cat.</b>", "en").sentences == ["A dog.", "A cat."]
    assert split_html("a <b><i>dog</b></i> cat").sentences == ["a", "dog", "cat"]
    many = "a " + "<b>dog</b> " * 65
    assert len(split_html(many).sentences) == 66


@pytest.mark.parametrize(
    ("source", "translated"),
    [
        ("<p>a <b>b <i>c</i></b>\n d. E</p>", "<p>A <b>B <i>C</i></b>\n D. E</p>"),
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
        ("<!-- a -->b<!-->c<!DOCTYPE html>d", "<!-- a -->B<!-->C<!DOCTYPE html>D"),
        ("a < b <3 c", "A &lt; B &lt;3 C"),
        ("a <b unclosed", "A <b unclosed"),
        (f"&#{'9' * 5000}; a", f"&#{'9' * 5000}; a"),
    ],
)
def test_what_is_translated_in_a_document(source: str, translated: str) -> None:
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
def test_no_text_takes_long(unit: str) -> None:
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    split_plain(text, "en")
    split_html(text, "en")
    assert time.process_time() - start < 3  # quadratic time would take minutes
