import csv
import gzip
import io
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings, strategies as st
from openpyxl import Workbook

from regard.data.corpus import CorpusPreview, fingerprint, read_pairs
from regard.data.formats import (
    INPUT_FORMATS,
    InputFormat,
    Skipped,
    localization,
    pair_format,
    pair_suffixes,
    read_conllu,
)
from regard.data.formats.base import HOW_TO_SKIP, ReadOptions
from regard.data.formats.tables import choose_columns
from regard.data.pairs import Pair
from regard.data.text_files import DataFile, read_lines
from regard.errors import RegardError
from regard.recipe import DataConfig, DataFiles


def compressed(path: Path, content: bytes) -> Path:
    """Write a file, compressed as its suffix says."""
    compress: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".zst": zstandard.ZstdCompressor().compress,
        ".xz": lzma.compress,
    }
    path.write_bytes(compress.get(path.suffix, bytes)(content))
    return path


def parallel_data(folder: Path, source: str, target: str) -> DataConfig:
    (folder / "s").write_text(source, encoding="utf-8", newline="")
    (folder / "t").write_text(target, encoding="utf-8", newline="")
    return DataConfig(root=str(folder), train=DataFiles(source=("s",), target=("t",)))


def pair_data(folder: Path, name: str, content: str) -> DataConfig:
    compressed(folder / name, content.encode())
    return DataConfig(root=str(folder), train=DataFiles(pairs=(name,)))


def pairs_of(data: DataConfig) -> list[Pair]:
    return list(read_pairs(data.train, data))


def test_adding_a_format_takes_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INPUT_FORMATS, "choices", dict(INPUT_FORMATS.choices))

    @INPUT_FORMATS.register("semicolons")
    class Semicolons(InputFormat):
        """source; target"""

        suffixes = (".ssv",)

        def read(self, *paths: DataFile) -> Iterator[Pair]:
            (path,) = paths
            for line in read_lines(path):
                source, _, target = line.partition(";")
                yield Pair(source, target)

    assert {".tsv", ".jsonl", ".ssv"} < {*pair_suffixes()}
    assert isinstance(pair_format(Path("x.ssv.zst")), Semicolons)
    assert pairs_of(pair_data(tmp_path, "p.ssv.gz", "a;b\nc;d\n")) == [
        Pair("a", "b"),
        Pair("c", "d"),
    ]


def test_no_format_has_the_suffix_of_recipes() -> None:
    """``regard train x.yaml`` would read a recipe as pairs."""
    assert {".yaml", ".yml"}.isdisjoint(pair_suffixes())


def test_several_files_are_read_one_after_another(tmp_path: Path) -> None:
    for name, text in {"s1": "a\n", "s2.gz": "b\n", "t1.zst": "A", "t2": "B"}.items():
        compressed(tmp_path / name, text.encode())
    files = DataFiles(source=("s1", "s2.gz"), target=("t1.zst", "t2"))
    pairs = read_pairs(files, DataConfig(root=str(tmp_path), train=files))
    assert list(pairs) == [Pair("a", "A"), Pair("b", "B")]


@pytest.mark.parametrize(("source", "target"), [("1\n2\n3\n4\n", "1\n2\n"), ("1\n", "1\n2\n3")])
def test_unequal_line_counts_are_refused(tmp_path: Path, source: str, target: str) -> None:
    counts = [len(text.split()) for text in (source, target)]
    with pytest.raises(RegardError, match=rf"s has {counts[0]} lines? but .*t has {counts[1]}:"):
        pairs_of(parallel_data(tmp_path, source, target))


@pytest.mark.parametrize("name", ["p.tsv", "p.txt", "p.tab.gz", "p"])
def test_tsv_uses_the_first_two_fields(tmp_path: Path, name: str) -> None:
    data = pair_data(tmp_path, name, "a b\tc\r\nd\te\tCC-BY 2.0\t7\n\t\n")
    assert pairs_of(data) == [Pair("a b", "c"), Pair("d", "e"), Pair("", "")]


def test_a_tab_inside_a_text_of_tsv_does_not_cut_it(tmp_path: Path) -> None:
    path = written(tmp_path / "p.tsv", "a\tb\nc\td\te\nf\tg\n")
    assert refusal(path) == f":2: 3 columns, but the first line has 2 ({HOW_TO_SKIP})"
    skipped = Skipped()
    kept = read_file(path, on_bad_line="skip", skipped=skipped)
    assert kept == [Pair("a", "b"), Pair("f", "g")]
    assert skipped.counts == {"bad lines skipped": 1}


def test_json_keys_at_any_depth(tmp_path: Path) -> None:
    record = {"id": 1, "data": {"translation": {"en": "a", "de": "b"}, "other": {}}, "more": [1]}
    path = written(tmp_path / "n.jsonl", json.dumps(record))
    assert read_file(path) == [Pair("a", "b")]
    columns = ("data.translation.de", "data.translation.en")
    assert read_file(path, columns=columns) == [Pair("b", "a")]
    record["data"] = {"translation": {"en": "a", "de": None}}
    written(path, json.dumps(record))
    assert refusal(path).startswith(':1: "data.translation.de" must be a string, found null (')


def test_tsv_without_a_tab_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"p\.tsv:2: no tab in 'only one'; a line is source, tab"):
        pairs_of(pair_data(tmp_path, "p.tsv", "a\tb\nonly one\n"))


