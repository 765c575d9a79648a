"""Damaged tokenizers of imported Marian models; tests/unit/interop/test_huggingface.py imports whole ones."""

from pathlib import Path

import pytest

from regard.data.marian_vocabulary import load_marian
from regard.data.tokenizer import Tokenizer, file_stems
from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.recipe import TokenizerConfig


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "no such file; the tokenizer is missing"),
        ("{", "damaged: not a JSON list of pieces"),
        ("[]", "damaged: not a JSON list of pieces"),
        ('{"pieces": 5, "banned": []}', "damaged: not a JSON list of pieces"),
    ],
)
def test_a_list_of_pieces_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    config = TokenizerConfig(vocab_size=420)
    model = Tokenizer.train(config, lambda: list(generate("train", 200))).source.model
    source, target = file_stems(shared=False)
    for stem in (source, target):
        (tmp_path / f"{stem}.model").write_bytes(model)
    path = tmp_path / f"{source}.pieces.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RegardError) as error:
        load_marian(tmp_path, config)
    assert str(error.value) == f"{path}: {problem}"
