"""Target language tags, end to end: one model that copies into language a and reverses into b."""

from pathlib import Path

import pytest

from tests.cli.commands import inside, sequences, succeeds, write, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tags")
    every = sequences(1600, "abcdef", range(2, 6))
    for name, some in (("test", every[:50]), ("valid", every[50:100]), ("train", every[100:])):
        write(folder / f"{name}.src", map(" ".join, some))
        write(folder / f"{name}.a", map(" ".join, some))
        write(folder / f"{name}.b", (" ".join(one[::-1]) for one in some))
    texts = {
        name: {
            "source": [f"{name}.src"] * 2,
            "target": [f"{name}.a", f"{name}.b"],
            "to": ["a", "b"],
        }
        for name in ("train", "valid", "test")
    }
    recipe = write_recipe(
        folder,
        data=texts,
        training={"steps": 500, "validate_every": 500, "word_dropout": 0.01},
    )
    succeeds("train", recipe, "--out", "run", cwd=folder)
    return folder


def test_the_tag_selects_the_target_language(folder: Path) -> None:
    sources = (folder / "test.src").read_text().splitlines()
    for language in ("a", "b"):
        done = inside("translate", "run", "--to", language, "--input", "test.src", cwd=folder)
        expected = (folder / f"test.{language}").read_text().splitlines()
        correct = sum(map(str.__eq__, done.stdout.splitlines(), expected))
        assert correct >= 45, (language, sources[:3], done.stdout.splitlines()[:3])


def test_each_language_is_scored(folder: Path) -> None:
    for arguments in (
        ("--to", "b"),
        ("--to", "b", "--source", "test.src", "--reference", "test.b"),
    ):
        done = inside("evaluate", "run", *arguments, cwd=folder)
        value = float(done.stdout.split()[1])
        assert value > 85, done.stdout
    wrong = inside(
        *("evaluate", "run", "--to", "a", "--source", "test.src", "--reference", "test.b"),
        cwd=folder,
    )
    assert float(wrong.stdout.split()[1]) < 60


@pytest.mark.parametrize("to", [(), ("--to", "c")])
def test_an_unknown_target_language_is_refused(folder: Path, to: tuple[str, ...]) -> None:
    done = inside("translate", "run", *to, "a b", cwd=folder)
    assert done.returncode == 2
    assert "this model translates to a, b" in done.stderr