@given(pairs=st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_jsonl_round_trips_any_text(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    lines = [json.dumps({"source": s, "target": t, "more": 1}) for s, t in pairs]
    data = pair_data(tmp_path_factory.mktemp("jsonl"), "p.jsonl.zst", "\n".join(lines))
    assert pairs_of(data) == pairs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: '{'; a line is"),
        ("", "not JSON: ''"),
        ('["a", "b"]', "not a JSON object"),
        ('{"source": "a"}', '"target" must be a string, found nothing'),
        ('{"source": 7, "target": "b"}', '"source" must be a string, found 7'),
        ('{"source": "\\ud800", "target": "b"}', '"source" contains an unpaired surrogate'),
        ('{"source": "a", "target": "\\udfff"}', '"target" contains an unpaired surrogate'),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_jsonl_is_reported_with_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    data = pair_data(tmp_path, "p.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(RegardError, match=r"p\.jsonl:2: ") as error:
        pairs_of(data)
    assert message in str(error.value)
    assert len(str(error.value).removeprefix(str(tmp_path))) < 200


def test_plain_text_has_empty_targets(tmp_path: Path) -> None:
    compressed(tmp_path / "a.txt.gz", b" one \n\ntwo\n")
    data = DataConfig(root=str(tmp_path), train=DataFiles(text=("a.txt.gz",)))
    assert pairs_of(data) == [Pair("one", ""), Pair("", ""), Pair("two", "")]


def test_conllu_with_the_wrong_number_of_fields_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\tx\n")
    with pytest.raises(RegardError, match="a:1: 2 fields, CoNLL-U has 10"):
        list(read_conllu(tmp_path / "a"))


# ---------------------------------------------------------------------------------------------
# Samples as other programs write them

DOG = Pair("The dog sleeps.", "Der Hund schläft.")
TOMS = Pair("Tom's cat & mine", "Toms Katze und meine")


def read_file(path: Path, **options: Any) -> list[Pair]:
    """The pairs of one file of pairs."""
    languages = options.pop("languages", None)
    skipped = options.pop("skipped", None)
    files = DataFiles(pairs=(str(path),), **options)
    data = DataConfig(root="/", train=files, languages=languages)
    return list(read_pairs(files, data, "", skipped))


def refusal(path: Path, **options: Any) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(RegardError) as error:
        read_file(path, **options)
    message = str(error.value).removeprefix(str(path))
    assert "\n" not in message
    return message


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


OMEGAT = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4">
  <header creationtool="OmegaT" o-tmf="OmegaT TMX" adminlang="EN-US" datatype="plaintext" creationtoolversion="6.0.0"
          segtype="sentence" srclang="EN-US"/>
  <body>
<!-- Default translations -->
    <tu>
      <tuv xml:lang="EN-US">
        <seg>The dog sleeps.</seg>
      </tuv>
      <tuv xml:lang="DE-DE" changeid="translator" changedate="20240105T101500Z">
        <seg>Der Hund schläft.</seg>
      </tuv>
    </tu>
    <tu>
      <note>checked</note>
      <prop type="file">cats.odt</prop>
      <tuv xml:lang="EN-US">
        <seg><bpt i="1" x="1">&lt;f1&gt;</bpt>Tom's<ept i="1">&lt;/f1&gt;</ept> cat
          <hi>&amp;</hi> mine</seg>
      </tuv>
      <tuv xml:lang="DE-DE">
        <seg>Toms Katze<ph x="2" type="x-br">&lt;br/&gt;</ph>und meine</seg>
      </tuv>
    </tu>
    <tu>
      <tuv xml:lang="EN-US"><seg>Not translated.</seg></tuv>
    </tu>
  </body>
</tmx>
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_tmx_of_omegat(tmp_path: Path, encoding: str) -> None:
    text = OMEGAT.replace('"UTF-8"', '"UTF-16"') if encoding == "utf-16" else OMEGAT
    path, skipped = written(tmp_path / "m.tmx", text, encoding), Skipped()
    assert read_file(path, skipped=skipped) == [DOG, TOMS]
    reason = "translation units without both EN-US and DE-DE"
    assert skipped.messages() == [f"{reason}: 1 (the first: {path}:27)"]
    assert read_file(path, languages=("de", "en"))[0] == Pair(*DOG[::-1])
    assert read_file(path, columns=("en-us", "de"))[0] == DOG


def test_tmx_with_several_languages_is_refused_with_the_candidates(tmp_path: Path) -> None:
    french = '<tuv xml:lang="fr"><seg>Le chien dort.</seg></tuv></tu>'
    path = written(tmp_path / "m.tmx", OMEGAT.replace("</tu>", french))
    assert refusal(path) == (
        ": languages EN-US, DE-DE, fr: which are the source and the target? name them with --languages, "
        "for example --languages EN-US,DE-DE (in a recipe: data.languages)"
    )
    assert read_file(path, languages=("fr", "de"))[0] == Pair("Le chien dort.", "Der Hund schläft.")
    assert refusal(path, languages=("fr", "it")) == ": no language it; found: EN-US, DE-DE, fr"


def test_tmx_without_a_source_language_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.tmx", OMEGAT.replace('srclang="EN-US"', 'srclang="*all*"'))
    assert ": languages EN-US, DE-DE: which is the source?" in refusal(path)


def test_tmx_with_variants_of_two_languages_names_the_languages(tmp_path: Path) -> None:
    variant = OMEGAT.partition("<body>")[2].partition("</body>")[0].replace("EN-US", "en-GB")
    path = written(tmp_path / "m.tmx", OMEGAT.replace("</body>", f"{variant}</body>"))
    assert ": languages EN-US, DE-DE, en-GB: " in refusal(path)
    assert "for example --languages en,de " in refusal(path)
    once = written(tmp_path / "n.tmx", OMEGAT)
    assert len(read_file(path, languages=("en", "de"))) == 2 * len(read_file(once))


def test_a_language_that_appears_late_is_not_lost_silently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(INPUT_FORMATS["tmx"], "sample", 1)
    late = '<tu><tuv xml:lang="fr"><seg>x</seg></tuv></tu></body>'
    path = written(tmp_path / "m.tmx", OMEGAT.replace("</body>", late))
    assert "language fr besides EN-US and DE-DE" in refusal(path)


OKAPI = """<?xml version="1.0" encoding="UTF-8"?>
<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2" xmlns:okp="okapi-framework:xliff-extensions"
       xmlns:sdl="http://sdl.com/FileTypes/SdlXliff/1.0">
<file original="word/document.xml" source-language="en-US" target-language="de-DE" datatype="x-docx">
<header><sdl:ref-files/><reference><internal-file form="base64">AAAA</internal-file></reference></header>
<body>
<group id="P1"><trans-unit id="P1-tu1" okp:wsHandling="preserve" approved="yes">
<source xml:lang="en-US">The dog sleeps. <g id="1">Tom's</g> cat &amp; mine</source>
<seg-source><mrk mid="0" mtype="seg">The dog sleeps.</mrk> <mrk mid="1" mtype="seg"><g id="1">Tom's</g> cat
&amp; mine</mrk> <mrk mid="2" mtype="seg">Unfinished.</mrk></seg-source>
<target xml:lang="de-DE"><mrk mid="0" mtype="seg">Der Hund schläft.</mrk> <mrk mid="1" mtype="seg"
>Toms<x id="2"/> Katze <bpt id="3">&lt;b&gt;</bpt>und<ept id="3">&lt;/b&gt;</ept> meine</mrk></target>
<alt-trans match-quality="80"><source>Wrong.</source><target>Falsch.</target></alt-trans>
</trans-unit></group>
<trans-unit id="2"><source>One.</source><target state="needs-translation">One.</target></trans-unit>
<trans-unit id="3"><source>Two.</source><target state="translated">Zwei.</target></trans-unit>
<trans-unit id="4"><source>Three.</source></trans-unit>
</body></file></xliff>
"""
XLIFF2 = """<?xml version="1.0"?>
<xliff xmlns="urn:oasis:names:tc:xliff:document:2.0" version="2.0" srcLang="en" trgLang="de"
       xmlns:mtc="urn:oasis:names:tc:xliff:matches:2.0">
 <file id="f1"><skeleton href="x.skl"/>
  <group id="g1"><unit id="u1">
   <mtc:matches><mtc:match ref="#s1"><source>Wrong.</source><target>Falsch.</target></mtc:match></mtc:matches>
   <originalData><data id="d1">&lt;b&gt;</data></originalData>
   <segment id="s1" state="final"><source>The <pc id="1" dataRefStart="d1">dog</pc> sleeps.</source>
    <target>Der <pc id="1" dataRefStart="d1">Hund</pc> schläft.</target></segment>
   <ignorable><source> </source></ignorable>
   <segment id="s2"><source><mrk id="m1" type="term">Tom's</mrk> cat<ph id="2"/> &amp; mine</source>
    <target>Toms Katze und meine</target></segment>
   <segment id="s3" state="initial"><source>One.</source><target>One.</target></segment>
   <segment id="s4"><source>Two.</source></segment>
  </unit></group>
 </file>
</xliff>
"""


def test_xliff_12_of_okapi(tmp_path: Path) -> None:
    path, skipped = written(tmp_path / "m.sdlxliff", OKAPI), Skipped()
    assert read_file(path, skipped=skipped) == [DOG, TOMS, Pair("Two.", "Zwei.")]
    assert skipped.counts == {"segments without a translation": 3}
    assert read_file(path, languages=("de", "en"))[0] == Pair(*DOG[::-1])
    assert refusal(path, languages=("fr", "en")) == ": no translated segments fr to en"


def test_xliff_2(tmp_path: Path) -> None:
    path, skipped = written(tmp_path / "m.xlf", XLIFF2), Skipped()
    assert read_file(path, skipped=skipped) == [DOG, TOMS]
    assert skipped.counts == {"segments without a translation": 2}


def test_xliff_with_several_target_languages_is_refused(tmp_path: Path) -> None:
    body = '<body><trans-unit id="1"><source>a</source><target>b</target></trans-unit></body>'
    files = "".join(
        f'<file source-language="en" target-language="{code}">{body}</file>'
        for code in ("de", "fr")
    )
    path = written(tmp_path / "m.xliff", f'<xliff version="1.2">{files}</xliff>')
    assert ":1: en to fr after en to de; name them with --languages" in refusal(path)
    assert read_file(path, languages=("en", "fr")) == [Pair("a", "b")]


def test_the_languages_of_an_xliff_segment_precede_those_of_its_file(tmp_path: Path) -> None:
    """Either side may state its own."""
    for own, languages in (
        (('xml:lang="fr"', ""), ("fr", "de")),
        (("", 'xml:lang="it"'), ("en", "it")),
    ):
        unit = f"<source {own[0]}>a</source><target {own[1]}>b</target>"
        body = f'<body><trans-unit id="1">{unit}</trans-unit></body>'
        file = f'<file source-language="en" target-language="de">{body}</file>'
        path = written(tmp_path / "m.xliff", f'<xliff version="1.2">{file}</xliff>')
        assert read_file(path, languages=languages) == [Pair("a", "b")]
        assert "no translated segments" in refusal(path, languages=("en", "de"))


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('<x id="1" ctype="lb"/>', "a b"),
        ('<x id="1" ctype="x-lb"/>', "a b"),
        ('<ph id="1" type="fmt" subType="xlf:lb"/>', "a b"),
        ('<ph id="1" type="lb"/>', "a b"),
        ("<ph>&lt;BR/&gt;</ph>", "a b"),
        ('<x id="1" ctype="bold"/>', "ab"),
        ('<ph id="1" type="fmt" subType="xlf:b"/>', "ab"),
        ("<ph>&lt;b&gt;</ph>", "ab"),
    ],
)
def test_a_code_is_left_out_and_a_line_break_becomes_a_space(
    tmp_path: Path, code: str, text: str
) -> None:
    segment = f"<source>a{code}b</source><target>c</target>"
    unit = f'<unit id="1"><segment>{segment}</segment></unit>'
    path = tmp_path / "m.xlf"
    written(path, f'<xliff version="2.0" srcLang="en" trgLang="de"><file>{unit}</file></xliff>')
    assert read_file(path) == [Pair(text, "c")]


GETTEXT = r"""# German translations for hello.
# Copyright (C) 2024
msgid ""
msgstr ""
"Project-Id-Version: hello 1.0\n"
"PO-Revision-Date: 2024-02-01 10:00+0100\n"
"Language: de\n"
"MIME-Version: 1.0\n"
"Content-Type: text/plain; charset=UTF-8\n"
"Content-Transfer-Encoding: 8bit\n"
"Plural-Forms: nplurals=2; plural=(n != 1);\n"

#. shown at night
#: src/dog.c:12
msgid "The dog sleeps."
msgstr "Der Hund schläft."

#: src/cat.c:7
#, c-format
msgid "%d cat\n"
msgid_plural "%d cats\n"
msgstr[0] "%d Katze\n"
msgstr[1] "%d Katzen\n"

#, fuzzy
#| msgid "Opened"
msgid "Open"
msgstr "Geöffnet"

msgctxt "menu"
msgid "New"
msgstr ""

#~ msgid "Old"
#~ msgstr "Alt"
"""


def test_po_of_gettext(tmp_path: Path) -> None:
    pytest.importorskip("translate")
    path, skipped = written(tmp_path / "de.po", GETTEXT), Skipped()
    plural = [Pair("%d cat", "%d Katze"), Pair("%d cats", "%d Katzen")]
    assert read_file(path, skipped=skipped) == [DOG, *plural]
    assert skipped.counts == {"messages untranslated, fuzzy or obsolete": 3}
    assert read_file(path, languages=("de", "en"))[0] == Pair(*DOG[::-1])
    assert refusal(path, languages=("en", "fr")) == ": the language is de, not fr"
    assert pair_format(path).layout(path).languages is None  # the source language is not stated
    written(path, GETTEXT.replace("Language: de", r'X-Source-Language: en\n"' + '\n"Language: de'))
    assert pair_format(path).layout(path).languages == ("en", "de")


PO_LATIN_1 = GETTEXT.replace("charset=UTF-8", "charset=ISO-8859-1").encode("latin-1")
PO_OTHER_ORDER = """\ufeffmsgid "a"

msgstr "charset=nothing"
# a comment
msgctxt ""
"menu"
msgid ""
"c"
msgstr ""
"d"
#~ msgctxt "x"
#~ msgid "e"
#~ msgstr "f"
#~| msgid "g"
#~ msgid "h"
#~ msgstr "i"
msgid "j"
msgstr "charset=nothing"
""".encode()


@pytest.mark.parametrize(
    "content",
    [GETTEXT.encode(), GETTEXT.replace("\n", "\r\n").encode(), PO_LATIN_1, PO_OTHER_ORDER],
    ids=["gettext", "crlf", "latin-1", "without blank lines"],
)
def test_po_is_parsed_in_parts_as_if_it_were_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    pytest.importorskip("translate")
    path = tmp_path / "m.po"
    path.write_bytes(content)
    results = []
    for size in (1 << 20, 1):
        monkeypatch.setattr(localization, "PO_CHUNK", size)
        parts = [part for _, part in localization._po_chunks(path)]
        assert b"".join(parts).strip() == content.replace(b"\r", b"").strip()
        skipped = Skipped()
        results.append((read_file(path, skipped=skipped), skipped.counts))
    assert results[0] == results[1]
    assert len(parts) == content.count(b"msgstr ") + content.count(b"msgstr[0]")
    assert len(results[0][0]) == 3


def test_a_damaged_message_of_a_po_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("translate")
    more = "".join(f'\nmsgid "m{number}"\nmsgstr "n"\n' for number in range(3))
    text = f'{GETTEXT}{more}\nmsgid "x"\nmsgstr y"\n{more}'
    line = text.split("\n").index('msgstr y"') + 1
    for size in (1 << 20, 1):
        monkeypatch.setattr(localization, "PO_CHUNK", size)
        problem = refusal(written(tmp_path / "m.po", text))
        assert problem.startswith(f":{line}: not a PO file: Syntax error: 'msgstr y\"")
    path = tmp_path / "m.po"
    path.write_bytes(text.encode().replace(b'msgid "x"', b'msgid "\xff"'))
    assert refusal(path) == f":{line - 1}: not utf-8: byte 0xFF"
    for charset in ("klingon", "UTF\0", "hex", "undefined"):
        unknown = written(path, GETTEXT.replace("UTF-8", charset))
        assert refusal(unknown) == f": the charset {charset!r} is not known"
    monkeypatch.setattr(localization, "MAX_SIZE", 1000)
    long = 'msgstr ""\n' + '"word word word"\n' * 100
    problem = refusal(written(tmp_path / "m.po", f'{GETTEXT}\nmsgid "x"\n{long}'))
    assert problem.endswith(": a message with more than 1,000 bytes")


@pytest.mark.parametrize("kind", ["tmx", "xliff", "po"])
def test_files_that_translate_toolkit_writes(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("translate")
    from translate.storage import factory

    path = tmp_path / f"m.{kind}"
    store: Any = factory.getclass(str(path))()  # type: ignore[no-untyped-call]
    store.setsourcelanguage("en")
    store.settargetlanguage("de")
    for source, target in (DOG, TOMS):
        if kind == "tmx":
            store.addtranslation(source, "en", target, "de")
        else:
            store.addsourceunit(source).target = target
    path.write_bytes(bytes(store))
    assert read_file(path, languages=("en", "de")) == [DOG, TOMS]


def write_zip(path: Path, files: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_moses_archive_of_opus(tmp_path: Path) -> None:
    files = {
        "Books.de-en.de": "Der Hund schläft.\nJa.\n",
        "Books.de-en.en": "The dog sleeps.\nYes.\n",
        "Books.de-en.xml": "<cesAlign/>",
        "LICENSE": "free",
        "README": "Corpus Name: Books",
    }
    path = write_zip(tmp_path / "de-en.txt.zip", files)
    assert read_file(path) == [Pair(*DOG[::-1]), Pair("Ja.", "Yes.")]
    assert read_file(path, languages=("en", "de")) == [DOG, Pair("Yes.", "Ja.")]
    assert ": no files of pairs" in refusal(path, languages=("en", "fr"))
    write_zip(path, files | {"Books.de-en.de": "Ja.\n"})
    assert "Books.de-en.de has 1 line but" in refusal(path)
    write_zip(path, {"x.en": "a\n", "x.de": "b\n"})
    assert ": x in the languages de, en: which is the source? name them with" in refusal(path)
    assert read_file(path, languages=("en", "de")) == [Pair("a", "b")]


def test_a_folder_and_a_pattern_stand_for_their_files(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    (folder / "more").mkdir(parents=True)
    written(folder / "a.tmx", OMEGAT)
    written(folder / "notes.odt", "x")
    written(folder / ".hidden.tsv", "x")
    compressed(folder / "more" / "b.en-US.xz", b"yes\n")
    compressed(folder / "more" / "b.de-DE.gz", b"ja\n")
    written(folder / "c.tsv", "EN-US\tDE-DE\nno\tnein\n")
    expected = [DOG, TOMS, Pair("no", "nein"), Pair("yes", "ja")]
    assert ": b in the languages" in refusal(folder)
    assert read_file(folder, languages=("en", "de")) == expected
    assert read_file(folder / "*.t*", languages=("en", "de")) == expected[:3]
    run = folder / "runs" / "my data"
    (run / "data").mkdir(parents=True)
    written(run / "recipe.yaml", "x")
    written(run / "data" / "train.tsv", "a\tb\n")
    assert read_file(folder, languages=("en", "de")) == expected
    assert "no such file" in refusal(folder / "*.xlf")
    written(folder / "train.tsv", "x\ty\n")
    written(folder / "test.tsv", "x\ty\n")
    assert ": contains train.tsv and test.tsv: pass only the training files" in refusal(folder)


def test_files_of_different_languages_are_not_mixed(tmp_path: Path) -> None:
    written(tmp_path / "a.tsv", "en\tde\na\tb\n")
    written(tmp_path / "b.tsv", "en\tfr\na\tb\n")
    message = ": several pairs of languages: en to de (a.tsv), en to fr (b.tsv); name them with"
    assert message in refusal(tmp_path)


# ---------------------------------------------------------------------------------------------
# Tables


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("source\ttarget\na\tb\n", [("a", "b")]),
        ("en\tde\na\tb\n", [("a", "b")]),
        ("\ufeffEN\tDE\r\na\tb\r\n", [("a", "b")]),
        ("id\ten\tde\n1\ta\tb\n2\tc\td\n", [("a", "b"), ("c", "d")]),
        ("target\tid\tsource\nb\t1\ta\n", [("a", "b")]),
        ("English\tGerman\na\tb\n", [("a", "b")]),
        ("sentence\tlabel\na\t1\n", [("a", "1")]),
        ("sentence_en\tsentence_de\na\tb\n", [("a", "b")]),
        ("German text\tEnglish text\tid\nb\ta\t1\n", [("b", "a")]),
        ("target-de-DE\tsource-en-US\nb\ta\n", [("a", "b")]),
        ("source\ttarget_de\na\tb\n", [("a", "b")]),
        ("source_id\ttarget_id\na\tb\n", [("source_id", "target_id"), ("a", "b")]),
        ("English\tGerman\t\t\na\tb\t\t\n", [("a", "b")]),
        ("\ten\tde\n1\ta\tb\n", [("a", "b")]),
        ("Hello\tHallo\na\tb\n", [("Hello", "Hallo"), ("a", "b")]),
        ("Go.\tGeh.\tCC-BY 2.0 (France) Attribution: tatoeba.org #1\n", [("Go.", "Geh.")]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_header_is_recognised_only_by_known_names(
    tmp_path: Path, text: str, pairs: list[tuple[str, str]], encoding: str
) -> None:
    assert read_file(written(tmp_path / "p.tsv", text, encoding)) == pairs


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_recognised_without_a_mark(tmp_path: Path, encoding: str) -> None:
    text = "".join(f"source {number}\tTürkçe ς {number}\n" for number in range(2000))
    pairs = read_file(written(tmp_path / "p.tsv", text, encoding))
    assert len(pairs) == 2000
    assert pairs[1999] == Pair("source 1999", "Türkçe ς 1999")


def test_damaged_utf_16_is_named(tmp_path: Path) -> None:
    content = "a\tb\nc\t".encode("utf-16") + b"\x00\xd8" + "\n".encode("utf-16-le")
    (tmp_path / "p.tsv").write_bytes(content)
    assert ":2: not UTF" in refusal(tmp_path / "p.tsv")
    (tmp_path / "p.tsv").write_bytes(content[:-1])
    assert ": damaged UTF-16: " in refusal(tmp_path / "p.tsv")


@pytest.mark.parametrize(
    "header", ["ID;English;Deutsch", "nr;Englisch;Deutsch", "id;Igbo;Français"]
)
def test_names_of_languages_are_a_header(header: str, tmp_path: Path) -> None:
    excel = written(tmp_path / "excel.csv", f"\ufeff{header}\r\n1;dog;Hund\r\n")
    assert read_file(excel) == [Pair("dog", "Hund")]


def test_the_languages_of_headings_with_a_word_for_text(tmp_path: Path) -> None:
    path = written(tmp_path / "p.tsv", "id\ttext_fr\ttext_en\t\n1\ta\tb\t\n")
    details = ("columns id, text_fr, text_en; source text_fr, target text_en",)
    assert pair_format(path).layout(path)[:2] == (details, ("fr", "en"))
    assert read_file(path, languages=("en", "fr")) == [Pair("b", "a")]
    three = written(tmp_path / "q.tsv", "source_en\ttarget_de\ttarget_fr\na\tb\tc\n")
    assert ": which columns are source and target? Candidates: 'source_en', " in refusal(three)
    mixed = written(tmp_path / "r.tsv", "source\ttarget\tde\na\tb\tc\n")
    assert ": which columns are source and target?" in refusal(mixed)


def test_columns_that_are_not_certain_are_refused_with_the_candidates(tmp_path: Path) -> None:
    three = written(tmp_path / "three.tsv", "17\tdog\tHund\n18\tcat\tKatze\n")
    assert refusal(three) == (
        ": 3 columns without known names: 1 '17', 2 'dog', 3 'Hund'; name them with --columns, for example "
        "--columns 2,3 (in a recipe: columns); use names if the first line is a header"
    )
    assert read_file(three, columns=("2", "3")) == [Pair("dog", "Hund"), Pair("cat", "Katze")]
    assert read_file(three, columns=("3", "2"))[0] == Pair("Hund", "dog")
    assert ": no column 'en' among the columns '17', 'dog', 'Hund'" in refusal(
        three, columns=("en", "de")
    )
    many = written(tmp_path / "many.tsv", "en\tde\tfr\na\tb\tc\n")
    assert ": which columns are source and target? Candidates: 'en', 'de', 'fr';" in refusal(many)
    assert read_file(many, columns=("fr", "en")) == [Pair("c", "a")]
    assert read_file(many, languages=("de", "fr")) == [Pair("b", "c")]
    other = written(tmp_path / "other.tsv", "Begriff\tWort\tTerm\n1\tHund\tdog\n")
    assert read_file(other, columns=("Term", "Wort")) == [Pair("dog", "Hund")]


@pytest.mark.parametrize(
    "text",
    [
        'id,en,de\r\n1,"a, b","c ""d"""\r\n2,"two\r\nlines",e\r\n',
        'id;en;de\r\n1;a, b;"c ""d"""\r\n2;"two\r\nlines";e\r\n\r\n',
        '\ufeffen;de\n"a, b";"c ""d"""\ntwo lines;e\n',
        '"a, b","c ""d"""\n"two lines",e\n',
    ],
)
def test_csv_as_spreadsheets_write_it(tmp_path: Path, text: str) -> None:
    expected = [Pair("a, b", 'c "d"'), Pair("two lines", "e")]
    assert read_file(written(tmp_path / "p.csv", text)) == expected


def test_csv_with_an_unquoted_comma_is_refused_or_skipped(tmp_path: Path) -> None:
    path = written(tmp_path / "p.csv", "en,de\na,b\nc, d,e\nf,g\n")
    assert refusal(path) == f":3: 3 fields, but the first line has 2 ({HOW_TO_SKIP})"
    skipped = Skipped()
    pairs = read_file(path, on_bad_line="skip", skipped=skipped)
    assert pairs == [Pair("a", "b"), Pair("f", "g")]
    message = f"bad lines skipped: 1 of 3 (the first: {path}:3: 3 fields, but the first line has 2)"
    assert skipped.messages()[0] == message
    both = written(tmp_path / "both.csv", "a;b,c\nd;e,f\n")
    assert ": are fields separated by ',' (2 columns) or ';' (2 columns)?" in refusal(both)


@given(rows=st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_csv_round_trips_what_python_writes(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]
) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("source", "target"), *rows])
    path = tmp_path_factory.mktemp("csv") / "p.csv"
    path.write_bytes(file.getvalue().encode("utf-8", "replace"))
    found = read_file(path)
    assert len(found) == len(rows)
    assert [pair.source.split() for pair in found] == [source.split() for source, _ in rows]


@pytest.mark.parametrize(
    ("record", "options", "expected"),
    [
        ({"src": "a", "tgt": "b"}, {}, ("a", "b")),
        ({"id": 3, "en": "a", "de": "b"}, {}, ("a", "b")),
        ({"id": "3", "translation": {"en": "a", "de": "b"}}, {}, ("a", "b")),
        ({"translation": {"de": "b", "en": "a"}}, {"languages": ("en", "de")}, ("a", "b")),
        ({"q": "a", "x": 1, "a": "b"}, {"columns": ("q", "a")}, ("a", "b")),
        ({"en": "a", "de": "b", "fr": "c"}, {"columns": ("fr", "en")}, ("c", "a")),
    ],
)
def test_jsonl_and_parquet_of_hugging_face(
    tmp_path: Path, record: dict[str, Any], options: dict[str, Any], expected: tuple[str, str]
) -> None:
    path = written(tmp_path / "p.jsonl", json.dumps(record) + "\n")
    assert read_file(path, **options) == [expected]
    pq.write_table(pa.Table.from_pylist([record] * 3), tmp_path / "p.parquet")
    assert read_file(tmp_path / "p.parquet", **options) == [expected] * 3


def test_keys_that_are_not_certain_are_refused_with_the_candidates(tmp_path: Path) -> None:
    record = {"question": "a", "answer": "b"}
    path = written(tmp_path / "p.jsonl", json.dumps(record))
    message = "which keys are source and target? Candidates: 'question', 'answer'; name them with"
    assert f":1: {message}" in refusal(path)
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "p.parquet")
    assert message.replace("keys", "columns") in refusal(tmp_path / "p.parquet")


def test_an_empty_cell_of_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"en": ["a", None, "c"], "de": ["b", "x", "d"]}), path)
    assert refusal(path) == f", row 2: en must be a string, found nothing ({HOW_TO_SKIP})"
    assert read_file(path, on_bad_line="skip") == [Pair("a", "b"), Pair("c", "d")]


