"""A translator in one HTML file: the model in JavaScript computes the same traces as the model in Python."""

import codecs
import json
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.errors import RegardError
from regard.inspection.attribution import attribute_token
from regard.inspection.head_ablation import HeadTable, ablate_heads
from regard.inspection.hooks import SITES, Floats, Head
from regard.inspection.teacher_forcing import force_ids
from regard.inspection.trace import Trace, trace
from regard.interop import html_export
from regard.interop.convert import export_model
from regard.nn.network import copy_weights
from regard.tasks import Translator

MakeRun = Callable[..., Path]

NODE = shutil.which("node")
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "html_export.mjs"
TEXT = "The dog was too tired."
ODD_TEXTS = [
    *(
        "",
        " ",
        "  two  spaces ",
        "\ttab\nline",
        "▁",
        "\ufdd0\ufdd01▁\u2585",
        "<s> </s> <0x41> <unk>",
    ),
    *("Zoe\u0308 ﬁne Straße", "naïve café 中文字 日本", "😀👩‍👩‍👧 \U0010ffff", "ΟΔΟΣ İ", "a" * 60),
]
RECIPES: list[tuple[float, dict[str, Any]]] = [
    (15, {"decoding": {"extra_length": 3}, "training": {"augment": {"upper": 0.1}}}),
    (
        8,
        {
            "tokenizer": {"kind": "bpe", "vocab_size": 420, "normalize": "nfkc"},
            "model": {
                "norm": "rms",
                "norm_order": "pre",
                "activation": "swiglu",
                "position": "rotary",
                "d_k": 6,
                "output_bias": True,
                "attention": {"key_value_heads": 1},
            },
            "decoding": {
                "length_normalization": "transformers",
                "length_penalty": 1.0,
                "extra_length": 2,
            },
        },
    ),
    (
        12,
        {
            "data": {
                "train": {"pairs": "pairs.tsv"},
                "clean": {"max_tokens": 15, "truncate": True},
            },
            "tokenizer": {"kind": "char", "vocab_size": 400, "normalize": "lower"},
            "model": {
                "norm": "batch",
                "activation": "gelu",
                "position": "learned",
                "tie_output": False,
                "attention": {"bias": True},
                "max_length": 18,
                "d_v": 5,
            },
            "decoding": {"length_normalization": "ctranslate2", "extra_length": 4},
        },
    ),
    (
        9,
        {
            "tokenizer": {"kind": "word", "vocab_size": 300, "shared": False, "normalize": "none"},
            "model": {
                "activation": "swish",
                "position": "relative",
                "max_distance": 3,
                "attention": {"score": "dot_product"},
                "final_norm": True,
                "d_ff": 34,
            },
            "decoding": {"beam": 1, "max_length": 9},
        },
    ),
]


