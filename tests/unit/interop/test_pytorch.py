"""State dicts of torch.nn.Transformer, bundles, and what all conversions have in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from typer.testing import CliRunner

from regard import recipe
from regard.cli.main import app
from regard.errors import RegardError
from regard.interop import base, pytorch
from regard.interop.convert import export_model, import_model
from regard.interop.pytorch import TutorialNetwork
from regard.nn.loss import cross_entropy
from regard.storage.run_dir import RunDir
from regard.tasks import Translator

MakeRun = Callable[..., Path]

AS_TORCH: dict[str, Any] = {"final_norm": True, "tie_embeddings": False, "tie_output": False}


@pytest.mark.parametrize(
    "model", [AS_TORCH, {"norm_order": "pre", "activation": "gelu"}], ids=["post", "pre"]
)
def test_export_and_import_again(make_run: MakeRun, tmp_path: Path, model: dict[str, Any]) -> None:
    run = make_run(model=model)
    assert "verified layer by layer" in export_model(run, "torch", tmp_path / "out")[0]
    state = load_file(tmp_path / "out" / "model.safetensors")
    ours = Translator.load(run, "cpu")
    section, size = ours.recipe.model, ours.tokenizer.source.size
    assert state.keys() == TutorialNetwork(section, size, size).state_dict().keys()
    assert "transformer.decoder.layers.1.multihead_attn.in_proj_weight" in state
    import_model(tmp_path / "out", "torch", tmp_path / "back", run)
    texts = ["The dog is tired.", "The cat was hungry."]
    assert Translator.load(tmp_path / "back", "cpu").translate(texts) == ours.translate(texts)


def test_the_tutorials_own_weights_are_imported(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run(model=AS_TORCH)
    like = RunDir(run).recipe()
    size = RunDir(run).tokenizer(like).source.size
    torch.manual_seed(4)
    tutorial = TutorialNetwork(like.model, size, size).eval()
    positions = {"positional_encoding.pos_embedding": torch.zeros(9, 1, 16)}
    save_file({**tutorial.state_dict(), **positions}, tmp_path / "mine.safetensors")
    import_model(tmp_path / "mine.safetensors", "torch", tmp_path / "run", run)
    network = Translator.load(tmp_path / "run", "cpu").network
    source, target = torch.tensor([[7, 8, 9, 2]]), torch.tensor([[1, 10, 11]])
    np.testing.assert_allclose(
        network(source, target).detach(), tutorial(source, target).detach(), atol=1e-5
    )
    with pytest.raises(RegardError, match="needs --like RUN"):
        import_model(tmp_path / "mine.safetensors", "torch", tmp_path / "other")


def test_a_mismatch_names_the_layer(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytorch, "IN_PROJECTIONS", ("k_proj", "q_proj", "v_proj"))
    with pytest.raises(RegardError, match=r"encoder layer 1 differs by .*nothing was written"):
        export_model(make_run(model=AS_TORCH), "torch", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "model", "named"),
    [
        ("torch", {}, r"model\.final_norm: false \(only true\)"),
        ("torch", {**AS_TORCH, "activation": "swish"}, r"model\.activation: swish"),
        ("huggingface", {"norm_order": "pre"}, r"model\.norm_order: pre \(only post\)"),
        ("huggingface", {"position": "rotary", "norm": "rms"}, "norm: rms .*position: rotary"),
        ("huggingface", {"attention": {"encoder": "window"}}, r"attention\.encoder: window"),
    ],
)
def test_unsupported_choices_are_named(
    make_run: MakeRun, tmp_path: Path, kind: str, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(RegardError, match=f"does not support .*{named}"):
        export_model(make_run(model=model), kind, tmp_path / "out")


def test_a_bundle_holds_only_what_is_needed(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "log.jsonl").write_text("{}\n")
    (run / "checkpoints").mkdir()
    export_model(run, "bundle", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"recipe.yaml", "tokenizer.model", "model.safetensors", "card.json"}
    both = [Translator.load(folder, "cpu") for folder in (run, tmp_path / "out")]
    assert both[0].translate(["The dog."]) == both[1].translate(["The dog."])
    with pytest.raises(RegardError, match="already exists"):
        export_model(run, "bundle", tmp_path / "out")


def test_the_import_and_export_commands(make_run: MakeRun, tmp_path: Path) -> None:
    run, out = make_run(model=AS_TORCH), tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(run), "--to", "torch", "--out", str(out)])
    assert "verified layer by layer" in done.output
    mine = [str(out), "--from", "torch", "--like", str(run), "--out", str(tmp_path / "run")]
    assert CliRunner().invoke(app, ["import", *mine]).exit_code == 0
    command = [
        "translate",
        str(run),
        "The dog.",
        "--length-normalization",
        "ctranslate2",
        "--precision",
        "fp32",
    ]
    result = CliRunner().invoke(app, command)
    expected = Translator.load(run, "cpu").translate(
        ["The dog."], length_normalization="ctranslate2"
    )
    assert result.stdout == f"{expected[0]}\n"
    wrong = CliRunner().invoke(
        app, ["translate", str(run), "The dog.", "--length-normalization", "gnmtt"]
    )
    assert "'gnmtt' must be 'gnmt'" in str(wrong.exception)
    info = CliRunner().invoke(app, ["info", str(tmp_path / "run")]).output
    assert "imported from" in info


def test_a_missing_package_and_an_unknown_format_are_errors(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    run = make_run()
    monkeypatch.setattr(base, "import_module", absent)
    with pytest.raises(
        RegardError, match=r"ctranslate2 is not installed: pip install 'regard\[interop\]'"
    ):
        export_model(run, "ctranslate2", tmp_path / "out")
    with pytest.raises(RegardError, match="no such format; did you mean onnx"):
        export_model(run, "onnxx", tmp_path / "out")


def test_the_output_bias_is_learned() -> None:
    """Against torch's own loss and gradients."""
    torch.manual_seed(1)
    given = [torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 4), (7, 4), (7,))]
    labels = torch.tensor([[5, 6, 0], [1, 0, 0]])
    sums = []
    for ours in (True, False):
        states, weight, bias = (x.clone().requires_grad_() for x in given)
        if ours:
            loss = cross_entropy(states, weight, labels, 0.1, "all", bias)
        else:
            logits = (states @ weight.T + bias).flatten(0, 1)
            options: dict[str, Any] = {"ignore_index": 0, "label_smoothing": 0.1}
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum", **options)
        (2 * loss).backward()  # type: ignore[no-untyped-call]
        sums.append([loss.detach(), states.grad, weight.grad, bias.grad])
    for ours_, theirs in zip(*sums, strict=True):
        np.testing.assert_allclose(ours_, theirs, atol=1e-12)


def test_an_imported_tokenizer_cannot_be_trained() -> None:
    from regard.data.tokenizer import Tokenizer

    with pytest.raises(RegardError, match="is only for imported models and cannot be trained"):
        Tokenizer.train(recipe.TokenizerConfig(kind="marian"), list)
