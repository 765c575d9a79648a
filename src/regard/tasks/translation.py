"""Translation: text in one language to text in another, or any other pairs of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack, cast

from regard.data.pairs import Pair, context_of, language_of, parse_of
from regard.data.protected_spans import ProtectedSpans
from regard.data.recasing import is_all_caps, is_upper_case, restore_case, sentence_case, upper_case
from regard.data.special_tokens import UNK
from regard.decoding.hypothesis import Hypothesis
from regard.errors import RegardError
from regard.inference.confidence import MAX_SENTENCES, Calibration, features, geometric_mean
from regard.inference.engine import Observer, Request
from regard.inference.hallucinations import OutputChecker, OutputStatistics
from regard.inference.native_decoder import NativeDecoder, PositionTable
from regard.tasks.base import TASKS, PairEncoder, SequenceGenerator, Task
from regard.tasks.translation_requests import (
    Languages,
    Parses,
    TargetLanguages,
    language_of_each,
    phrase_of,
    phrases_of,
    terms_of_each,
    trees_of,
)

if TYPE_CHECKING:
    from torch import nn

    from regard.data.dependency_trees import ParsedSentence
    from regard.inference.placeholders import Substitution
    from regard.inspection.trace import Trace
    from regard.metrics import MetricResult
    from regard.nn.loss import TrainingLoss
    from regard.nn.non_autoregressive import NonAutoregressiveTransformer
    from regard.recipe import (
        DecodingConfig,
        DecodingOptions,
        Device,
        Precision,
        TrainingConfig,
    )
    from regard.storage.run_dir import RunDir


QUICK: DecodingOptions = {
    "beam": 1,
    "beam_groups": 1,
    "coverage_penalty": 0.0,
    "mbr": 0,
    "temperature": 0.0,
    "protect": (),
}
"""greedy search, for validation"""
QUICK_NON_AUTOREGRESSIVE: DecodingOptions = {"length_beam": 1}


Context = Sequence[Sequence[str]] | None
"""The sentences before each text, in order."""


class Translation(NamedTuple):
    """One translation of one text."""

    text: str
    score: float
    """what hypotheses are ranked by: log-probability over length penalty, or the mean log-probability, or chrF for
    minimum Bayes risk decoding"""
    log_probability: float
    tokens: list[str]
    token_log_probabilities: list[float]
    finished: bool
    """False if the translation was cut off at its largest length, before EOS"""
    confidence: float = 1.0
    """between 0 and 1; see ``Translator.calibration``. 1 for a blank text."""


EMPTY = Translation("", 0.0, 0.0, [], [], True)
"""The translation of a blank text."""


class Generated(NamedTuple):
    """A translation with the request and the hypothesis it comes from."""

    translation: Translation
    request: Request
    hypothesis: Hypothesis


class Translator(SequenceGenerator):
    """A translation model: texts and options in, translations out."""

    task = "translation"
    command = "translate"
    language: str | None = None
    """the default target language of a multilingual model"""
    substitutes: dict[tuple[int, ...], list[str]] | None = None
    """words that can stand in for placeholders, by the tags before a source"""

    @classmethod
    def load_prepared(
        cls, run: RunDir, device: Device, precision: Precision, threads: int | None
    ) -> Self | None:
        from regard.tasks.native_model_cache import read_prepared

        def longer_positions(side: str, end: int) -> PositionTable:
            from regard.inference.native_packing import position_tables
            from regard.inference.packed_transformer import PackedTransformer

            packed = model.engine.packed
            assert isinstance(packed, PackedTransformer)
            return position_tables(packed)(side, end)

        state = cls.prepared_state(run, device, precision)
        found = None if state is None else read_prepared(run, state, longer_positions)
        if found is None:
            return None
        recipe, weights = found
        tokenizer, native = run.tokenizer(recipe), NativeDecoder(weights)
        model = cls(recipe, tokenizer, None, None, "int8", run, threads, native=native)
        return model

    @classmethod
    def prepared_state(
        cls, run: RunDir, device: Device, precision: Precision
    ) -> dict[str, Any] | None:
        from regard.tasks.native_model_cache import prepared_state

        return prepared_state(run, device, precision)

    def store_prepared(self, state: dict[str, Any]) -> None:
        if self.engine.native is None or self.run is None:
            return
        from regard.inference.packed_transformer import PackedTransformer
        from regard.nn.transformer import Transformer
        from regard.tasks.native_model_cache import write_prepared

        assert isinstance(self.network, Transformer)
        assert isinstance(self.engine.packed, PackedTransformer)
        write_prepared(self.run, state, self.recipe, self.network, self.engine.packed)

    def freeze(self) -> None:
        super().freeze()
        self.substitutes = None

    def with_target_language(self, language: str | None) -> Translator:
        """The same model with another default target language."""
        self.languages.tags(0, language)
        other = copy(self)
        other.language = language
        return other

    @property
    def languages(self) -> TargetLanguages:
        return TargetLanguages(self.recipe.data.targets, self.language)

    @property
    def needs_trees(self) -> bool:
        return self.recipe.model.position == "tree"

    @property
    def non_autoregressive(self) -> bool:
        return self.recipe.model.architecture == "non_autoregressive"

    # Confidence

    @cached_property
    def calibration(self) -> Calibration | None:
        """How the confidence of a translation follows from its token probabilities, from the run's card.

        With it, the confidence is the probability that sentence chrF is at least 30. Without it (None), the
        confidence is the geometric mean of the token probabilities.
        """
        stored = None if self.run is None else self.run.card().get("confidence")
        if self.run is None or stored is None:
            return None
        return Calibration.from_json(stored, str(self.run.card_file))

    def output_checker(self) -> OutputChecker:
        """Finds hallucination-like translations, by what the references of the validation set look like."""
        stored = None if self.run is None else self.run.card().get("references")
        statistics = OutputStatistics()
        if self.run is not None and stored is not None:
            statistics = OutputStatistics.from_json(stored, str(self.run.card_file))
        if not self.recipe.data.named:
            return OutputChecker(statistics)
        pairs = [
            pair for pair in self.recipe.data.language_pairs if self.language in (None, pair[1])
        ]
        (_, target), sources = pairs[0], [source for source, _ in pairs]
        targets = {to for _, to in pairs}
        return OutputChecker(statistics, target if len(targets) == 1 else None, sources)

    def calibrate(self, pairs: Sequence[Pair]) -> Calibration | None:
        """Fit the confidence to pairs that the model was not trained on, at most ``MAX_SENTENCES`` of them.

        None if too few translations are good, or too few are bad.
        """
        from regard.metrics.sacrebleu import sentence_chrf

        stride = -(-len(pairs) // MAX_SENTENCES)
        chosen = [pair for pair in pairs[:: stride or 1] if pair.source.strip()]
        parses = [parse_of(pair) for pair in chosen] if self.needs_trees else None
        languages = [language_of(pair) for pair in chosen]
        found = self.generate(
            [pair.source for pair in chosen],
            parses=parses,
            to=languages if self.recipe.data.targets else None,
            context=list(map(context_of, chosen)) if self.recipe.data.context else None,
        )
        rows = [
            features(best.hypothesis.token_log_probabilities, len(best.request.source))
            for best, *_ in found
        ]
        outputs = [best.translation.text for best, *_ in found]
        chrf = map(sentence_chrf, outputs, [pair.target for pair in chosen])
        return Calibration.fit(rows, list(chrf))

    def _confidence(self, hypothesis: Hypothesis, request: Request) -> float:
        values = hypothesis.token_log_probabilities
        if self.calibration is None:
            return geometric_mean(values)
        return self.calibration(values, len(request.source))

    # Evaluation

    def predict(
        self, sources: Sequence[str], *, quick: bool = False, to: Languages = None
    ) -> list[str]:
        return self.translate(sources, to=to, **self._quick(quick))

    def predict_pairs(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[str]:
        sources = [pair.source for pair in pairs]
        # Of two models that are compared, perhaps only one uses trees.
        if not self.needs_trees:
            to = [language_of(pair) for pair in pairs]
            contexts = list(map(context_of, pairs)) if self.recipe.data.context else None
            return self.translate(sources, to=to, context=contexts, **self._quick(quick))
        parses = [parse_of(pair) for pair in pairs]
        return self.translate(sources, parses=parses if any(parses) else None, **self._quick(quick))

    def _quick(self, quick: bool) -> DecodingOptions:
        if not quick:
            return {}
        return QUICK_NON_AUTOREGRESSIVE if self.non_autoregressive else QUICK

    def score_outputs(
        self, outputs: Sequence[str], pairs: Sequence[Pair], *, quick: bool = False
    ) -> list[MetricResult]:
        """As for any model, but each target language is scored separately, except in validation."""
        languages = [language_of(pair) for pair in pairs]
        whole = super().score_outputs
        if quick or len({*languages}) <= 1:
            return whole(outputs, pairs, quick=quick)
        results = []
        for language in dict.fromkeys(languages):
            rows = [row for row, one in enumerate(languages) if one == language]
            some = whole([outputs[row] for row in rows], [pairs[row] for row in rows])
            results += [replace(one, name=f"{one.name} to {language}") for one in some]
        return results

    # Translation

    def set_decoding(self, **options: Unpack[DecodingOptions]) -> None:
        """Change the decoding section of the model's recipe."""
        decoding = self.decoding_for(options)
        self.recipe = self.recipe.model_copy(update={"decoding": decoding})

    def translate(
        self,
        texts: Sequence[str],
        *,
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        length: int | None = None,
        parses: Parses = None,
        to: Languages = None,
        context: Context = None,
        **options: Unpack[DecodingOptions],
    ) -> list[str]:
        """The best translation of each text; see ``search`` for the arguments."""
        found = self.search(
            texts,
            prefixes=prefixes,
            constraints=constraints,
            length=length,
            parses=parses,
            to=to,
            context=context,
            **options,
        )
        return [best.text for best, *_ in found]

    def search(
        self,
        texts: Sequence[str],
        *,
        nbest: int = 1,
        prefixes: Sequence[str] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        length: int | None = None,
        parses: Parses = None,
        to: Languages = None,
        context: Context = None,
        observer: Observer | None = None,
        **options: Unpack[DecodingOptions],
    ) -> list[list[Translation]]:
        """The n-best list: the ``nbest`` best translations of each text; with a temperature, ``nbest`` samples.

        prefixes: how each translation must begin. constraints: the terms that each translation must contain. length:
        the number of tokens of each translation, for non-autoregressive models. parses: the dependency trees, for
        ``position: tree``. to: the target language of a multilingual model, for all texts or for each. context: the
        sentences before each text, for models with ``data.context``. observer: called after each decoding step, for a
        single text. options override the recipe's ``decoding`` section.
        """
        found = self.generate(
            texts,
            nbest=nbest,
            prefixes=prefixes,
            constraints=constraints,
            length=length,
            parses=parses,
            to=to,
            context=context,
            observer=observer,
            **options,
        )
        return [[one.translation for one in some] or [EMPTY] for some in found]

    def generate(
        self,
        texts: Sequence[str],
        *,
        nbest: int = 1,
        prefixes: Sequence[str] | Sequence[Sequence[int]] | None = None,
        constraints: Sequence[Sequence[str]] | None = None,
        length: int | None = None,
        parses: Parses = None,
        to: Languages = None,
        context: Context = None,
        observer: Observer | None = None,
        plain: bool = False,
        **options: Unpack[DecodingOptions],
    ) -> list[list[Generated]]:
        """Like ``search``, with the request and the hypothesis of each translation; none for a blank text."""
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise RegardError("the texts must be a list of strings: [text]")
        decoding = self.decoding_for(options, nbest)
        self._check_call(decoding, nbest, prefixes, constraints, length)
        if length is not None and options.get("length_beam") not in (None, 1):
            _refuse("no effect with a given length", length_beam=options["length_beam"])
        terms = terms_of_each(constraints, len(texts))
        contexts = self._contexts(context, len(texts))
        requests = self.requests(texts, prefixes, parses, to, contexts)
        given, texts = texts, self.recased(texts)
        if decoding.is_sampling and not decoding.mbr:
            requests = _number_samples(requests, nbest)
        # For blank texts too: a term that the tokenizer cannot spell is always refused.
        requests = [
            self._with_phrases(request, text, some, decoding.protect)
            for request, text, some in zip(requests, texts, terms, strict=True)
        ]
        rows = [row for row, text in enumerate(texts) if text.strip()]
        found: dict[int, list[Generated]] = {}
        if "placeholders" in decoding.protect and not self.needs_trees:
            languages = language_of_each(to, len(texts))
            chosen = [texts[row] for row in rows]
            some = self._with_substitutes(
                chosen,
                [list(requests[row].prefix) for row in rows],
                [terms[row] for row in rows],
                [languages[row] for row in rows],
                decoding,
                nbest,
                plain,
                [contexts[row] for row in rows],
            )
            found = {rows[number]: generated for number, generated in some.items()}
        rest = [row for row in rows if row not in found]
        asked = [requests[row] for row in rest]
        every = self.engine.generate(
            asked,
            decoding,
            nbest=nbest,
            length=length,
            observer=observer if len(asked) == 1 and not decoding.mbr else None,
            plain=plain,
        )
        for row, request, hypotheses in zip(rest, asked, every, strict=True):
            found[row] = self._ranked(request, hypotheses, decoding, nbest)
        for row, generated in found.items():
            prefix = prefixes[row] if prefixes else ""
            begin = prefix if isinstance(prefix, str) else ""
            found[row] = [self._match_case(given[row], one, terms[row], begin) for one in generated]
        return [found.get(row, []) for row in range(len(texts))]

    def _ranked(
        self,
        request: Request,
        hypotheses: Sequence[Hypothesis],
        decoding: DecodingConfig,
        nbest: int,
    ) -> list[Generated]:
        """The translations of a request; minimum Bayes risk ranks its samples by their mean chrF to the others."""
        sampled = decoding.is_sampling
        every = [
            Generated(
                self._translation(one, request),
                request._replace(sample=request.sample + n * sampled),
                one,
            )
            for n, one in enumerate(hypotheses)
        ]
        if not decoding.mbr:
            return every
        from regard.metrics.mbr import mbr_rank

        ranked = mbr_rank([one.translation.text for one in every])[:nbest]
        return [
            every[number]._replace(translation=every[number].translation._replace(score=mean))
            for number, mean in ranked
        ]

    def _translation(self, hypothesis: Hypothesis, request: Request) -> Translation:
        (text,) = self.tokenizer.target.decode([hypothesis.tokens])
        return Translation(
            text,
            hypothesis.score,
            hypothesis.log_probability,
            self.tokenizer.target.pieces(hypothesis.tokens),
            hypothesis.token_log_probabilities,
            hypothesis.finished,
            self._confidence(hypothesis, request),
        )

    # Texts in capitals

    @property
    def recases(self) -> bool:
        """Whether the model was trained to read texts in capitals in sentence case."""
        return self.recipe.training.augment.upper > 0

    def recased(self, texts: Sequence[str]) -> Sequence[str]:
        """What the model reads: all-caps texts in sentence case, others as they are."""
        return list(map(restore_case, texts)) if self.recases else texts

    def match_case(
        self, source: str, translation: str, terms: Sequence[str] = (), prefix: str = ""
    ) -> str:
        """A translation, in upper case if its source is in capitals and was recased.

        Required terms and a prefix stay as given.
        """
        if not self.recases or not is_all_caps(source):
            return translation
        given = self.tokenizer.target.normalize(prefix)
        kept = given if translation.startswith(given) else ""
        return kept + upper_case(translation[len(kept) :], keep=terms)

    def _match_case(
        self, source: str, generated: Generated, terms: Sequence[str], prefix: str
    ) -> Generated:
        translation = generated.translation
        text = self.match_case(source, translation.text, terms, prefix)
        return generated._replace(translation=translation._replace(text=text))

    def encode_translation(self, translation: str, source: str) -> list[int]:
        """Target ids of a translation, or of its beginning: in sentence case if ``match_case`` would upper-case it."""
        if self.recases and is_all_caps(source) and is_upper_case(translation):
            translation = sentence_case(translation)
        (ids,) = self.tokenizer.target.encode([translation])
        return ids

    # Options

    def decoding_for(self, options: DecodingOptions, nbest: int = 1) -> DecodingConfig:
        """The recipe's decoding section with the options of a call."""
        given = {name: value for name, value in options.items() if value is not None}
        if not given and self.recipe.decoding.beam >= nbest and not self.non_autoregressive:
            return self.recipe.decoding
        from regard.recipe import DecodingConfig, override_decoding

        allowed = DecodingConfig.options_read_by("search", "sampling")
        kind = "an autoregressive model"
        if self.non_autoregressive:
            allowed = DecodingConfig.options_read_by("mask_predict")
            kind = "a non-autoregressive model"
        wrong = {name: value for name, value in given.items() if name not in allowed}
        known = {
            name: value for name, value in wrong.items() if name in DecodingConfig.model_fields
        }
        if known:
            _refuse(f"no effect on {kind}", **known)
        decoding = override_decoding(self.recipe.decoding, given)
        sampled = "mbr" if decoding.mbr else "temperature" if decoding.is_sampling else None
        if sampled and "beam" in given and given["beam"] != 1:
            raise RegardError(
                f"beam {given['beam']}, {sampled} {getattr(decoding, sampled)}: {sampled} turns on sampling, "
                "which uses no beam; set only one of the two"
            )
        if not sampled:
            defaults = DecodingConfig()
            sampling_only = DecodingConfig.options_read_by(
                "sampling"
            ) - DecodingConfig.options_read_by("search")
            unused = {
                name: given[name]
                for name in sorted(sampling_only)
                if name in given and given[name] != getattr(defaults, name)
            }
            _refuse("no effect without temperature or mbr", **unused)
        width = "length_beam" if self.non_autoregressive else "beam"
        if width not in given and nbest > getattr(decoding, width) and not sampled:
            return override_decoding(decoding, {width: nbest})
        return decoding

    def _check_call(
        self,
        decoding: DecodingConfig,
        nbest: int,
        prefixes: object,
        constraints: object,
        length: int | None,
    ) -> None:
        """Refuse arguments that the model or the decoding method does not support."""
        if nbest < 1:
            raise RegardError(f"nbest {nbest}: must be at least 1")
        if self.non_autoregressive:
            _refuse(
                "not supported by a non-autoregressive model",
                prefixes=prefixes,
                constraints=constraints,
            )
            self._check_length(decoding, nbest, length)
            return
        _refuse("only for a non-autoregressive model", length=length)
        if decoding.is_sampling:
            _refuse("sampling cannot guarantee them", constraints=constraints)
            if decoding.mbr and nbest > decoding.mbr:
                raise RegardError(f"nbest {nbest}: mbr generates only {decoding.mbr} samples")
        elif not 1 <= nbest <= decoding.beam:
            raise RegardError(
                f"beam {decoding.beam}, nbest {nbest}: nbest must be between 1 and beam"
            )
        if decoding.beam_groups > 1 and constraints is not None:
            raise RegardError(
                f"beam_groups {decoding.beam_groups}: cannot be combined with constraints"
            )

    def _check_length(self, decoding: DecodingConfig, nbest: int, length: int | None) -> None:
        network = cast("NonAutoregressiveTransformer", self.network)
        if length is not None and network.length.predicts_eos:
            raise RegardError(
                f"length {length}: this model ends at the first EOS (model.non_autoregressive.length: eos), "
                "so its length cannot be set"
            )
        if length is not None and length < 1:
            raise RegardError(f"length {length}: must be at least 1")
        most = decoding.length_beam if length is None else 1
        if not 1 <= nbest <= most:
            raise RegardError(f"nbest {nbest}: must be between 1 and length_beam, {most}")

    # Requests

    def encode(
        self, texts: Sequence[str], to: Languages = None, context: Context = None
    ) -> list[list[int]]:
        """Source ids of texts, after the sentences before them and the tag of the target language, if there are any."""
        clean = self.recipe.data.clean
        longest = clean.max_tokens if clean.truncate else None
        tags = self.languages.tags(len(texts), to)
        texts = self.recased(texts)
        encoded = super().encode(texts)
        if context is not None and any(context):
            from regard.data.cleaning import encode_with_context

            recased = list(map(self.recased, context))
            encoded = encode_with_context(self.tokenizer.source, texts, recased)
            self.check_lengths(encoded)
        tagged = map(self.tokenizer.source.prepend_tags, encoded, tags)
        return [ids[:longest] for ids in tagged]

    def _contexts(self, context: Context, count: int) -> Sequence[Sequence[str]]:
        """The last sentences before each text, as many as the model was trained with."""
        if context is None:
            return [()] * count
        if len(context) != count:
            raise RegardError(f"{len(context)} contexts for {count} texts: expected one per text")
        sentences = self.recipe.data.context
        if not sentences and any(context):
            raise RegardError("context: this model was trained without context (data.context: 0)")
        return [list(some)[-sentences:] for some in context]

    def requests(
        self,
        texts: Sequence[str],
        prefixes: Sequence[str] | Sequence[Sequence[int]] | None = None,
        parses: Parses = None,
        to: Languages = None,
        context: Context = None,
    ) -> list[Request]:
        """The requests for texts. prefixes are texts or token ids."""
        if prefixes is not None and len(prefixes) != len(texts):
            raise RegardError(
                f"{len(prefixes)} prefixes for {len(texts)} texts: expected one per text"
            )
        sources = self.encode(texts, to, context)
        every: Sequence[str | Sequence[int]] = prefixes or [()] * len(texts)
        forced = [
            self._encode_prefix(one, text) if isinstance(one, str) else list(one)
            for one, text in zip(every, texts, strict=True)
        ]
        position = self.recipe.model.position
        trees = trees_of(texts, parses, sources, self.tokenizer.source, position)
        return [
            Request(source, prefix, tree=tree)
            for source, prefix, tree in zip(sources, forced, trees, strict=True)
        ]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return super().count_tokens(self.recased(texts))

    def _encode_prefix(self, prefix: str, text: str) -> list[int]:
        ids = self.encode_translation(prefix, text)
        if UNK in ids:
            raise RegardError(f"prefix {prefix!r}: this model's tokenizer cannot spell it")
        return ids

    def request(self, text: str, parse: ParsedSentence | None = None) -> Request:
        (request,) = self.requests([text], parses=None if parse is None else [parse])
        return request

    def _with_phrases(
        self, request: Request, text: str, terms: Sequence[str], protect: Sequence[str]
    ) -> Request:
        phrases = phrases_of(text, terms, ProtectedSpans(protect), self.tokenizer.target)
        return request._replace(phrases=phrases)

    # Placeholders

    def _with_substitutes(
        self,
        texts: Sequence[str],
        prefixes: Sequence[Sequence[int]],
        terms: Sequence[Sequence[str]],
        languages: Sequence[str | None],
        decoding: DecodingConfig,
        nbest: int,
        plain: bool = False,
        contexts: Context = None,
    ) -> dict[int, list[Generated]]:
        """Translate texts with words in place of their placeholders; by row, only if all placeholders come back."""
        placeholders = ProtectedSpans(("placeholders",))
        protected = ProtectedSpans(decoding.protect)
        if not any(map(placeholders.find, texts)):
            return {}
        from regard.inference.placeholders import substitutions

        begun = self.tokenizer.target.decode(prefixes)
        tries = [
            (row, one)
            for row, text in enumerate(texts)
            for one in substitutions(
                text, self._substitutes(languages[row]), placeholders, [*terms[row], begun[row]]
            )
        ]
        rows = [row for row, _ in tries]
        bare = self.requests(
            [one.text for _, one in tries],
            [prefixes[row] for row in rows],
            to=[languages[row] for row in rows],
            context=[contexts[row] for row in rows] if contexts else None,
        )
        asked = [
            self._with_words(
                self._with_phrases(request, one.text, terms[row], decoding.protect), one
            )
            for request, (row, one) in zip(bare, tries, strict=True)
        ]
        every = self.engine.generate(asked, decoding, nbest=nbest, plain=plain)
        best: dict[int, list[Generated]] = {}
        for (row, one), request, hypotheses in zip(tries, asked, every, strict=True):
            some = [
                found._replace(translation=_restored(found.translation, one))
                for found in self._ranked(request, hypotheses, decoding, nbest)
            ]
            if any(protected.mismatches(texts[row], found.translation.text) for found in some):
                continue
            if row not in best or some[0].translation.score > best[row][0].translation.score:
                best[row] = some
        return best

    def _with_words(self, request: Request, substitution: Substitution) -> Request:
        """The request with the substitute words as required phrases."""
        words = [
            phrase_of(word, self.tokenizer.target, times)
            for word, times in substitution.times.items()
        ]
        return request._replace(phrases=[*request.phrases, *(one for one in words if one)])

    def _substitutes(self, to: str | None) -> list[str]:
        """The words that can stand in for placeholders, computed once."""
        (tags,) = self.encode([""], to)
        known = self.substitutes = self.substitutes or {}
        if tuple(tags) not in known:
            from regard.inference.placeholders import copied_words

            known[tuple(tags)] = copied_words(self.network, self.tokenizer, tags, self.device)
        return known[tuple(tags)]

    # Inspection

    def trace(self, text: str, **options: Any) -> Trace:
        """A trace of the translation of one text; options: see ``inspection.training_history.trace_with_history``."""
        from regard.inspection.training_history import trace_with_history

        if len(self.runs) > 1:
            raise RegardError("trace: not supported for an ensemble; load one of its runs")
        return trace_with_history(self, text, **options)


