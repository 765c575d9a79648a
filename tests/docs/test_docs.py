"""The generated pages of docs/ are up to date and complete, and every component is documented."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from regard.recipe.registry import LOCATIONS, allowed_names, find_registry
from tests.scripts import load_script

DOCS = Path(__file__).parents[2] / "docs"
COMPONENTS = [
    *("model.attention.score", "model.attention.weighting", "model.attention.encoder"),
    *("model.attention.decoder", "model.attention.cross_attention", "model.position"),
    *("model.norm", "model.norm_order", "model.residual", "model.activation"),
    *("training.optimizer", "training.schedule", "training.label_smoothing_over"),
]
"""the recipe keys whose choices docs/parts.md explains"""
PAGES = {"choices.md": "docs/make_choices.py", "glossary.md": "docs/make_glossary.py"}
STANDARD_TERMS = """
activation checkpointing, byte fallback, deduplication, mixed precision, n-best list, nucleus sampling, weight tying,
attention mask, beam search, BPE-dropout, calibration, checkpoint averaging, cross-attention, distillation, EMA,
greedy search, hypothesis, KV cache, label smoothing, length penalty, logits processor, mask-predict,
non-autoregressive, packed batches, placeholder, prefetch, quantization, R-Drop, rotary positions, special tokens,
stopping rule, subword sampling, teacher forcing, warm-up, attention rollout, constrained decoding, cosine schedule,
detokenization, dynamic batching, flash attention, knowledge distillation, model card
"""


@pytest.fixture(scope="module")
def glossary() -> ModuleType:
    return load_script("docs/make_glossary.py")


@pytest.mark.parametrize("page", PAGES)
def test_generated_pages_are_up_to_date(page: str) -> None:
    written = (DOCS / page).read_text(encoding="utf-8")
    assert written == load_script(PAGES[page]).document(), f"run  python {PAGES[page]}"


def test_the_pages_of_the_lab_are_up_to_date() -> None:
    """And there are no others."""
    found = load_script("docs/make_lab.py").documents()
    lab = DOCS / "lab"
    written = {
        path.relative_to(lab).as_posix(): path.read_text(encoding="utf-8")
        for path in lab.rglob("*")
        if path.is_file()
    }
    assert written.keys() == found.keys(), "run  python docs/make_lab.py"
    assert written == found, "run  python docs/make_lab.py"


def test_the_page_of_choices_has_every_key_and_every_name() -> None:
    page = (DOCS / "choices.md").read_text(encoding="utf-8")
    for key in LOCATIONS:
        assert f"`{key}`" in page
        assert all(f"| `{name}` |" in page for name in find_registry(key))


@pytest.mark.parametrize("key", LOCATIONS)
def test_every_choice_has_a_summary(key: str) -> None:
    missing = [one.name for one in find_registry(key).choices.values() if not one.summary.strip()]
    assert not missing


@pytest.mark.parametrize("key", COMPONENTS)
def test_every_component_has_a_paragraph(key: str) -> None:
    """With the setting that selects it."""
    page = (DOCS / "parts.md").read_text(encoding="utf-8")
    missing = [f"{key}={name}" for name in allowed_names(key) if f"`{key}={name}`" not in page]
    assert not missing


def test_every_file_and_symbol_of_the_glossary_exists(glossary: ModuleType) -> None:
    for entry in glossary.ENTRIES:
        glossary.find_docstring(entry)  # raises LookupError


def test_the_glossary_refuses_a_symbol_that_does_not_exist(glossary: ModuleType) -> None:
    with pytest.raises(LookupError, match=r"norm: no BadNorm in nn/norms\.py"):
        glossary.find_docstring(glossary.Entry("norm", "nn/norms.py", "BadNorm"))
    with pytest.raises(LookupError, match="no such file"):
        glossary.find_docstring(glossary.Entry("norm", "nn/norm.py"))


def test_the_glossary_has_the_terms_of_the_field_once_each(glossary: ModuleType) -> None:
    terms = [entry.term for entry in glossary.ENTRIES]
    assert len(terms) == len(set(terms)) >= 60
    expected = {" ".join(term.split()) for term in STANDARD_TERMS.split(",")}
    assert not expected - set(terms)


def test_a_definition_is_the_first_sentence_without_the_term(glossary: ModuleType) -> None:
    define = glossary.definition
    assert define("beam tree", "Beam trees (Lee et al. 2020): what is kept. More.") == (
        "What is kept (Lee et al. 2020)."
    )
    assert define("RMSNorm", "x / sqrt(mean). Nothing else.") == "x / sqrt(mean)."
    assert define("prefix", "ids that come first") == "Ids that come first."
