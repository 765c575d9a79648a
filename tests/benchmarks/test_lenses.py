"""The benchmark of the lenses."""

from collections.abc import Callable
from pathlib import Path

from regard.demo.corpus import challenge
from regard.tasks import Translator
from tests.scripts import load_script


def test_sentence_pairs_differ_in_their_last_word() -> None:
    pairs = load_script("benchmarks/lenses.py").sentence_pairs(20)
    assert len(pairs) == 20
    assert all(a.split()[:-1] == b.split()[:-1] and a != b for a, b in pairs)
    assert not {item.source for item in challenge()} & {text for pair in pairs for text in pair}


def test_pronouns_are_masked_in_reason_clauses_only() -> None:
    mask = load_script("benchmarks/lenses.py")._mask
    assert (
        mask("Sie schlief nicht, weil sie zu müde war.")
        == "Sie schlief nicht, weil PRON zu müde war."
    )
    assert mask("Sie schlief, und er auch.") == "Sie schlief, und er auch."


def test_coreference_links_the_pronoun_and_its_noun(make_run: Callable[..., Path]) -> None:
    benchmark = load_script("benchmarks/lenses.py")
    model = Translator.load(make_run(tokenizer={"kind": "word", "vocab_size": 420}), "cpu")
    item = challenge()[0]
    ((query, key),) = benchmark.coreference(model, item)["encoder"]
    words = item.source.split()
    assert (words[query], words[key]) == ("it", "dog")
