"""Each command does what its help says, and every error is reported in one line."""

import gzip
import json
import re
import resource
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

import regard as package
from regard.documents.base import read_archive
from regard.inspection.head_ablation import all_heads
from regard.tasks import Translator
from regard.training.run import Interrupted
from tests.cli.commands import (
    SMALL_MODEL,
    TIMEOUT,
    Done,
    in_workers,
    inside,
    regard,
    started,
    succeeds,
    succeeds_inside,
    together,
    write,
)
from tests.unit.documents import samples

COMMANDS = ["demo", "train", "translate", "evaluate", "look", "serve", "average", "recipes", "info"]
COMMANDS += ["tag", "classify", "fill", "generate"]
Timed = tuple[Path, Done, float]
"""the folder of the runs, the finished process, its seconds"""
NUMBER = r"\d+\.\d\d"


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    text = succeeds(command, "--help", cwd=tmp_path).stdout
    assert re.search(rf"Usage: .* {command} \[OPTIONS\]", text)


def test_help_lists_every_command_and_is_fast(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = succeeds("--help", cwd=tmp_path).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert all(re.search(rf"^\W*{command} +[A-Z]", text, re.MULTILINE) for command in COMMANDS)
    # CPU time, because other processes may be running.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    assert succeeds("--version", cwd=tmp_path).stdout == f"regard {version('regard')}\n"


def test_an_interrupted_demo_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(out: Path) -> None:
        raise Interrupted

    monkeypatch.setattr("regard.demo.demo.demo", interrupted)
    done = inside("demo", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupt_before_training_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.cli.train._plan", interrupted)
    done = inside("train", "x.tsv", cwd=tmp_path)
    message = "Interrupted while reading the data: nothing was written\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", message)


# Errors

ERRORS: dict[str, tuple[str, str]] = {
    "unequal line counts": (
        "train short.src train.tgt",
        r"short.src has 99 lines but .*train.tgt has 3,000:",
    ),
    "not UTF-8": ("train latin.src train.tgt", r"latin.src:3: not UTF-8: byte 0xE4"),
    "empty file": ("train empty.src train.tgt", r"empty.src: the file is empty"),
    "missing file": ("train absent.src train.tgt", r"absent.src: no such file"),
    "unknown key": (
        "train key.yaml",
        r"key.yaml: line 3: .* model.d_modle; did you mean d_model\?",
    ),
    "unknown recipe": ("train multi30", r"multi30: no bundled recipe .*; did you mean multi30k\?"),
    "bad --set": (
        "train recipe.yaml --set training.steps",
        r"--set training.steps: expected section.key=value",
    ),
    "bad value": ("train recipe.yaml --set training.steps=-1", r"training.steps: -1 must be"),
    "bad key of --set": (
        "train train.src train.tgt --set model.hedas=4",
        r"--set: unknown key model.hedas; did you mean heads\?",
    ),
    "--out is a file": (
        "train train.src train.tgt --out test.src",
        r"--out test.src: a file, not a folder",
    ),
    "unknown format": ("export run --to keras", r"--to keras: no such format"),
    "a file as a text": (
        "translate run test.src",
        r"test.src: unknown document format; to translate its lines, use --input test.src",
    ),
    "half an ensemble": (
        "translate run+ abc",
        r"run\+: expected run folders joined by \+, for example runs/a\+runs/b",
    ),
    "no run": ("translate absent abc", r"absent: no such folder"),
    "a text but no run": (
        "translate Hi!",
        r"Hi!: no such folder \(regard runs lists your runs\); if it is a text, RUN is missing:  "
        r"regard translate RUN 'Hi!'",
    ),
    "no run folder": ("translate nothing abc", r"nothing: not a run folder"),
    "too many translations": ("translate run a --beam 2 --nbest 3", r"beam 2, nbest 3"),
    "missing input": ("translate run --input absent", r"absent: no such file"),
    "unequal files": ("evaluate run --source test.src --reference train.tgt", r"has 150 lines but"),
    "changed tokenizer": ("translate changed abc", r"changed/tokenizer.model: not the file that"),
    "columns of text files": (
        "train train.src train.tgt --columns en,de",
        r"--columns en,de: text files have no columns",
    ),
    "keys without a key": ("serve run --api-keys ,", r"--api-keys ',': contains no key"),
    "too many checkpoints": (
        "average run --out new --last 9",
        r"cannot average 9 checkpoints: there are only 3",
    ),
}
"""what is wrong: the command, and the expected message"""


@pytest.fixture(scope="module")
def failures(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("errors") / "all"
    shutil.copytree(workshop, folder)
    lines = (folder / "train.src").read_text().splitlines()
    write(folder / "short.src", lines[:99])
    write(folder / "empty.src", [])
    (folder / "nothing").mkdir()
    (folder / "latin.src").write_bytes(b"a b\nc\nK\xe4se\n" + "\n".join(lines[3:]).encode())
    write(folder / "key.yaml", ["data: {train: {pairs: x.tsv}}", "model:", "  d_modle: 3"])
    shutil.copytree(folder / "run", folder / "changed")
    with (folder / "changed" / "tokenizer.model").open("ab") as file:
        file.write(b"\n")
    return in_workers(
        {
            name: partial(inside, *command.split(), cwd=folder)
            for name, (command, _) in ERRORS.items()
        }
    )


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_reported_in_one_line(name: str, failures: dict[str, Done]) -> None:
    done = failures[name]
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    message = done.stderr.splitlines()[-1]
    assert done.stderr.count("regard: ") == 1
    assert message.startswith("regard: ")
    assert re.search(ERRORS[name][1], message), message


# Translating

SUMMARY = r"Computing in \w+ on \w+, .*[\d.]+ MB of weights\.\n"
"""printed to standard error by every translation"""


def test_texts_are_translated_in_order(workshop: Path) -> None:
    done = succeeds("translate", "run", "a b c", "h g", "", "d d a e", cwd=workshop)
    assert done.stdout == "a b c\nh g\n\nd d a e\n"
    assert re.fullmatch(SUMMARY, done.stderr)


def test_files_are_translated_line_by_line(workshop: Path, tmp_path: Path) -> None:
    lines = ["a b c", "", "g f", "  ", "b e", "a b c"] * 400  # more than one chunk
    with gzip.open(tmp_path / "lines.gz", "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
    output = tmp_path / "out.txt"
    arguments = "--input", tmp_path / "lines.gz", "--output", output, "--beam", 1
    done = succeeds("translate", "run", *arguments, cwd=workshop)
    assert done.stdout == ""
    assert output.read_text().split("\n") == [line.strip() for line in lines] + [""]
    assert {path.name for path in tmp_path.iterdir()} == {"lines.gz", "out.txt"}


def test_standard_input_is_translated_and_json_has_all_details(workshop: Path) -> None:
    done = succeeds(
        "translate", "run", "--json", "--nbest", 2, cwd=workshop, stdin="a b\n\nc d\r\n"
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["source"] for one in found] == ["a b", "", "c d"]
    best, second = found[0]["translations"]
    assert best["text"] == "a b"
    assert best["score"] > second["score"]
    assert best["finished"] is True
    assert best["tokens"] == ["▁a", "▁b"]
    assert sum(best["token_log_probabilities"]) == pytest.approx(best["log_probability"], abs=1e-4)


def test_nbest_translations_are_printed_with_scores(workshop: Path) -> None:
    done = succeeds_inside("translate", "run", "--nbest", 3, "a b c", "d c", cwd=workshop)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for three, best in ((rows[:3], "a b c"), (rows[3:], "d c")):
        scores = [float(score) for _, score, _ in three]
        assert three[0][2] == best
        assert scores == sorted(scores, reverse=True)
        assert len({text for *_, text in three}) == 3
    assert [number for number, *_ in rows] == ["1"] * 3 + ["2"] * 3


def test_samples_depend_on_the_seed_and_begin_with_the_prefix(workshop: Path) -> None:
    def samples(*options: object) -> list[str]:
        done = succeeds_inside("translate", "run", "a b c d", "h g", *options, cwd=workshop)
        return [line.split("\t")[-1] for line in done.stdout.splitlines()]

    hot = ("--temperature", 5, "--set", "extra_length=3")
    first = samples(*hot, "--seed", 3, "--nbest", 4)
    assert len(first) == 8
    assert len({*first}) > 4
    assert samples(*hot, "--seed", 3, "--nbest", 4) == first
    assert samples(*hot, "--seed", 4, "--nbest", 4) != first
    assert samples(*hot, "--top-k", 1) == samples("--beam", 1) == ["a b c d", "h g"]
    assert samples(*hot, "--top-p", 1e-6) == ["a b c d", "h g"]
    for line in samples(*hot, "--prefix", "h f", "--nbest", 2) + samples("--prefix", "h f"):
        assert line.split()[:2] == ["h", "f"]


def test_an_option_gives_the_same_translation_by_set_and_in_python(workshop: Path) -> None:
    texts = (workshop / "test.src").read_text().splitlines()[:20]
    options = ("--temperature", 2, "--seed", 5, "--no-repeat-ngram", 1)
    sets = ("--set", "temperature=2", "--set", "seed=5", "--set", "no_repeat_ngram=1")
    fp32 = ("--precision", "fp32")
    lines = [
        succeeds_inside("translate", "run", *texts, *given, *fp32, cwd=workshop).stdout.splitlines()
        for given in (options, sets)
    ]
    model = Translator.load(workshop / "run")
    found = model.translate(texts, temperature=2.0, seed=5, no_repeat_ngram=1)
    assert lines[0] == lines[1] == found
    assert all(len(line.split()) == len({*line.split()}) for line in found)


def test_evaluate_look_and_distill_take_decoding_options(workshop: Path, tmp_path: Path) -> None:
    hot = ("--temperature", 20, "--set", "extra_length=3")
    files = ("--source", "test.src", "--reference", "test.tgt", "--json")
    scores = [
        json.loads(succeeds_inside("evaluate", "run", *files, *given, cwd=workshop).stdout)
        for given in ((), hot)
    ]
    assert scores[0]["scores"][0]["value"] > 95 > scores[1]["scores"][0]["value"]
    page = tmp_path / "look.html"
    succeeds_inside("look", "run", "a b", "--prefix", "h", "--out", page, cwd=workshop)
    assert page.read_text().startswith("<!")
    pairs = tmp_path / "pairs.tsv"
    options = ("--input", "test.src", "--output", pairs, "--back-translation", *hot)
    succeeds_inside("distill", "run", *options, cwd=workshop)
    sources, targets = zip(
        *(line.split("\t") for line in pairs.read_text().splitlines()), strict=True
    )
    assert list(targets) == (workshop / "test.src").read_text().splitlines()
    assert sum(map(str.__eq__, sources, targets)) < len(targets) / 2


def test_look_measures_the_heads(workshop: Path, tmp_path: Path) -> None:
    done = succeeds_inside("look", "run", "--heads", cwd=workshop)
    title, _, _, columns, *rows = done.stdout.rstrip().splitlines()
    assert re.fullmatch(r"Without each head: 50 sentences, BLEU \d+\.\d with all", title)
    assert columns.split() == ["head", "what", "it", "does", "BLEU", "log-probability"]
    assert len(rows) == len(all_heads(Translator.load(workshop / "run")))
    assert not (workshop / "look.html").exists()
    pairs, page = tmp_path / "pairs.tsv", tmp_path / "heads.html"
    pairs.write_text("a b\ta b\nc d e\tc d e\n", encoding="utf-8")
    done = succeeds_inside("look", "run", "--heads", "--pairs", pairs, "--out", page, cwd=workshop)
    assert done.stdout.startswith("Without each head: 2 sentences")
    table = r'"head_table":\{"bleu":[\d.]+,"sentences":2,"correct":null,"tested":null,"heads":\[\{'
    assert re.search(table, page.read_text())


@pytest.fixture
def translator(workshop: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that translates its standard input."""
    process = started("translate", "run", cwd=workshop)
    yield process
    process.kill()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream is not None
        with suppress(BrokenPipeError):
            stream.close()
    process.wait()


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Write one line, and read the answer within the time limit."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    ready, _, _ = select.select([process.stdout], [], [], TIMEOUT)
    assert ready, "no answer"
    return process.stdout.readline()


def test_each_line_is_answered_at_once(
    translator: subprocess.Popen[str],
) -> None:
    assert ask(translator, "a b c") == "a b c\n"
    assert ask(translator, "") == "\n"
    assert ask(translator, "e f") == "e f\n"
    assert translator.poll() is None
    stdout, stderr = translator.communicate(timeout=TIMEOUT)
    assert stdout == ""
    assert re.fullmatch(SUMMARY, stderr)
    assert translator.returncode == 0


def test_a_closed_output_pipe_is_not_an_error(translator: subprocess.Popen[str]) -> None:
    assert ask(translator, "a b c") == "a b c\n"
    assert translator.stdin is not None
    assert translator.stdout is not None
    assert translator.stderr is not None
    translator.stdout.close()
    translator.stdin.write("d\n")
    translator.stdin.flush()
    assert translator.wait(timeout=TIMEOUT) >= 0  # it exited, and was not killed by a signal
    assert re.fullmatch(SUMMARY, translator.stderr.read())


# Evaluation


def test_scores_have_an_interval_and_a_signature(workshop: Path) -> None:
    files = "--source", "test.src", "--reference", "test.tgt"
    lines = succeeds_inside("evaluate", "run", *files, cwd=workshop).stdout.splitlines()
    interval = rf"{NUMBER} \[-?{NUMBER}, {NUMBER}\]"
    for line, name in zip(lines, ["BLEU", "chrF2", "TER"], strict=True):
        assert re.fullmatch(rf"{name} {interval}  nrefs:1\|bs:1000\|.*\|version:\S+", line), line
    assert float(lines[0].split()[1]) > 95


def test_scores_in_json_and_against_another_run(workshop: Path, tmp_path: Path) -> None:
    other = tmp_path / "first"
    printed = succeeds_inside("average", "run", "--out", other, "--last", 1, cwd=workshop).stdout
    assert printed == f"{other}: the average of 1 checkpoint (step 300)\n"
    files = "--source", "test.src", "--reference", "test.tgt", "--against", other, "--threads", 2
    plain, as_json = (
        succeeds_inside("evaluate", "run", *files, *more, cwd=workshop).stdout
        for more in ([], ["--json"])
    )
    compared = plain.splitlines()[3:]
    pattern = rf"{NUMBER} against {NUMBER} \([+-]{NUMBER}, p = [01]\.\d+: .*\)  \S+"
    for line, name in zip(compared, ["BLEU", "chrF2", "TER"], strict=True):
        assert re.fullmatch(rf"{name} {pattern}", line), line
    answer = json.loads(as_json)
    assert answer["sentences"] == 150
    assert [one["metric"] for one in answer["scores"]] == ["bleu", "chrf", "ter"]
    for one in answer["comparisons"]:
        assert 0 < one["p_value"] <= 1
        assert one["difference"] == pytest.approx(one["system"] - one["baseline"])


# Recipes and runs


def test_bundled_recipes_are_listed_with_a_description(tmp_path: Path) -> None:
    lines = succeeds_inside("recipes", cwd=tmp_path).stdout.splitlines()
    assert {line.split()[0] for line in lines} >= {"demo", "multi30k", "wmt14-base", "wmt14-big"}
    assert all(len(line.split()) > 3 for line in lines)


def test_info_describes_a_run(workshop: Path) -> None:
    plain = succeeds_inside("info", "run", cwd=workshop).stdout
    for word in ("1+1 layers, width 64", "word", "300 steps", "3,000 training pairs", "test  "):
        assert word in plain
    found = json.loads(succeeds_inside("info", "run", "--json", cwd=workshop).stdout)
    assert found["card"] == json.loads((workshop / "run" / "card.json").read_text())
    assert found["recipe"]["model"]["d_model"] == 64


# Training without a recipe


@pytest.fixture(scope="module")
def chosen(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Timed]:
    """Two formats of pairs, trained without a recipe; ``test_formats.py`` has the others."""
    folder = tmp_path_factory.mktemp("chosen")
    lines = (workshop / "train.src").read_text().splitlines()[:200]
    write(folder / "two.src", lines)
    write(folder / "two.tgt", lines)
    write(folder / "tabs.tsv", (f"{line}\t{line}\tCC-BY" for line in lines))
    short = "--set", "training.steps=2", *SMALL_MODEL
    endless = (
        "--minutes",
        "0.2",
        "--set",
        "training.steps=100000",
        "--set",
        "training.patience=null",
    )
    unscored = (
        *("--minutes", "0.2", "--set", "training.validate_sentences=0"),
        *("--set", "training.best_checkpoint_metric=loss", "--out", "runs/unscored"),
    )
    jobs = {
        "tabs": ("tabs.tsv", *endless),
        "unscored": ("tabs.tsv", *unscored, *short),
        "two": ("two.src", "two.tgt", *short),
    }

    def timed(*arguments: str) -> Timed:
        start = time.monotonic()
        done = regard("train", *arguments, cwd=folder)
        return folder / "runs", done, time.monotonic() - start

    return together({name: partial(timed, *arguments) for name, arguments in jobs.items()})


@pytest.mark.parametrize("name", ["two", "tabs"])
def test_without_a_recipe_one_is_chosen_and_explained(name: str, chosen: dict[str, Timed]) -> None:
    runs, done, _ = chosen[name]
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("The data:\n")
    chosen_for = (
        "No recipe was given. This one was chosen for the data and the device:\n  200 pairs"
    )
    assert chosen_for in done.stderr
    assert "dropout 0." in done.stderr
    assert "both sides are sequences of 8 different symbols" in done.stderr
    assert (runs / name / "card.json").is_file()


def test_training_says_how_good_the_model_is_or_why_that_is_not_known(
    chosen: dict[str, Timed],
) -> None:
    _, done, _ = chosen["two"]
    assert re.search(r"On \d+ validation pairs: \w+ .*\n  best ", done.stderr)
    _, done, _ = chosen["unscored"]
    assert "No validation pairs were translated" in done.stderr
    for name in ("two", "unscored"):
        hint = f"To score it on test data:  regard evaluate runs/{name} --source FILE --reference FILE\n"
        assert chosen[name][1].stderr.endswith(hint)


def test_training_is_planned_for_the_given_minutes(chosen: dict[str, Timed]) -> None:
    runs, done, _ = chosen["tabs"]
    assert re.search(
        r"Plan: 1\d\d pairs( \(both directions\))?, [\d,]+ tokens/s: [\d,]+ steps of \w+ in",
        done.stderr,
    )
    assert "the recipe's 100,000 steps would take" in done.stderr
    events = [json.loads(line) for line in (runs / "tabs" / "log.jsonl").read_text().splitlines()]
    # By its own log: the time that Python needs to start does not count.
    assert events[-1]["time"] - events[0]["time"] < 60 * 0.2 * 1.05 + 15
    card = json.loads((runs / "tabs" / "card.json").read_text())
    planned = [event["steps"] for event in events if event["event"] == "plan"][-1]
    assert 0 < card["steps"] <= planned < 100_000


def test_a_planned_training_is_finished_when_it_is_run_again(chosen: dict[str, Timed]) -> None:
    runs, _, _ = chosen["two"]
    short = ("--set", "training.steps=2", *SMALL_MODEL)
    again = inside("train", "two.src", "two.tgt", *short, cwd=runs.parent)
    assert again.returncode == 0, again.stderr
    assert "is already trained: all 2 steps are done" in again.stderr
    other = inside("train", "tabs.tsv", "--out", "runs/two", cwd=runs.parent)
    assert other.returncode == 2
    assert "contains a run with different data; choose another --out" in other.stderr


# From Python


def test_python_does_what_the_commands_do(workshop: Path, tmp_path: Path) -> None:
    model = package.load(workshop / "run", device="cpu")
    assert isinstance(model, Translator)
    assert model.translate(["a b c", "", "h g"]) == ["a b c", "", "h g"]
    changes = [f"data.root={workshop}", "data.test=null", "training.device=cpu"]
    changes += ["training.steps=2", "training.warmup=1"]
    trained = package.train(workshop / "recipe.yaml", out=tmp_path / "run", changes=changes)
    assert isinstance(trained, Translator)
    (translation,) = trained.translate(["a b"])
    again = package.load(tmp_path / "run")
    assert isinstance(again, Translator)
    assert again.translate(["a b"]) == [translation]
    with pytest.raises(package.RegardError, match="a different recipe"):
        package.train(
            workshop / "recipe.yaml",
            out=tmp_path / "run",
            changes=[*changes, "model.d_model=32"],
        )


def test_a_model_that_copies_gives_the_file_back(workshop: Path, tmp_path: Path) -> None:
    """Through the real engine, tokenizer and alignment."""
    text = "# a b\n\nc **d e** f\n\n```\na b\n```\n\n- b c d\n- [e f](g)\n"
    (tmp_path / "a.md").write_text(text)
    srt = "1\n00:00:01,000 --> 00:00:02,000\na b\nc d\n"
    (tmp_path / "a.srt").write_text(srt)
    body = samples.DOCX_BODY[: samples.DOCX_BODY.index("<w:p>")]
    run = '<w:r><w:t xml:space="preserve">{}</w:t></w:r>'
    bold = "<w:r><w:rPr><w:b/></w:rPr><w:t>c d</w:t></w:r>"
    body += f"<w:p>{run.format('a b ')}{bold}{run.format(' e')}</w:p></w:body></w:document>"
    (tmp_path / "a.docx").write_bytes(
        samples.docx(body, {"word/header1.xml": "<w:hdr xmlns:w='w'/>"})
    )
    names = ["a.md", "a.srt", "a.docx"]
    done = inside("translate", workshop / "run", *names, "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/a.md").read_text() == text
    assert (tmp_path / "out/a.srt").read_text() == srt
    before, after = (
        read_archive((tmp_path / name).read_bytes()) for name in ("a.docx", "out/a.docx")
    )
    assert [data for _, data in before] == [data for _, data in after]