def _refuse(reason: str, **given: object) -> None:
    """Arguments without effect are errors."""
    values = {name: value for name, value in given.items() if value is not None}
    if values:
        from regard.recipe import abbreviate

        asked = [f"{name} {abbreviate(value)}" for name, value in values.items()]
        raise RegardError(f"{', '.join(asked)}: {reason}")


def _number_samples(requests: Sequence[Request], samples: int) -> list[Request]:
    """Number the requests of the same source, so that their samples differ."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for one in requests:
        source = tuple(one.source)
        numbered.append(one._replace(sample=seen[source] * samples))
        seen[source] += 1
    return numbered


def _restored(translation: Translation, substitution: Substitution) -> Translation:
    tokens = list(map(substitution.restore_token, translation.tokens))
    return translation._replace(text=substitution.restore(translation.text), tokens=tokens)


def translation_loss(
    network: nn.Module, training: TrainingConfig, special_tokens: int
) -> TrainingLoss:
    """The loss of a translation network: of the next token, or of masked tokens for non-autoregressive ones."""
    from regard.nn.loss import MaskPredictLoss, Seq2SeqLoss
    from regard.nn.non_autoregressive import NonAutoregressiveTransformer

    parallel = isinstance(network, NonAutoregressiveTransformer)
    return (MaskPredictLoss if parallel else Seq2SeqLoss)(network, training, special_tokens)


TASKS.register("translation", summary="text to text")(
    Task(
        Translator,
        PairEncoder,
        translation_loss,
        architectures=("transformer", "decoder_only", "lstm", "convolution", "non_autoregressive"),
    )
)
