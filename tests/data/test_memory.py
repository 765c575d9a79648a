"""Peak memory: training is bounded by the batch size, preparation is checked for one large corpus."""

import random
import subprocess
import sys
from pathlib import Path

from tests.cli.commands import REGARD, environment, write_recipe

GIGABYTE = 2**20  # in kilobytes, the unit of ru_maxrss

# ru_maxrss includes the memory of the process before exec, so a small process starts the command.
LAUNCH = """
import resource, subprocess, sys
status = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
"""


def peak(*arguments: object, cwd: Path) -> int:
    """The peak memory of a command, in kilobytes."""
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *REGARD, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_training_a_tiny_model_with_a_bundled_recipe_stays_below_2_gigabytes(
    data_folder: Path, tmp_path: Path
) -> None:
    changes = {
        "data.root": data_folder,
        "data.test": "null",
        "model.preset": "tiny",
        "training.steps": 2,
        "training.warmup": 2,
        "training.validate_sentences": 16,
        "training.device": "cpu",
    }
    sets = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    kilobytes = peak("train", "multi30k-transformer", "--out", "run", *sets, cwd=tmp_path)
    assert GIGABYTE / 10 < kilobytes < 2 * GIGABYTE


def test_preparing_a_large_corpus_stays_below_a_gigabyte_and_a_half(tmp_path: Path) -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(2, 9))) for _ in range(20_000)]
    with (tmp_path / "train.src").open("w") as source, (tmp_path / "train.tgt").open("w") as target:
        for _ in range(120_000):
            some = draw.choices(words, k=draw.randint(4, 24))
            source.write(" ".join(some) + "\n")
            target.write(" ".join(reversed(some)) + "\n")
    for name in ("valid.src", "valid.tgt"):
        (tmp_path / name).write_text("abc def\n")
    write_recipe(
        tmp_path,
        tokenizer={"kind": "unigram", "vocab_size": 2000},
        training={
            "steps": 1,
            "warmup": 1,
            "validate_sentences": 0,
            "best_checkpoint_metric": "loss",
        },
    )
    kilobytes = peak("train", "recipe.yaml", "--out", "run", cwd=tmp_path)
    assert GIGABYTE / 10 < kilobytes < 1.5 * GIGABYTE