# ---------------------------------------------------------------------------------------------
# Bad lines, compression, fingerprints, previews


def test_bad_lines_are_named_or_counted_and_skipped(tmp_path: Path) -> None:
    path, skipped = tmp_path / "p.tsv", Skipped()
    path.write_bytes(b"a\tb\nlatin \xe4\tc\nno tab\nd\te\n")
    convert = f"iconv -f latin1 -t utf-8 {path} > {tmp_path / 'p.utf8.tsv'}"
    problem = (
        "not UTF-8: byte 0xE4 at position 7 of the line; convert the file to UTF-8, "
        f"if it is Latin-1 with  {convert}"
    )
    assert refusal(path) == f":2: {problem} ({HOW_TO_SKIP})"
    pairs = read_file(path, on_bad_line="skip", skipped=skipped)
    assert pairs == [Pair("a", "b"), Pair("d", "e")]
    assert skipped.counts == {"bad lines skipped": 2}
    jsonl = written(tmp_path / "p.jsonl", 'x\n{"en": "a", "de": "b"}\n{"en": 1}\n')
    assert read_file(jsonl, on_bad_line="skip") == [Pair("a", "b")]


def test_a_bad_line_of_parallel_files_is_skipped_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "s").write_bytes(b"1\n\xff\n3\n4\n")
    (tmp_path / "t").write_bytes(b"1\n2\n\xff\n4\n")
    files = DataFiles(source=("s",), target=("t",), on_bad_line="skip")
    data, skipped = DataConfig(root=str(tmp_path), train=files), Skipped()
    assert list(read_pairs(files, data, "", skipped)) == [Pair("1", "1"), Pair("4", "4")]
    assert skipped.counts == {"bad lines skipped": 2}


