"""Lenses on the demo: the places that carry the pronoun, the worth of every head, and the completeness of attributions.

    python benchmarks/lenses.py runs/demo                                   # writes benchmarks/lenses.json

The places are searched for with pairs of sentences whose nouns and adjectives occur in training, such as "The cat
didn't cross the river because it was too tired / deep." They are tested on the demo's challenge (204 pronouns for pairs
of noun and adjective that are not in the training data), and BLEU is that of the test set with the pronouns of reason
clauses masked in translations and references.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from regard.data.pairs import Pair
from regard.demo.corpus import (
    Challenge,
    challenge,
    generate,
    held_out,
    pronoun_is_correct,
    reasons,
    wordings,
)
from regard.demo.grammar import Reason, Tense, explain
from regard.inspection.attribution import attribute
from regard.inspection.head_ablation import (
    HeadTable,
    ablate_heads,
    bleu_counts,
    bleu_of,
    mean_ablated,
)
from regard.inspection.patching import break_choice, contrasts, find_carriers, patch
from regard.inspection.teacher_forcing import find_word, force
from regard.recipe import AttentionSite
from regard.tasks import Translator

EXAMPLE = "The dog didn't cross the street because it was too tired."
OTHER = "The dog didn't cross the street because it was too wide."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of sentences for the search")
    parser.add_argument("--test", type=int, default=1000, help="test sentences for BLEU")
    parser.add_argument("--table", type=int, default=200, help="sentences for the table of heads")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    model = Translator.load(options.run, "cpu")
    start = time.monotonic()
    found: dict[str, Any] = {
        "carriers": carriers(model, options.pairs, options.test),
        "heads": head_table(model, options.table).to_json(),
        "completeness": completeness(model, options.table // 10),
        "patching": patching(model),
    }
    found["seconds"] = round(time.monotonic() - start, 1)
    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {found['seconds']} s")


# ---------------------------------------------------------------------------------------------
# The places that carry the pronoun


def sentence_pairs(count: int) -> list[tuple[str, str]]:
    """Sentences that differ only in their adjective, which fits the subject in one and the object in the other."""
    groups: dict[tuple[Any, ...], tuple[list[Reason], list[Reason]]] = {}
    for reason in reasons():
        nouns = reason.subject, reason.object
        if reason.subject.is_person or nouns[0].gender == nouns[1].gender:
            continue
        if (reason.antecedent, reason.adjective) in held_out():
            continue
        group = groups.setdefault((reason.verb, *nouns, reason.hinders), ([], []))
        group[not reason.of_subject].append(reason)
    pairs = [pair for some in groups.values() for pair in product(*some)]
    Random("lenses").shuffle(pairs)
    found = [tuple(_sentence(reason).source for reason in pair) for pair in pairs]
    return [(a, b) for a, b in found if a.split()[:-1] == b.split()[:-1]][:count]


def _sentence(reason: Reason, past: bool = True) -> Pair:
    framings, _, subjects, objects = wordings(reason)
    return explain(reason, framings[0], Tense(past), subjects[0], objects[0])


def carriers(model: Translator, pairs: int, test: int) -> dict[str, Any]:
    """Search on ordinary sentences, ablate, then count broken pronouns of the challenge and the BLEU of other words."""
    search = contrasts(model, sentence_pairs(pairs))
    ranked = find_carriers(model, search)
    ablated = break_choice(model, search, ranked)
    items, corpus = challenge(), list(generate("test", test))
    sources = [item.source for item in items]
    before = pronouns(items, _translate(model, sources))
    bleu = bleu_of_others(model, corpus)
    with mean_ablated(model, ablated.means):
        after = pronouns(items, _translate(model, sources))
        bleu_after = bleu_of_others(model, corpus)
    result = {
        "pairs": len(search),
        "places": [
            {
                "head": f"{one.place.site}.{one.place.layer}.{one.place.head}",
                "token": one.token.text,
                "effect": round(one.effect, 3),
            }
            for one in ablated.carriers
        ],
        "pronouns": {"total": len(items), "before": before, "after": after},
        "bleu_of_other_words": {"before": round(bleu, 2), "after": round(bleu_after, 2)},
        "test_sentences": test,
    }
    print(json.dumps(result, indent=1))
    return result


def _translate(model: Translator, texts: Sequence[str]) -> list[str]:
    return [found[0].translation.text for found in model.generate(texts, plain=True)]


def pronouns(items: Sequence[Challenge], translations: Sequence[str]) -> int:
    """The number of correct pronouns."""
    return sum(map(pronoun_is_correct, items, translations))


def bleu_of_others(model: Translator, corpus: Sequence[Pair]) -> float:
    """BLEU with the pronoun of every reason clause masked."""
    translations = _translate(model, [pair.source for pair in corpus])
    masked = [list(map(_mask, lines)) for lines in (translations, [pair.target for pair in corpus])]
    return bleu_of(bleu_counts(*masked).sum(0))


def _mask(text: str) -> str:
    return re.sub(r"(\b(?:weil|obwohl)\b.*?\b)(er|sie|es)\b", r"\1PRON", text)


# ---------------------------------------------------------------------------------------------
# Heads, attributions, patching


def head_table(model: Translator, sentences: int) -> HeadTable:
    """The worth of each head, on sentences of the challenge."""
    items = challenge()
    Random("lenses").shuffle(items)
    items = items[:sentences]

    def correct(number: int, translation: str) -> bool:
        return pronoun_is_correct(items[number], translation)

    table = ablate_heads(
        model,
        [item.source for item in items],
        [item.target for item in items],
        correct=correct,
        links=[coreference(model, item) for item in items],
    )
    for one in table.effects:
        changes = (one.bleu, one.log_probability, one.correct)
        print(one.head, one.behaviour, *(f"{change[0]:+.2f}" for change in changes if change))
    return table


@cache
def antecedents() -> dict[str, str]:
    """What *it* refers to in each sentence of the challenge."""
    return {
        _sentence(reason, past).source: reason.antecedent.english
        for reason in reasons()
        for past in (True, False)
        if (reason.antecedent, reason.adjective) in held_out()
    }


def coreference(model: Translator, item: Challenge) -> dict[AttentionSite, list[tuple[int, int]]]:
    """The positions of *it* and of what it refers to in the source, and of the pronoun's prediction in the decoder."""
    forced = force(model, item.source, item.target)
    sources = {
        "".join(forced.source[one].text for one in word).lstrip("▁"): word
        for word in forced.source_words
    }
    noun = sources[antecedents()[item.source]][-1]
    return {
        "encoder": [(sources["it"][0], noun)],
        "cross_attention": [(find_word(forced, item.pronoun), noun)],
    }


def completeness(model: Translator, sentences: int) -> dict[str, Any]:
    """The relative errors of the sums of integrated gradients, for the pronouns of the challenge."""
    items = challenge()[:: max(1, len(challenge()) // sentences)]
    errors = [
        attribute(
            model,
            item.source,
            item.pronoun,
            "sie" if item.pronoun != "sie" else "er",
            translation=item.target,
            methods=["integrated_gradients"],
        ).completeness
        for item in items
    ]
    return {"sentences": len(errors), "max": max(errors), "mean": sum(errors) / len(errors)}


def patching(model: Translator) -> dict[str, Any]:
    """The place that moves er to sie most."""
    found = patch(model, EXAMPLE, OTHER)
    stack, depth, position = found.best()
    effect = float(found.effects[stack][depth, position])
    token = found.labels[stack][position][0].text
    return {"stack": stack, "depth": depth, "token": token, "effect": round(effect, 3)}


if __name__ == "__main__":
    main()
