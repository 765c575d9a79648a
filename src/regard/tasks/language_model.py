"""Language modelling: predict the next token of a text, with a decoder-only Transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from regard.data.batching import Batch, as_tensors, pad_targets, rows_of_rank
from regard.data.cleaning import EncodedPair
from regard.data.pairs import Pair
from regard.data.special_tokens import EOS, PAD, UNK
from regard.data.token_dataset import RowIndices, TokenDataset
from regard.data.tokenizer import Tokenizer
from regard.errors import RegardError
from regard.inference.engine import Request
from regard.inference.network_decoder import pad_rows, plan_rows
from regard.inference.precision import autocast
from regard.metrics import MetricResult
from regard.metrics.accuracy_and_perplexity import TOKEN_PERPLEXITY, WORD_PERPLEXITY
from regard.nn.loss import Seq2SeqLoss
from regard.recipe import CleaningConfig, override_decoding
from regard.tasks.base import (
    TASKS,
    TEXT_DEFAULTS,
    TEXT_IGNORES,
    PairEncoder,
    SequenceGenerator,
    Task,
    decoding_keys,
    encode_texts,
)

ANSWER_TOKENS = 20


class StreamEncoder(PairEncoder):
    """All lines as one stream of tokens with EOS after each line, cut into blocks.

    A block has one token more than the decoder reads of it; the next block begins with that token.
    """

    def rows(
        self,
        pairs: Iterable[Pair],
        tokenizer: Tokenizer,
        clean: CleaningConfig | None,
        counts: Counter[str],
    ) -> Iterator[EncodedPair]:
        stream = [EOS]
        for _, ids in encode_texts(pairs, tokenizer.source, counts):
            counts["kept"] += 1
            stream += [*ids, EOS]
            start = 0
            while len(stream) - start > self.max_tokens:
                yield EncodedPair([], stream[start : start + self.max_tokens + 1])
                start += self.max_tokens
            stream = stream[start:]
        if len(stream) > 1:
            yield EncodedPair([], stream)

    def collate(
        self, dataset: TokenDataset, rows: RowIndices, rank: int = 0, ranks: int = 1
    ) -> Batch:
        mine, idle = rows_of_rank(rows, rank, ranks)
        blocks = pad_targets(dataset, mine, end=PAD)[:, :-1]
        labels = blocks[:, 1:].copy()
        read = np.where(labels == PAD, PAD, blocks[:, :-1])
        if idle:
            labels[:] = PAD
        return Batch(*as_tensors(read[:, :0], read, labels))

    def count_labels(self, dataset: TokenDataset, rows: RowIndices) -> int:
        return int(dataset.target_lengths[rows].sum()) - len(rows)


class LanguageModel(SequenceGenerator):
    """Continues a line from its beginning."""

    task = "language_model"
    command = "generate"

    def predict(self, sources: Sequence[str], *, quick: bool = False) -> list[str]:
        return [self.generate(source, ANSWER_TOKENS, temperature=0) for source in sources]

    def generate(
        self,
        text: str,
        tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 1,
    ) -> str:
        """The text with its continuation: at most ``tokens`` tokens, up to the end of the line.

        temperature: 0 is greedy search, otherwise the continuation is sampled.
        """
        for name, value, default in (("top_k", top_k, 0), ("top_p", top_p, 1.0), ("seed", seed, 1)):
            if not temperature and value != default:
                raise RegardError(
                    f"{name} {value}: no effect with temperature 0, which is greedy search"
                )
        max_tokens = self.recipe.data.clean.max_tokens
        if not 1 <= tokens < max_tokens:
            raise RegardError(
                f"tokens {tokens}: must be between 1 and {max_tokens - 1}, because the model was trained on "
                f"blocks of {max_tokens} tokens"
            )
        (ids,) = self.tokenizer.source.encode([text.rstrip()])
        *context, last = [EOS, *ids][tokens - max_tokens :]
        request = Request(context, prompt=True, start=last, limit=tokens)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        options = {"beam": 1, "length_penalty": 0.0, **(sampling if temperature else {})}
        decoding = override_decoding(self.recipe.decoding, options)
        ((best,),) = self.engine.generate([request], decoding)
        (continued,) = self.tokenizer.source.decode([[*ids, *best.tokens]])
        return continued

    @torch.inference_mode()
    def evaluate(self, pairs: Sequence[Pair], *, quick: bool = False) -> list[MetricResult]:
        """Perplexity of the lines as one stream; each token has at least half a block of context.

        Words are separated by spaces, and the end of each line counts as one word.
        """
        lines = self.tokenizer.source.encode([pair.source for pair in pairs])
        if not lines:
            raise RegardError("nothing to score: there are no lines")
        stream = torch.tensor([EOS, *(i for ids in lines for i in (*ids, EOS))])
        losses = self._losses(stream)
        ends = np.cumsum([len(ids) + 1 for ids in lines])
        totals = np.add.reduceat(losses, [0, *ends[:-1]])
        tokens = np.diff(ends, prepend=0)
        words = np.array([len(pair.source.split()) + 1 for pair in pairs])
        unknown = int((stream == UNK).sum())
        details = f"context:{self.recipe.data.clean.max_tokens // 2}+|unknown:{unknown}"
        results = {
            "perplexity": TOKEN_PERPLEXITY.score_counts(
                np.stack([totals, tokens], 1), not quick, details
            ),
            "word_perplexity": WORD_PERPLEXITY.score_counts(
                np.stack([totals, words], 1), not quick, details
            ),
        }
        return [results[metric] for metric in self.recipe.evaluation.metrics]

    def _losses(self, stream: torch.Tensor) -> npt.NDArray[np.float64]:
        """The negative log-probability of each token but the first."""
        max_tokens = self.recipe.data.clean.max_tokens
        stride = max(1, max_tokens // 2)
        count = len(stream) - 1
        losses = np.zeros(count)
        starts = range(0, max(1, count - max_tokens + stride), stride)
        blocks = [(at, min(at + max_tokens, count)) for at in starts]
        lengths = [end - at for at, end in blocks]
        for batch in plan_rows(lengths, self.device, self.tokenizer.target.size):
            read = pad_rows([stream[slice(*blocks[i])].tolist() for i in batch], self.device)
            labels = pad_rows(
                [stream[blocks[i][0] + 1 : blocks[i][1] + 1].tolist() for i in batch], self.device
            )
            with autocast(self.precision, self.device):
                states = self.network.decode(read, self.network.encode(read[:, :0]))
                for row, i in enumerate(batch):  # one at a time, because logits are large
                    at, end = blocks[i]
                    new = at if at == 0 else at + max_tokens - stride
                    logits = self.network.project(states[row, new - at : end - at]).float()
                    targets = labels[row, new - at : end - at, None]
                    nll = -logits.log_softmax(-1).gather(-1, targets)[:, 0]
                    losses[new:end] = nll.double().cpu().numpy()
        return losses


TASKS.register(
    "language_model",
    summary="predict the next token of a text",
    ignores=[*decoding_keys(), *TEXT_IGNORES],
)(
    Task(
        LanguageModel,
        StreamEncoder,
        Seq2SeqLoss,
        own_metrics=("perplexity", "word_perplexity"),
        architectures=("decoder_only",),
        defaults={
            "training": TEXT_DEFAULTS,
            "evaluation": {"metrics": ("perplexity", "word_perplexity")},
            "model": {"architecture": "decoder_only"},
        },
        text_only=True,
        supports=("training.rdrop", "training.simcut"),
    )
)
