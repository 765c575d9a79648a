"""Import and export of MarianMT, with random models of ``transformers`` and SentencePiece models trained here."""

import io
import json
import pickle
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch

from regard.data.pairs import Pair
from regard.data.special_tokens import BOS, EOS, SPECIAL_TOKENS
from regard.demo.corpus import generate
from regard.errors import RegardError
from regard.inspection.trace import trace
from regard.interop import huggingface
from regard.interop.convert import export_model
from regard.interop.huggingface import export_huggingface, import_huggingface
from regard.recipe import DataFiles, DecodingOptions
from regard.storage.run_dir import RunDir
from regard.tasks import Translator
from regard.training.fine_tuning import FineTuning, fine_tuning_recipe
from regard.training.run import train

transformers = pytest.importorskip("transformers", reason="needs pip install 'regard[interop]'")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

MakeRun = Callable[..., Path]


def sentencepiece_model(texts: list[str], path: Path) -> list[str]:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=220,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


@pytest.fixture(scope="module")
def marian_folder(tmp_path_factory: pytest.TempPathFactory, pairs: list[Pair]) -> Path:
    """A folder like those of OPUS-MT: EOS is 0, PAD last, the pieces in another order than ours."""
    folder = tmp_path_factory.mktemp("marian")
    pieces = set(sentencepiece_model([pair.source for pair in pairs], folder / "source.spm"))
    pieces |= set(sentencepiece_model([pair.target for pair in pairs], folder / "target.spm"))
    shuffled = sorted(pieces - {"<s>", "</s>", "<unk>"})
    random.Random(1).shuffle(shuffled)
    names = ["</s>", "<unk>", ">>deu<<", *shuffled, "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    settings = {"source_lang": "eng", "target_lang": "deu", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    pad = len(names) - 1
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    special = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    config = transformers.MarianConfig(
        vocab_size=pad + 1,
        activation_function="swish",
        scale_embedding=True,
        max_position_embeddings=128,
        **sizes,
        **special,
    )
    torch.manual_seed(3)
    model = transformers.MarianMTModel(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layer_norm" not in name and "positions" not in name:
                torch.nn.init.normal_(weight, std=0.4 if "shared" in name else 0.8)
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, 0] = 6.5  # so that EOS comes neither never nor at once
    model.generation_config = transformers.GenerationConfig(
        num_beams=4, max_length=24, bad_words_ids=[[pad]], forced_eos_token_id=0, **special
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def imported(marian_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("imported") / "run"
    lines = import_huggingface(marian_folder, run)
    assert "verified layer by layer" in lines[0]
    return run


def open_marian(folder: Path) -> Any:
    return transformers.MarianMTModel.from_pretrained(folder, local_files_only=True).eval()


def open_tokenizer(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.MarianTokenizer.from_pretrained(folder, local_files_only=True)


@torch.no_grad()
def test_logits_are_the_same(marian_folder: Path, imported: Path) -> None:
    ours, theirs = Translator.load(imported, "cpu"), open_marian(marian_folder)
    vocab = json.loads((marian_folder / "vocab.json").read_text())
    rows = [vocab[piece] for piece in ours.tokenizer.target.pieces(range(5, len(vocab) + 2))]
    source = torch.randint(5, len(vocab), (3, 9), generator=torch.Generator().manual_seed(1))
    source[:, -1] = EOS
    target = torch.cat([torch.full((3, 1), BOS), source[:, :-1]], dim=1)
    their_id = torch.tensor([0, vocab["<pad>"], 0, 1, 0, *rows])
    found = ours.network.double()(source, target)[..., 5:]
    expected = theirs.double()(
        input_ids=their_id[source], decoder_input_ids=their_id[target]
    ).logits
    np.testing.assert_allclose(found, expected[..., rows], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("length_normalization", "length_penalty"), [("transformers", 1.0), ("gnmt", 0.0)]
)
def test_beam_search_finds_the_same_tokens(
    marian_folder: Path, imported: Path, length_normalization: str, length_penalty: float
) -> None:
    """Their rule with any penalty; without a penalty, the rule of GNMT must find the same hypotheses.

    The rules then differ only in sentences that are cut off: theirs ends them with an EOS at no cost.
    """
    model, theirs = Translator.load(imported, "cpu"), open_marian(marian_folder)
    texts = [pair.source for pair in generate("test", 200)]
    tokenizer = open_tokenizer(marian_folder)
    given = tokenizer(texts, return_tensors="pt", padding=True)
    outputs = theirs.generate(**given, length_penalty=length_penalty).tolist()
    special = {0, tokenizer.pad_token_id}
    expected = [
        tokenizer.convert_ids_to_tokens([i for i in row if i not in special]) for row in outputs
    ]
    options: DecodingOptions = {
        "length_penalty": length_penalty,
        "length_normalization": length_normalization,
    }
    found = [one.tokens for (one,) in model.search(texts, **options)]
    lengths = {len(tokens) for tokens in found}
    assert len(lengths) > 3, "the translations hardly differ"
    limited = [len(tokens) >= 22 for tokens in expected]
    same = [
        a == b or (length_normalization == "gnmt" and cut)
        for a, b, cut in zip(found, expected, limited, strict=True)
    ]
    assert sum(same) == 200
    assert sum(limited) < 150
    text = tokenizer.decode(outputs[0], skip_special_tokens=True)
    assert model.translate(texts[:1], **options) == [text]


def test_texts_are_tokenized_alike(marian_folder: Path, imported: Path) -> None:
    model, theirs = Translator.load(imported, "cpu"), open_tokenizer(marian_folder)
    texts = [
        "The dog didn't cross.",
        ">>deu<< The cat",
        "  ﬁne  spaces ",
        "漢字 unknown",
        ">>xyz<< a",
    ]
    for text in texts:
        (ids,) = model.tokenizer.source.encode([text])
        expected = [
            theirs.unk_token if i == 1 else theirs.convert_ids_to_tokens(i)
            for i in theirs(text).input_ids
        ]
        assert [*model.tokenizer.source.pieces(ids), "</s>"] == expected


def test_an_imported_model_can_be_traced_and_evaluated(imported: Path) -> None:
    model = Translator.load(imported, "cpu")
    traced = trace(model, "The dog is tired.", beam=3)
    assert traced.encoder.shape[:2] == (2, 4)
    np.testing.assert_allclose(traced.cross_attention.sum(-1), 1, atol=1e-5)
    assert traced.translation == model.translate(["The dog is tired."], beam=3)[0]
    run = RunDir(imported)
    assert run.recipe().data.language_pair == ("eng", "deu")
    assert any("imported from" in line for line in run.describe(run.recipe(), run.card()))
    model.evaluate([Pair("The dog is tired.", "Der Hund ist müde.")])


@pytest.mark.parametrize("kind", ["huggingface", "ctranslate2"])
def test_an_imported_model_can_be_exported(imported: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip(kind.replace("huggingface", "transformers"))
    assert "verified" in export_model(imported, kind, tmp_path / "out")[0]


def test_a_changed_piece_list_is_detected(imported: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(imported, tmp_path / "run"))
    pieces = run / "tokenizer.target.pieces.json"
    pieces.write_text(pieces.read_text().replace("▁der", "▁dir"))
    with pytest.raises(RegardError, match=r"tokenizer\.target\.pieces\.json: not the file"):
        Translator.load(run, "cpu")


def test_pickled_weights_are_loaded_without_executing_them(
    marian_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(marian_folder, tmp_path / "old"))
    weights = huggingface._their_weights(folder)
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    import_huggingface(folder, tmp_path / "imported")
    assert Translator.load(tmp_path / "imported", "cpu").tokenizer.target.size == 2 + len(
        json.loads((folder / "vocab.json").read_text())
    )

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.shared.weight": Evil()}))
    with pytest.raises(RegardError, match=r"not loaded|damaged"):
        import_huggingface(folder, tmp_path / "run")
    assert not (tmp_path / "executed").exists()


def test_a_mismatch_names_the_layer_and_writes_nothing(
    marian_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = huggingface._our_weights

    def wrong(*arguments: Any) -> Any:
        weights = original(*arguments)
        weights["decoder.layers.1.cross_attention.key.weight"].mul_(1.001)
        return weights

    monkeypatch.setattr(huggingface, "_our_weights", wrong)
    with pytest.raises(
        RegardError, match=r"decoder layer 2 differs by 0\.0\d+ .*nothing was written"
    ):
        import_huggingface(marian_folder, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shared", [True, False])
def test_an_exported_model_opens_in_transformers(
    make_run: MakeRun, tmp_path: Path, shared: bool
) -> None:
    run = make_run(
        tokenizer={"vocab_size": 420, "shared": shared},
        model={"activation": "swish" if shared else "gelu", "output_bias": shared},
    )
    lines = export_huggingface(run, tmp_path / "out")
    assert "verified layer by layer" in lines[0]
    model, theirs = Translator.load(run, "cpu"), open_marian(tmp_path / "out")
    tokenizer = open_tokenizer(tmp_path / "out")
    texts = [pair.source for pair in generate("test", 20)]
    given = tokenizer(texts, return_tensors="pt", padding=True)
    outputs = theirs.generate(**given, num_beams=1, max_length=20)
    found = [one.tokens for (one,) in model.search(texts, beam=1)]
    for ours, row in zip(found, outputs.tolist(), strict=True):
        expected = [i for i in row[1:] if i not in SPECIAL_TOKENS]
        assert ours[: len(expected)] == model.tokenizer.target.pieces(expected)
    import_huggingface(tmp_path / "out", tmp_path / "back")
    back = Translator.load(tmp_path / "back", "cpu")
    ids = torch.tensor(model.tokenizer.source.encode(texts[:1]))
    assert back.tokenizer.source.encode(texts[:1]) == ids.tolist()
    np.testing.assert_allclose(
        back.network(ids, ids).detach(), model.network(ids, ids).detach(), rtol=0, atol=1e-5
    )


# Fine-tuning


def test_an_imported_model_is_fine_tuned(imported: Path, pairs: list[Pair], tmp_path: Path) -> None:
    (tmp_path / "more.tsv").write_text("".join(f"{s}\t{t}\n" for s, t in pairs[:60]))
    few = ["training.steps=2", "training.warmup=1", "training.validate_sentences=2"]
    files = DataFiles(pairs=("more.tsv",))
    options = FineTuning(imported, freeze=("embeddings",))
    recipe, reasons = fine_tuning_recipe(options, files, str(tmp_path), few, ("en", "de"))
    assert any("low, because the model is imported" in reason for reason in reasons)
    train(recipe, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    own, theirs = run.weights(), RunDir(imported).weights()
    name = "encoder.embedding.weight"
    assert torch.equal(own[name], theirs[name])
    assert any(not torch.equal(own[name], theirs[name]) for name in own)
    scores = run.card()["fine_tuning"]["sets"]
    assert [*scores] == ["new"]  # the data that the model was trained on are not known
    assert Translator.load(run.folder, "cpu").translate(["The dog is tired."])
    with pytest.raises(RegardError, match="imported Marian model cannot be extended"):
        fine_tuning_recipe(FineTuning(imported, extend_vocab=9), files, str(tmp_path))
    french = ("eng", "fra")
    with pytest.raises(RegardError, match="eng to fra; import a model for these languages"):
        fine_tuning_recipe(FineTuning(imported), files, str(tmp_path), (), french)
