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
from regard.data.special_tokens import SPACE_SYMBOL, UNK
from regard.decoding.hypothesis import Hypothesis
from regard.errors import RegardError
from regard.inference.confidence import (
    MAX_SENTENCES,
    ConfidenceCalibration,
    features,
    geometric_mean,
)
from regard.inference.engine import Observer, Request
from regard.inference.hallucinations import OutputChecker, OutputStatistics
from regard.inference.native_decoder import NativeDecoder, PositionTable
from regard.recipe.registry import FORMATS, find_registry
from regard.tasks.base import PAIR_SUPPORTS, TASKS, PairEncoder, SequenceGenerator, Task
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
    from regard.inspection.hooks import Head
    from regard.inspection.trace import Trace
    from regard.metrics import MetricResult
    from regard.nn.loss import TrainingLoss
    from regard.nn.non_autoregressive import NonAutoregressiveTransformer
    from regard.recipe import DecodingConfig, DecodingOptions, Device, Precision, TrainingConfig
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

    def with_text(self, text: str) -> Generated:
        return self._replace(translation=self.translation._replace(text=text))


class Translator(SequenceGenerator):
    """A translation model: texts and options in, translations out."""

    task = "translation"
    command = "translate"
    language: str | None = None
    """the default target language of a multilingual model"""
    placeholder_substitutes: dict[tuple[int, ...], list[str]] | None = None
    """words that can replace placeholders, by the tags before a source"""

    @classmethod
    def load_cached(
        cls, run: RunDir, device: Device, precision: Precision, threads: int | None
    ) -> Self | None:
        from regard.tasks.native_model_cache import read_cached_model

        def longer_positions(side: str, end: int) -> PositionTable:
            from regard.inference.native_packing import position_tables
            from regard.inference.packed_transformer import PackedTransformer

            packed = model.engine.packed
            assert isinstance(packed, PackedTransformer)
            return position_tables(packed)(side, end)

        key = cls.cache_key(run, device, precision)
        cached = None if key is None else read_cached_model(run, key, longer_positions)
        if cached is None:
            return None
        recipe, weights = cached
        tokenizer, native = run.tokenizer(recipe), NativeDecoder(weights)
        model = cls(recipe, tokenizer, None, None, "int8", run, threads, native=native)
        return model

    @classmethod
    def cache_key(cls, run: RunDir, device: Device, precision: Precision) -> dict[str, Any] | None:
        from regard.tasks.native_model_cache import cache_key

        return cache_key(run, device, precision)

    def store_cached(self, key: dict[str, Any]) -> None:
        if self.engine.native is None or self.run is None:
            return
        from regard.inference.packed_transformer import PackedTransformer
        from regard.nn.transformer import Transformer
        from regard.tasks.native_model_cache import write_cached_model

        assert isinstance(self.network, Transformer)
        assert isinstance(self.engine.packed, PackedTransformer)
        write_cached_model(self.run, key, self.recipe, self.network, self.engine.packed)

    def freeze(self) -> None:
        super().freeze()
        self.placeholder_substitutes = None

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
    def calibration(self) -> ConfidenceCalibration | None:
        """The calibration from the run's card, which maps token probabilities to a confidence.

        With it, the confidence is the probability that sentence chrF is at least 30. Without it (None), the
        confidence is the geometric mean of the token probabilities.
        """
        stored = None if self.run is None else self.run.card().get("confidence")
        if self.run is None or stored is None:
            return None
        return ConfidenceCalibration.from_json(stored, str(self.run.card_file))

    def output_checker(self) -> OutputChecker:
        """Detects hallucination-like translations, by statistics of the references of the validation set."""
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

    def calibrate_confidence(self, pairs: Sequence[Pair]) -> ConfidenceCalibration | None:
        """Fit the confidence to pairs that the model was not trained on, at most ``MAX_SENTENCES`` of them.

        None if too few translations are good, or too few are bad.
        """
        from regard.metrics.sacrebleu import sentence_chrf

        stride = -(-len(pairs) // MAX_SENTENCES)
        sample = [pair for pair in pairs[:: stride or 1] if pair.source.strip()]
        parses = [parse_of(pair) for pair in sample] if self.needs_trees else None
        languages = [language_of(pair) for pair in sample]
        results = self.generate(
            [pair.source for pair in sample],
            parses=parses,
            to=languages if self.recipe.data.targets else None,
            context=list(map(context_of, sample)) if self.recipe.data.context else None,
        )
        rows = [
            features(best.hypothesis.token_log_probabilities, len(best.request.source))
            for best, *_ in results
        ]
        outputs = [best.translation.text for best, *_ in results]
        chrf = map(sentence_chrf, outputs, [pair.target for pair in sample])
        return ConfidenceCalibration.fit(rows, list(chrf))

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
        """Like ``Model.score_outputs``, but each target language is scored separately, except in validation."""
        languages = [language_of(pair) for pair in pairs]
        score = super().score_outputs
        if quick or len({*languages}) <= 1:
            return score(outputs, pairs, quick=quick)
        results = []
        for language in dict.fromkeys(languages):
            rows = [row for row, row_language in enumerate(languages) if row_language == language]
            scores = score([outputs[row] for row in rows], [pairs[row] for row in rows])
            results += [replace(result, name=f"{result.name} to {language}") for result in scores]
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
        results = self.search(
            texts,
            prefixes=prefixes,
            constraints=constraints,
            length=length,
            parses=parses,
            to=to,
            context=context,
            **options,
        )
        return [best.text for best, *_ in results]

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
        results = self.generate(
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
        return [
            [generated.translation for generated in nbest_list] or [EMPTY] for nbest_list in results
        ]

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
        self._check_options(options, decoding, constraints, length)
        terms = terms_of_each(constraints, len(texts))
        contexts = self._contexts(context, len(texts))
        requests = self.requests(texts, prefixes, parses, to, contexts)
        original_texts, texts = texts, self.recased(texts)
        if decoding.is_sampling and not decoding.mbr:
            requests = _number_samples(requests, nbest)
        # For blank texts too: a term that cannot be encoded without unknown tokens is always refused.
        requests = [
            self._with_phrases(request, text, text_terms, decoding.protect)
            for request, text, text_terms in zip(requests, texts, terms, strict=True)
        ]
        rows = [row for row, text in enumerate(texts) if text.strip()]
        results: dict[int, list[Generated]] = {}
        if "placeholders" in decoding.protect and not self.needs_trees:
            languages = language_of_each(to, len(texts))
            row_texts = [texts[row] for row in rows]
            substituted = self._with_substitutes(
                row_texts,
                [list(requests[row].prefix) for row in rows],
                [terms[row] for row in rows],
                [languages[row] for row in rows],
                decoding,
                nbest,
                plain,
                [contexts[row] for row in rows],
            )
            results = {rows[number]: generated for number, generated in substituted.items()}
        remaining = [row for row in rows if row not in results]
        row_requests = [requests[row] for row in remaining]
        nbest_hypotheses = self.engine.generate(
            row_requests,
            decoding,
            nbest=nbest,
            length=length,
            observer=observer if len(row_requests) == 1 and not decoding.mbr else None,
            plain=plain,
        )
        for row, request, hypotheses in zip(remaining, row_requests, nbest_hypotheses, strict=True):
            results[row] = self._ranked(request, hypotheses, decoding, nbest)
        for row, generated in results.items():
            prefix = prefixes[row] if prefixes else ""
            begin = prefix if isinstance(prefix, str) else ""
            source = original_texts[row]
            results[row] = [
                candidate.with_text(
                    self.match_case(source, candidate.translation.text, terms[row], begin)
                )
                for candidate in generated
            ]
        return [results.get(row, []) for row in range(len(texts))]

    def _ranked(
        self,
        request: Request,
        hypotheses: Sequence[Hypothesis],
        decoding: DecodingConfig,
        nbest: int,
    ) -> list[Generated]:
        """The translations of a request; minimum Bayes risk ranks its samples by their mean chrF to the others."""
        sampled = decoding.is_sampling
        candidates = [
            Generated(
                self._translation(hypothesis, request),
                request._replace(sample=request.sample + n * sampled),
                hypothesis,
            )
            for n, hypothesis in enumerate(hypotheses)
        ]
        if not decoding.mbr:
            return candidates
        from regard.metrics.mbr import mbr_rank

        ranked = mbr_rank([candidate.translation.text for candidate in candidates])[:nbest]
        return [
            candidates[n]._replace(translation=candidates[n].translation._replace(score=mean))
            for n, mean in ranked
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

    # Recasing

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
        normalized_prefix = self.tokenizer.target.normalize(prefix)
        unchanged = normalized_prefix if translation.startswith(normalized_prefix) else ""
        return unchanged + upper_case(translation[len(unchanged) :], keep=terms)

    def encode_translation(self, translation: str, source: str) -> list[int]:
        """Target ids of a translation, or of its beginning: in sentence case if ``match_case`` would upper-case it."""
        if self.recases and is_all_caps(source) and is_upper_case(translation):
            translation = sentence_case(translation)
        (ids,) = self.tokenizer.target.encode([translation])
        return ids

    # Options

    def decoding_for(self, options: DecodingOptions, nbest: int = 1) -> DecodingConfig:
        """The recipe's decoding section with the options of a call; options without effect are refused."""
        overrides = {name: value for name, value in options.items() if value is not None}
        if not overrides and self.recipe.decoding.beam >= nbest and not self.non_autoregressive:
            return self.recipe.decoding
        from regard.recipe import DecodingConfig, override_decoding

        kind = "an autoregressive model"
        read = DecodingConfig.options_read_by("search", "sampling")
        if self.non_autoregressive:
            kind = "a non-autoregressive model"
            read = DecodingConfig.options_read_by("mask_predict")
        ignored = DecodingConfig.model_fields.keys() - read
        without_effect = {name: value for name, value in overrides.items() if name in ignored}
        _refuse(f"no effect on {kind}", **without_effect)
        decoding = override_decoding(self.recipe.decoding, overrides)
        if not self.non_autoregressive:
            _refuse_unused(overrides, decoding)
        width = "length_beam" if self.non_autoregressive else "beam"
        too_narrow = nbest > getattr(decoding, width) and not decoding.is_sampling
        if too_narrow and width not in overrides:
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
            _refuse("sampling cannot guarantee constraints", constraints=constraints)
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
        if network.length.predicts_eos and nbest > 1:
            raise RegardError(
                f"nbest {nbest}: this model ends at the first EOS (model.non_autoregressive.length: eos), "
                "so it has one translation of each text"
            )
        limit = decoding.length_beam if length is None else 1
        if not 1 <= nbest <= limit:
            raise RegardError(f"nbest {nbest}: must be between 1 and length_beam, {limit}")

    def _check_options(
        self,
        options: DecodingOptions,
        decoding: DecodingConfig,
        constraints: object,
        length: int | None,
    ) -> None:
        """Refuse options that have no effect because of the model or of the arguments of a call."""
        length_beam = options.get("length_beam")
        if length_beam == 1:  # what happens in these cases anyway
            length_beam = None
        if self.non_autoregressive:
            rule = self.recipe.model.non_autoregressive.length
            choice = find_registry("model.non_autoregressive.length").choices[rule]
            if "decoding.length_beam" in choice.ignores:
                reason = f"no effect with model.non_autoregressive.length: {rule}"
                _refuse(reason, length_beam=length_beam)
        if length is not None:
            limits = {name: options.get(name) for name in ("extra_length", "max_length")}
            _refuse("no effect with a given length", length_beam=length_beam, **limits)
        if constraints is None and not decoding.protect:
            needed = "constraints (a glossary) or protect"
            _refuse(f"no effect without {needed}", constrained_beam=options.get("constrained_beam"))

    # Requests

    def encode(
        self, texts: Sequence[str], to: Languages = None, context: Context = None
    ) -> list[list[int]]:
        """Source ids of texts, after the sentences before them and the tag of the target language, if there are any."""
        clean = self.recipe.data.clean
        limit = clean.max_tokens if clean.truncate else None
        tags = self.languages.tags(len(texts), to)
        texts = self.recased(texts)
        encoded = super().encode(texts)
        if context is not None and any(context):
            from regard.data.cleaning import encode_with_context

            recased = list(map(self.recased, context))
            encoded = encode_with_context(self.tokenizer.source, texts, recased)
            self.check_lengths(encoded)
        tagged = map(self.tokenizer.source.prepend_tags, encoded, tags)
        return [ids[:limit] for ids in tagged]

    def _contexts(self, context: Context, count: int) -> Sequence[Sequence[str]]:
        """The last sentences before each text, as many as the model was trained with."""
        if context is None:
            return [()] * count
        if len(context) != count:
            raise RegardError(f"{len(context)} contexts for {count} texts: expected one per text")
        sentences = self.recipe.data.context
        if not sentences and any(context):
            raise RegardError("context: this model was trained without context (data.context: 0)")
        return [list(sentences_before)[-sentences:] for sentences_before in context]

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
        prefix_per_text: Sequence[str | Sequence[int]] = prefixes or [()] * len(texts)
        prefix_ids = [
            self._encode_prefix(prefix, text) if isinstance(prefix, str) else list(prefix)
            for prefix, text in zip(prefix_per_text, texts, strict=True)
        ]
        position = self.recipe.model.position
        trees = trees_of(texts, parses, sources, self.tokenizer.source, position)
        return [
            Request(source, prefix, tree=tree)
            for source, prefix, tree in zip(sources, prefix_ids, trees, strict=True)
        ]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return super().count_tokens(self.recased(texts))

    def count_unknown(self, text: str) -> tuple[int, int]:
        """How many source tokens are unknown, and how many there are besides spaces.

        The bytes of an unknown character count as one token: all but its first are continuation bytes, 0x80 to 0xBF.
        """
        vocabulary = self.tokenizer.source
        (ids,) = vocabulary.encode(self.recased([text]))
        byte_ids = vocabulary.byte_ids
        continuation = {*byte_ids[0x80:0xC0]} - {UNK}
        unknown = {UNK, *byte_ids} - continuation
        spaces = vocabulary.pieces(ids).count(SPACE_SYMBOL)
        ignored = spaces + sum(i in continuation for i in ids)
        return sum(i in unknown for i in ids), len(ids) - ignored

    def _encode_prefix(self, prefix: str, text: str) -> list[int]:
        ids = self.encode_translation(prefix, text)
        if UNK in ids:
            raise RegardError(
                f"prefix {prefix!r}: this model's tokenizer cannot encode it without unknown tokens"
            )
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

        prefix_texts = self.tokenizer.target.decode(prefixes)
        attempts = [
            (row, substitution)
            for row, text in enumerate(texts)
            for substitution in substitutions(
                text,
                self._substitutes(languages[row]),
                placeholders,
                [*terms[row], prefix_texts[row]],
            )
        ]
        rows = [row for row, _ in attempts]
        requests = self.requests(
            [substitution.text for _, substitution in attempts],
            [prefixes[row] for row in rows],
            to=[languages[row] for row in rows],
            context=[contexts[row] for row in rows] if contexts else None,
        )
        constrained = [
            self._with_words(
                self._with_phrases(request, substitution.text, terms[row], decoding.protect),
                substitution,
            )
            for request, (row, substitution) in zip(requests, attempts, strict=True)
        ]
        nbest_hypotheses = self.engine.generate(constrained, decoding, nbest=nbest, plain=plain)
        best: dict[int, list[Generated]] = {}
        for (row, substitution), request, hypotheses in zip(
            attempts, constrained, nbest_hypotheses, strict=True
        ):
            candidates = [
                candidate._replace(translation=_restored(candidate.translation, substitution))
                for candidate in self._ranked(request, hypotheses, decoding, nbest)
            ]
            if any(
                protected.mismatches(texts[row], candidate.translation.text)
                for candidate in candidates
            ):
                continue
            if row not in best or candidates[0].translation.score > best[row][0].translation.score:
                best[row] = candidates
        return best

    def _with_words(self, request: Request, substitution: Substitution) -> Request:
        """The request with the substitute words as required phrases."""
        phrases = [
            phrase_of(word, self.tokenizer.target, times)
            for word, times in substitution.times.items()
        ]
        found = [phrase for phrase in phrases if phrase]
        return request._replace(phrases=[*request.phrases, *found])

    def _substitutes(self, to: str | None) -> list[str]:
        """The words that can replace placeholders, computed once."""
        (tags,) = self.encode([""], to)
        words_by_tags = self.placeholder_substitutes = self.placeholder_substitutes or {}
        if tuple(tags) not in words_by_tags:
            from regard.inference.placeholders import copied_words

            words = copied_words(self.network, self.tokenizer, tags, self.device)
            words_by_tags[tuple(tags)] = words
        return words_by_tags[tuple(tags)]

    # Inspection

    def trace(
        self,
        text: str,
        *,
        prefix: str = "",
        forced: Sequence[int] = (),
        mute: Sequence[Head] = (),
        parse: ParsedSentence | None = None,
        length: int | None = None,
        checkpoints: bool = False,
        lenses: bool = False,
        against: str | None = None,
        **options: Unpack[DecodingOptions],
    ) -> Trace:
        """A trace of the translation of one text; arguments: see ``inspection.training_history.trace_with_history``."""
        from regard.inspection.training_history import trace_with_history

        if len(self.runs) > 1:
            raise RegardError("trace: not supported for an ensemble; load one of its runs")
        return trace_with_history(
            self,
            text,
            prefix=prefix,
            forced=forced,
            mute=mute,
            parse=parse,
            length=length,
            checkpoints=checkpoints,
            lenses=lenses,
            against=against,
            **options,
        )


def _refuse(reason: str, **arguments: object) -> None:
    """Arguments without effect are errors."""
    values = {name: value for name, value in arguments.items() if value is not None}
    if values:
        from regard.recipe import abbreviate

        descriptions = [f"{name} {abbreviate(value)}" for name, value in values.items()]
        raise RegardError(f"{', '.join(descriptions)}: {reason}")


def _refuse_unused(overrides: dict[str, Any], decoding: DecodingConfig) -> None:
    """Refuse options of a call that search or sampling does not read. decoding: with these options."""
    from regard.recipe import DecodingConfig

    if decoding.is_sampling and overrides.get("beam", 1) != 1:
        cause = "mbr" if decoding.mbr else "temperature"
        raise RegardError(
            f"beam {overrides['beam']}, {cause} {getattr(decoding, cause)}: {cause} turns on sampling, "
            "which uses no beam; set only one of the two"
        )
    defaults = DecodingConfig()
    for name, requirement in decoding.unused_options.items():
        default = getattr(defaults, name)
        if name != "beam" and overrides.get(name, default) != default:
            _refuse(f"no effect; it only applies to {requirement}", **{name: overrides[name]})


def _number_samples(requests: Sequence[Request], samples: int) -> list[Request]:
    """Number the requests of the same source, so that their samples differ."""
    seen: Counter[tuple[int, ...]] = Counter()
    numbered = []
    for request in requests:
        source = tuple(request.source)
        numbered.append(request._replace(sample=seen[source] * samples))
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

    mask_predict = isinstance(network, NonAutoregressiveTransformer)
    return (MaskPredictLoss if mask_predict else Seq2SeqLoss)(network, training, special_tokens)


TASKS.register("translation", summary="text to text", formats=FORMATS)(
    Task(
        Translator,
        PairEncoder,
        translation_loss,
        architectures=("transformer", "decoder_only", "lstm", "convolution", "non_autoregressive"),
        supports=PAIR_SUPPORTS,
    )
)