@pytest.mark.parametrize(("good", "share"), [(9, ""), (8, "11%"), (1, "50%")])
def test_bad_lines_are_counted_among_all_lines(tmp_path: Path, good: int, share: str) -> None:
    path = written(tmp_path / "p.tsv", "a\tb\n" * good + "no tab\n")
    files = DataFiles(pairs=(str(path),), on_bad_line="skip")
    preview = CorpusPreview(files, DataConfig(train=files))
    for _ in range(2):  # files are read several times
        preview.skipped.clear()
        assert len(list(preview.pairs())) == good
        first, *warnings = preview.skipped.messages()
        assert first.startswith(f"bad lines skipped: 1 of {good + 1} (the first: {path}:")
        shares = [line.partition(" of the lines")[0] for line in warnings]
        assert shares == [f"warning: {share}"] * bool(share)


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz"])
def test_every_text_format_may_be_compressed(tmp_path: Path, suffix: str) -> None:
    assert read_file(compressed(tmp_path / f"m.tmx{suffix}", OMEGAT.encode())) == [DOG, TOMS]
    assert read_file(compressed(tmp_path / f"m.xlf{suffix}", XLIFF2.encode())) == [DOG, TOMS]
    table = compressed(tmp_path / f"m.csv{suffix}", "en,de\na,b\n".encode("utf-16"))
    assert read_file(table) == [Pair("a", "b")]
    whole = table.read_bytes()
    table.write_bytes(whole[: len(whole) // 2])
    assert "damaged, cannot be decompressed" in refusal(table)


def test_the_fingerprint_depends_on_what_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "p.tsv", "en\tde\na\tb\n")

    def identity(name: str = "p.tsv", languages: tuple[str, str] | None = None) -> str:
        files = DataFiles(pairs=(name,))
        return fingerprint(files, DataConfig(root=str(tmp_path), train=files, languages=languages))

    assert identity() == identity(languages=("en", "de")) != identity(languages=("de", "en"))
    path.write_text("a\tb\n")
    assert identity() == identity(languages=("de", "en"))  # plain columns are always the same
    (tmp_path / "folder").mkdir()
    written(tmp_path / "folder" / "a.tsv", "a\tb\n")
    before = identity("folder")
    written(tmp_path / "folder" / "b.tsv", "a\tb\n")
    assert before != identity("folder")


def test_a_preview_says_what_was_understood(tmp_path: Path) -> None:
    files = DataFiles(pairs=(str(written(tmp_path / "m.tmx", OMEGAT)),))
    preview = CorpusPreview(files, DataConfig(root="/", train=files))
    assert len(list(preview.pairs())) == 2
    assert preview.lines() == [
        f"{tmp_path / 'm.tmx'}: tmx",
        "2 pairs, EN-US to DE-DE; the first:",
        "  The dog sleeps.  →  Der Hund schläft.",
        "  Tom's cat & mine  →  Toms Katze und meine",
        f"translation units without both EN-US and DE-DE: 1 (the first: {tmp_path / 'm.tmx'}:27)",
    ]


# ---------------------------------------------------------------------------------------------
# Hostile and damaged files

BOMB = """<?xml version="1.0"?>
<!DOCTYPE tmx [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>&b;</seg></tuv></tu></body></tmx>"""


def test_entities_are_refused(tmp_path: Path) -> None:
    assert "declares the entity 'a'" in refusal(written(tmp_path / "m.tmx", BOMB))
    secret = written(tmp_path / "secret", "password")
    text = BOMB.replace('<!ENTITY a "ha">', f'<!ENTITY a SYSTEM "file://{secret}">')
    assert "declares the entity 'a'" in refusal(written(tmp_path / "m.tmx", text))
    undefined = OMEGAT.replace("sleeps", "&sleeps;")
    message = "the entity &sleeps; is not defined"
    assert message in refusal(written(tmp_path / "m.tmx", undefined))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("m.tmx", "<html/>", ":1: <html> is the outermost element; expected <tmx>"),
        ("m.tmx", OMEGAT[:600], ": not well-formed XML: no element found"),
        ("m.tmx", "<tmx/>", ": no translation units"),
        ("m.xlf", "<xliff>" + "<g>" * 200, "more than 100 nested elements"),
        ("m.xlf", "<xliff/>", ": no translated segments"),
        ("m.tmx", "", ": the file is empty"),
        ("m.po", "", ": the file is empty"),
        ("m.po", "hello", ": not a PO file"),
        ("m.csv", "", ": the file is empty"),
        ("m.csv", "one\ntwo\n", "1 column in 'one'; at least 2 are needed"),
        ("m.zip", "PK", ": damaged zip archive"),
        ("m.parquet", "PAR1", ": damaged, or not Parquet"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    assert message in refusal(written(tmp_path / name, text))


def whole_files() -> dict[str, bytes]:
    """One good file of every format."""
    table, archive, sheet = io.BytesIO(), io.BytesIO(), io.BytesIO()
    book = Workbook()
    assert book.active is not None
    for row in (["en", "de"], ["a", "b"], [1, None]):
        book.active.append(row)
    book.save(sheet)
    pq.write_table(pa.table({"en": ["a"] * 50, "de": ["b"] * 50}), table)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.de-en.de", "a\n" * 50)
        file.writestr("x.de-en.en", "b\n" * 50)
    return {
        "p.tmx": OMEGAT.encode(),
        "p.xlf": OKAPI.encode(),
        "p2.xlf": XLIFF2.encode(),
        "p.po": GETTEXT.encode(),
        "p.tsv": "id\ten\tde\n1\ta\tä\n".encode("utf-16"),
        "p.csv": b'en,de\n"a, b",c\n',
        "p.jsonl": b'{"translation": {"en": "a", "de": "b"}}\n',
        "p.json": b'[{"en": "a", "de": "b"},\n {"en": "c", "de": "d"}]',
        "p.xlsx": sheet.getvalue(),
        "p.parquet": table.getvalue(),
        "p.zip": archive.getvalue(),
        "p.tsv.xz": lzma.compress(b"a\tb\n"),
    }


WHOLE = whole_files()
MANY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reads_or_refuses(path: Path) -> None:
    """A file is read, or refused in one line; there is no third way."""
    for on_bad_line in ("error", "skip"):
        message = ""
        try:
            read_file(path, on_bad_line=on_bad_line)
        except RegardError as error:
            message = str(error)
        assert "\n" not in message


@pytest.mark.parametrize("name", WHOLE)
@MANY
@given(data=st.data())
def test_damaged_files_are_read_or_refused(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = bytearray(WHOLE[name])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 4)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / name).write_bytes(bytes(content))
    reads_or_refuses(tmp_path / name)


@pytest.mark.parametrize("name", WHOLE)
@MANY
@given(content=st.binary(max_size=300))
def test_random_bytes_are_read_or_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    reads_or_refuses(tmp_path / name)


def test_json_arrays_and_json_lines_in_a_json_file(tmp_path: Path) -> None:
    records = [{"id": 1, "en": "a\n[{", "de": "ä"}, {"id": 2, "en": "b", "de": "}"}]
    expected = [Pair("a\n[{", "ä"), Pair("b", "}")]
    for name, text in {
        "indented.json": json.dumps(records, indent=4),
        "one_line.json": json.dumps(records, ensure_ascii=False),
        "lines.json": "\n".join(map(json.dumps, records)),
    }.items():
        assert read_file(written(tmp_path / name, text)) == expected
    many = written(tmp_path / "many.json", json.dumps(records * 500, separators=(",\n", ": ")))
    assert read_file(many) == expected * 500
    assert "record 2: not a JSON object: 3" in refusal(
        written(tmp_path / "b.json", '[{"source": "a", "target": "b"}, 3]')
    )
    for text, message in {
        '[{"source": "a", "target": "b"}': "the file ends within the array",
        '[{"source": "a", "target": "b"} x]': "expected ,",
        '[{"source": "a", "target": "b"}, {"source": }]': "not JSON: Expecting value",
        "[]": "no records",
    }.items():
        assert message in refusal(written(tmp_path / "c.json", text))


def test_a_spreadsheet(tmp_path: Path) -> None:
    book = Workbook()
    assert book.active is not None
    for row in (["id", "English", "German"], [1, "a\nb", "ä"], [None, None, None], [2, "b", 3.5]):
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    assert read_file(tmp_path / "t.xlsx") == [Pair("a b", "ä"), Pair("b", "3.5")]
    assert "damaged, or not XLSX" in refusal(written(tmp_path / "u.xlsx", "PK"))


# ---------------------------------------------------------------------------------------------
# Large files


def large_tmx(path: Path, units: int) -> Path:
    start, end = OMEGAT.split("<body>")[0] + "<body>", "</body></tmx>"
    with path.open("w", encoding="utf-8") as file:
        file.write(start)
        for number in range(units):
            file.write(
                f'<tu tuid="{number}"><prop type="x">{number}</prop>'
                f'<tuv xml:lang="en"><seg>sentence {number} of a large memory, {"long " * 30}</seg></tuv>'
                f'<tuv xml:lang="de"><seg>Satz {number} eines Speichers, {"lang " * 30}</seg></tuv></tu>\n'
            )
        file.write(end)
    return path


def large_po(path: Path, messages: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        file.write(GETTEXT)
        for number in range(messages):
            file.write(
                f'\n#: file.c:{number}\nmsgid "message {number} {"long " * 99}"\n'
                f'msgstr "Meldung {number} {"lang " * 99}"\n'
            )
    return path


def test_a_large_po_is_read_in_constant_memory(tmp_path: Path) -> None:
    pytest.importorskip("translate")

    def peak(messages: int) -> tuple[int, int]:
        path = large_po(tmp_path / f"{messages}.po", messages)
        tracemalloc.start()
        count = sum(1 for _ in pair_format(path).read(path))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return count, found

    small, large = peak(1_200), peak(5_000)
    assert (small[0], large[0]) == (1_203, 5_003)
    assert large[1] < 1.5 * small[1] < 30_000_000


def test_a_large_tmx_is_read_in_constant_memory(tmp_path: Path) -> None:
    def peak(units: int) -> tuple[int, int, int]:
        path = large_tmx(tmp_path / f"{units}.tmx", units)
        files = DataFiles(pairs=(str(path),))
        data = DataConfig(root="/", train=files, languages=("en", "de"))
        tracemalloc.start()
        count = sum(1 for _ in read_pairs(files, data, ""))
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return count, path.stat().st_size, found

    small, large = peak(8_000), peak(40_000)
    assert (small[0], large[0]) == (8_000, 40_000)
    assert large[1] > 18_000_000
    # 5 times the units; a busy machine lets the reader get further ahead.
    assert large[2] < 2 * small[2] < 60_000_000


@pytest.mark.parametrize("names", [["en-US", "en-GB", "de"], ["en", "de-AT", "de-CH"]])
def test_two_columns_of_one_language_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match=r"en|de"):
        choose_columns(names, ReadOptions(languages=("en", "de")))
    assert choose_columns(names[::2], ReadOptions(languages=("de", "en"))) == (1, 0)


@pytest.mark.parametrize(
    ("name", "content", "columns", "layout"),
    [
        ("a.jsonl", '{"source": "a", "target": "b"}\n', None, ((), None, "")),
        (
            "a.jsonl",
            '{"en": "a", "de": "b"}\n',
            None,
            (("source en, target de",), ("en", "de"), "en de"),
        ),
        ("a.tsv", "a\tb\n", None, ((), None, "")),
        (
            "a.tsv",
            "a\tb\n",
            ("2", "1"),
            (("columns 2 and 1 of 2, without a header",), None, "columns (1, 0)"),
        ),
        (
            "a.tsv",
            "a\tb\tCC-BY 2.0\n",
            None,
            (("columns 1 and 2 of 3, without a header",), None, ""),
        ),
    ],
)
def test_the_layout_of_a_table_says_what_is_not_the_default(
    tmp_path: Path, name: str, content: str, columns: tuple[str, str] | None, layout: object
) -> None:
    path = compressed(tmp_path / name, content.encode())
    assert pair_format(path, ReadOptions(columns=columns)).layout(path) == layout


@pytest.mark.parametrize("ignored", [8, 9])
def test_eight_ignored_files_are_named(tmp_path: Path, ignored: int) -> None:
    (tmp_path / "pairs.tsv").write_text("a\tb\n")
    for number in range(ignored):
        (tmp_path / f"{number}.pdf").touch()
    *_, last = pair_format(tmp_path).layout(tmp_path).details
    names = ", ".join(f"{number}.pdf" for number in range(8))
    assert last == f"ignored: {names}{', …' * (ignored > 8)}"
