"""The class for Ray Data, called as Ray calls it, without Ray."""

import sys
from pathlib import Path

import numpy as np
import pytest

from regard.errors import RegardError
from regard.ray import Translate
from regard.tasks import Translator


def test_a_batch_gets_the_columns_of_its_translations(finished_run: Path) -> None:
    translate = Translate(finished_run, "text", precision="fp32", threads=1, beam=2)
    texts = np.array(["ein Hund", None, "ein\nHund", ""], object)
    batch = {"id": np.array([7, 8, 9, 10]), "text": texts}
    found = translate(batch)
    assert [*found] == ["id", "text", "translation", "confidence"]
    assert found["id"] is batch["id"]
    assert found["text"] is texts
    model = Translator.load(finished_run, precision="fp32")
    expected = [best for best, *_ in model.search(["ein Hund", "", "ein Hund", ""], beam=2)]
    assert found["translation"].tolist() == [one.text for one in expected]
    assert found["confidence"].tolist() == [one.confidence for one in expected]
    assert found["confidence"].dtype == np.float64
    empty = translate({"text": np.array([], object)})
    assert [len(column) for column in empty.values()] == [0, 0, 0]
    with pytest.raises(RegardError, match=r"no column text; choose one with column=: id$"):
        translate({"id": batch["id"]})


def test_without_ray_one_line_says_what_to_install(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RegardError, match=r"^regard\.ray needs ray: pip install 'regard\[ray\]'$"):
        Translate(finished_run)
