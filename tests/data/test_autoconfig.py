"""The number of tokens that autoconfiguration estimates, compared with what the tokenizer gives."""

import re
from itertools import islice
from pathlib import Path

import pytest

from regard.data.corpus import read_pairs
from regard.data.tokenizer import Tokenizer
from regard.recipe import DataConfig, DataFiles
from regard.training.autoconfig import autoconfigure


@pytest.mark.parametrize("lines", [1_000, 6_000])
@pytest.mark.parametrize(
    "name", ["multi30k/train.de", "tatoeba_ende/train.de", "3am_enzh/train.zh"]
)
def test_the_estimated_number_of_tokens_is_close(
    data_folder: Path, tmp_path: Path, name: str, lines: int
) -> None:
    source = str(Path(name).with_suffix(".en.gz"))
    whole = DataFiles(source=(source,), target=(f"{name}.gz",))
    pairs = list(islice(read_pairs(whole, DataConfig(root=str(data_folder), train=whole)), lines))
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in pairs)
    (tmp_path / "pairs.tsv").write_text(text, encoding="utf-8")
    chosen = autoconfigure(DataFiles(pairs=("pairs.tsv",)), str(tmp_path))
    tokenizer = Tokenizer.train(chosen.recipe.tokenizer, lambda: pairs)
    ids = tokenizer.target.encode([pair.target for pair in pairs])
    estimate = float(re.findall(r"about (\d+) tokens", chosen.reasons[0])[0])
    assert estimate == pytest.approx(sum(len(one) + 1 for one in ids) / lines, rel=0.2)
