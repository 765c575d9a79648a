"""What is told of the data before training, beside what the tokenizer then makes of them."""

import re
from itertools import islice
from pathlib import Path

import pytest

from regard.data.corpus import read_pairs
from regard.data.tokenizer import Tokenizer
from regard.recipe import Data, DataFiles
from regard.training.autoconfig import choose


@pytest.mark.parametrize("lines", [1_000, 6_000])
@pytest.mark.parametrize(
    "name", ["multi30k/train.de", "tatoeba_ende/train.de", "3am_enzh/train.zh"]
)
def test_the_tokens_told_are_those_that_come(
    data_folder: Path, tmp_path: Path, name: str, lines: int
) -> None:
    source = str(Path(name).with_suffix(".en.gz"))
    whole = DataFiles(source=(source,), target=(f"{name}.gz",))
    pairs = list(islice(read_pairs(whole, Data(root=str(data_folder), train=whole)), lines))
    text = "".join(f"{pair.source}\t{pair.target}\n" for pair in pairs)
    (tmp_path / "pairs.tsv").write_text(text, encoding="utf-8")
    recipe, (first, *_) = choose(DataFiles(pairs=("pairs.tsv",)), str(tmp_path))
    tokenizer = Tokenizer.train(recipe.tokenizer, lambda: pairs)
    ids = tokenizer.target.encode([pair.target for pair in pairs])
    told = float(re.findall(r"about (\d+) tokens", first)[0])
    assert told == pytest.approx(sum(len(one) + 1 for one in ids) / lines, rel=0.2)