def run_node(file: Path, requests: Sequence[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    """What the model in a file answers."""
    if NODE is None:
        pytest.skip("node is not installed")
    done = subprocess.run(
        [NODE, str(SCRIPT), str(file), *options],
        input="".join(json.dumps(one) + "\n" for one in requests),
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()][1:]


def rounded_model(run: Path) -> Translator:
    """The model with the weights that are in the file."""
    model = Translator.load(run, "cpu")
    _, packed = html_export.build_page(model, "model")
    copy_weights(model.network, packed.restored(), "test")
    model.freeze()
    return model


def assert_same(ours: Trace, result: dict[str, Any]) -> None:
    expected, found = ours.to_json(), result["trace"]
    for name in ("text", "translation", "source", "inputs", "outputs", "columns", "parents"):
        assert found[name] == expected[name], name
    assert found["options"] == expected["options"]
    assert found["muted"] == expected["muted"]
    assert found.keys() - {"id"} == expected.keys()
    assert_nodes(expected["beam"], found["beam"])
    assert found["tokens"] == expected["tokens"]
    np.testing.assert_allclose(found["probabilities"], expected["probabilities"], atol=1e-4)
    for ours_row, row in zip(expected["candidates"], found["candidates"], strict=True):
        np.testing.assert_allclose(
            [one["probability"] for one in row],
            [one["probability"] for one in ours_row],
            atol=1e-4,
        )
    np.testing.assert_allclose(found["coverage"]["sum"], expected["coverage"]["sum"], atol=1e-4)
    attention: dict[str, Floats] = {site: ours.weights(site) for site in SITES}
    for site, values in (attention | {"nodes": ours.nodes}).items():
        assert found[site]["shape"] == list(values.shape)
        array = np.array(result["arrays"][site]).reshape(values.shape)
        np.testing.assert_allclose(array, values, atol=1e-3, err_msg=site)
    assert found["projections"].keys() == expected["projections"].keys()
    for known, projections in ours.projections.items():
        for name in ("query", "key", "value", "output"):
            values = np.stack(getattr(projections, name))
            assert found["projections"][known][name]["shape"] == list(values.shape)
            array = np.array(result["arrays"][f"{known}.{name}"]).reshape(values.shape)
            tolerance = 1e-4 * max(1.0, float(np.abs(values).max()))
            np.testing.assert_allclose(array, values, atol=tolerance, err_msg=name)
    assert ours.occlusion is not None
    assert found["occlusion"]["words"] == ours.occlusion.words


def assert_nodes(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for name in ("id", "parent", "token", "state"):
        assert [one[name] for one in found] == [one[name] for one in expected], name
    for name in ("log_probability", "total", "score"):
        theirs, ours = ([one[name] for one in nodes] for nodes in (found, expected))
        np.testing.assert_allclose(theirs, ours, rtol=1e-2, atol=1e-3, err_msg=name)


@pytest.mark.parametrize(("bits", "sections"), RECIPES, ids=["15", "8", "12", "9"])
def test_traces_and_tokens_are_the_same(
    make_run: MakeRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bits: float,
    sections: dict[str, Any],
) -> None:
    run, out = make_run(**sections), tmp_path / "model.html"
    monkeypatch.setattr(html_export, "MIN_BITS", bits)
    monkeypatch.setattr(html_export, "MAX_BITS", bits)
    stored, size = export_model(run, "html", out)
    assert re.match(r"weights stored with \S+ bits on average: log-probabilities", stored)
    assert float(stored.split()[3]) == pytest.approx(bits, abs=0.2)
    assert size.endswith("MB, open it in a browser")
    model = rounded_model(run)
    random.seed(1)
    alphabet = sorted({*"".join(ODD_TEXTS), *TEXT})
    texts = [*ODD_TEXTS, *("".join(random.choices(alphabet, k=12)) for _ in range(30))]
    mute = [Head("encoder", 0, 1), Head("cross_attention", 1, 0)]
    forced = model.tokenizer.target.encode(["Der Hund"])[0]
    options: list[dict[str, Any]] = [
        {},
        {"mute": [*map(str, mute)], "prefix": "Die Katze", "beam": 3},
        {"temperature": 1.5, "seed": 7, "forced": forced},
    ]
    found = run_node(
        out,
        [
            *({"encode": text} for text in texts),
            *({"trace": {"q": TEXT, **one}, "arrays": True} for one in options),
            {"translate": TEXT},
            {"translate": TEXT.upper()},
            {"trace": {"q": TEXT.upper(), "prefix": "DIE"}, "arrays": True},
        ],
    )
    for text, result in zip(texts, found[: len(texts)], strict=True):
        (ids,) = model.tokenizer.source.encode([text])
        assert result["ids"] == ids, repr(text)
        assert [result["text"]] == model.tokenizer.source.decode([ids]), repr(text)
    plain, muted, sampled, translated, capitals, traced = found[len(texts) :]
    assert_same(trace(model, TEXT), plain)
    assert_same(trace(model, TEXT, mute=mute, prefix="Die Katze", beam=3), muted)
    assert_same(trace(model, TEXT, temperature=1.5, seed=7, forced=forced), sampled)
    assert [translated["translation"]] == model.translate([TEXT])
    assert [capitals["translation"]] == model.translate([TEXT.upper()])
    assert_same(trace(model, TEXT.upper(), prefix="DIE"), traced)


def test_occlusion_and_javascript_without_wasm(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(decoding={"extra_length": 3}), tmp_path / "model.html"
    export_model(run, "html", out)
    (result,) = run_node(out, [{"trace": {"q": TEXT}, "arrays": True}], "--plain")
    ours = trace(rounded_model(run), TEXT)
    assert_same(ours, result)
    assert ours.occlusion is not None
    packed = result["occlusion"]
    np.testing.assert_allclose(packed, ours.occlusion.probabilities.ravel(), atol=1e-4)


@pytest.mark.parametrize(
    ("sections", "complete"),
    [(one, i >= 2) for i, (_, one) in enumerate(RECIPES)],
    ids=["15", "8", "12", "9"],
)
def test_attribution_is_the_same(
    make_run: MakeRun, tmp_path: Path, sections: dict[str, Any], complete: bool
) -> None:
    """complete: integrated gradients of this untrained network add up within the largest number of steps."""
    run, out = make_run(**sections), tmp_path / "model.html"
    export_model(run, "html", out)
    model = rounded_model(run)
    outputs = [token.id for token in trace(model, TEXT).outputs]
    forced = force_ids(model, model.request(TEXT), outputs)
    foil = next(one for one in range(20, 40) if one != outputs[2])
    requests: list[tuple[int, int | None]] = [(0, None), (2, foil), (3, None)]
    found = run_node(out, [{"attribution": [TEXT, outputs, *one]} for one in requests])
    for (position, other), result in zip(requests, found, strict=True):
        ours = attribute_token(model, forced, position, other)
        expected = ours.to_json()
        for name in ("token", "foil", "position", "source_words", "target_words"):
            assert result[name] == expected[name], name
        assert result["difference"] == pytest.approx(ours.difference, abs=1e-3)
        assert list(result["scores"]) == list(ours.scores)
        for method, shares in ours.scores.items():
            size = float(np.abs(shares).max())
            np.testing.assert_allclose(
                result["scores"][method], shares, rtol=0, atol=1e-3 * size, err_msg=method
            )
        assert not complete or result["completeness"] <= 0.01
        assert result["completeness"] == pytest.approx(ours.completeness, abs=1e-3)
        assert [(a, b) for a, b, _ in result["agreement"]] == list(ours.agreement())
        for *pair, value in result["agreement"]:
            assert value == pytest.approx(ours.agreement()[tuple(pair)], abs=0.1)


def test_the_number_of_bits_depends_on_the_size_of_the_file(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Translator.load(make_run(), "cpu")
    monkeypatch.setattr(html_export, "MIN_BITS", 2.0)
    largest, packed = html_export.build_page(model, "model")
    assert packed.bits == pytest.approx(html_export.MAX_BITS, abs=0.1)
    count = sum(one.integers.size for one in packed.matrices.values())
    for bits in (12, 10, 8):
        fewer = (packed.bits - bits) * count / 8 * html_export.TEXT_SIZE
        monkeypatch.setattr(html_export, "MAX_BYTES", len(largest) - round(fewer))
        page, smaller = html_export.build_page(model, "model")
        assert 0.99 * html_export.MAX_BYTES < len(page) <= html_export.MAX_BYTES
        assert bits - 1 < smaller.bits <= bits
    monkeypatch.setattr(html_export, "MAX_BYTES", 0)
    monkeypatch.setattr(html_export, "MIN_BITS", 8.0)
    assert html_export.build_page(model, "model")[1].bits == pytest.approx(8, abs=0.1)


def test_the_encoding_of_the_file_is_declared_by_its_first_bytes(
    make_run: MakeRun, tmp_path: Path
) -> None:
    out = tmp_path / "model.html"
    export_model(make_run(), "html", out)
    content = out.read_bytes()
    assert content.startswith(codecs.BOM_UTF16_LE)
    text = content.decode("utf-16")
    assert "charset" not in text.partition("<script")[0]
    assert not {"\0", "\r"} & set(text)


def test_unsupported_choices_are_named(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(
        model={"attention": {"weighting": "relu", "encoder": "window"}},
        decoding={"no_repeat_ngram": 3},
    )
    with pytest.raises(RegardError, match="the HTML export does not support") as refused:
        export_model(run, "html", tmp_path / "model.html")
    for part in (
        "model.attention.weighting: relu (only softmax)",
        "model.attention.encoder: window (only full)",
        "decoding.no_repeat_ngram: 3 (only 0)",
    ):
        assert part in str(refused.value)
    assert not (tmp_path / "model.html").exists()


def test_the_file_shows_what_each_head_contributes_if_this_is_measured(
    make_run: MakeRun, tmp_path: Path
) -> None:
    run, out = make_run(), tmp_path / "model.html"
    tables: list[HeadTable] = []

    def measure(model: Translator) -> HeadTable:
        tables.append(ablate_heads(model, [TEXT], [TEXT]))
        return tables[0]

    html_export.export_html(run, out, measure)
    (traced,) = run_node(out, [{"trace": {"q": TEXT}}])
    assert traced["trace"]["head_table"] == json.loads(json.dumps(tables[0].to_json()))
    html_export.export_html(run, out)
    (traced,) = run_node(out, [{"trace": {"q": TEXT}}])
    assert traced["trace"]["head_table"] is None


def test_the_output_must_be_an_html_file(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"must end in \.html"):
        export_model(make_run(), "html", tmp_path / "folder")


def test_a_prefix_of_a_text_in_capitals_keeps_its_case(make_run: MakeRun, tmp_path: Path) -> None:
    sections = {"decoding": {"extra_length": 3}, "training": {"augment": {"upper": 0.1}}}
    run, out = make_run(**sections), tmp_path / "model.html"
    export_model(run, "html", out)
    model, text = rounded_model(run), TEXT.upper()
    prefixes = ["Die", "Die Katze", "DIE KATZE"]
    found = run_node(out, [{"trace": {"q": text, "prefix": prefix}} for prefix in prefixes])
    for prefix, result in zip(prefixes, found, strict=True):
        translation = result["trace"]["translation"]
        assert [translation] == model.translate([text], prefixes=[prefix])
        assert translation.startswith(prefix)
        assert len(translation) > len(prefix)
