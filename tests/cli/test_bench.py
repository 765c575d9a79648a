"""``regard bench translate``: its JSON, its table, and its errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli.commands import inside, succeeds

TINY = ("--preset", "tiny", "--batch", 3, "--beam", 2, "--repeats", 1, "--threads", 2)


def test_every_engine_has_a_row_and_gives_the_same_translations(tmp_path: Path) -> None:
    peers = ("--peer", "ctranslate2", "--peer", "marian")
    done = inside(
        "bench", "translate", *TINY, "--precision", "fp32", *peers, "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["precision"] for row in rows} == {"fp32"}
    default, other = "inter_threads 1, intra_threads 2", "inter_threads 2, intra_threads 1"
    names = ["regard", "ctranslate2", f"ctranslate2 ({other})", "marian"]
    assert [row["name"] for row in rows] == names
    assert [row["settings"] for row in rows[1:3]] == [default, other]
    for row in rows:
        assert row["sentences_per_second"] > 0
        assert row["sentences_per_cpu_second"] > 0
        assert row["agreement"] == 1.0
        assert (row["beam"], row["batch"], row["threads"]) == (2, 3, 2)
    assert not list(tmp_path.iterdir()), "no files are left"


def test_peers_use_the_precision_that_auto_resolves_to(tmp_path: Path) -> None:
    done = inside("bench", "translate", *TINY, "--peer", "ctranslate2", "--json", cwd=tmp_path)
    ours, *theirs = (row["precision"] for row in json.loads(done.stdout)["rows"])
    assert {*theirs} == {"int8" if ours == "int8" else "fp32"}


def test_each_precision_has_a_row_in_the_table(tmp_path: Path) -> None:
    precisions = ("--precision", "fp32", "--precision", "int8")
    done = inside("bench", "translate", *TINY, *precisions, cwd=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:2] for line in lines[2:]] == [["regard", "fp32"], ["regard", "int8"]]
    assert lines[2][4:6] == ["1.00x", "100%"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, processes are not forked")
def test_a_random_model_is_translated_in_worker_processes_like_a_trained_one(
    tmp_path: Path,
) -> None:
    # In a process of its own: this one has threads, beside which workers are not forked.
    done = succeeds("bench", "translate", *TINY, "--precision", "fp32", cwd=tmp_path)
    assert "fp32 on cpu, 2 worker processes" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--peer", "ctranslat"),
            "regard: --peer ctranslat: no such peer; did you mean ctranslate2?",
        ),
        (("--precision", "int4"), "regard: --precision int4: unknown name; did you mean int8?"),
        (("--preset", "colossal"), "regard: --preset colossal: unknown name; allowed: tiny, small"),
    ],
)
def test_unknown_names_are_refused_in_one_line(
    tmp_path: Path, arguments: tuple[str, str], message: str
) -> None:
    done = inside("bench", "translate", *TINY, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(message)
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    done = inside("bench", "translate", *TINY, "--peer", "ctranslate2", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "regard: ctranslate2 is not installed: pip install 'regard[interop]'\n"
