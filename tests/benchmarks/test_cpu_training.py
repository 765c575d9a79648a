"""benchmarks/cpu_training.py: rows are kept as they are measured, and compared within one preset and precision."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.scripts import load_script

PEERS = [
    {"name": "regard", "precision": "fp32", "tokens_per_second": 90.0},
    {"name": "torch.nn.Transformer", "precision": "fp32", "tokens_per_second": 10.0},
    {"name": "MarianMT", "precision": "fp32", "tokens_per_second": 20.0},
    {"name": "MarianMT", "precision": "bf16", "tokens_per_second": 40.0},
]


def test_rows_are_compared_with_the_fastest_peer_of_their_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("benchmarks/cpu_training.py")
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> CompletedProcess[str]:
        commands.append(command)
        if command[-2] == "--json":
            processes = int(command[command.index("--nproc-per-node") + 1])
            fast = 2 if "training.precision=bf16" in command else 1
            step = [{"target_tokens_per_second": 30 * processes * fast}]
            Path(command[-1]).write_text(json.dumps({"step": step}))
        return CompletedProcess(command, 0, json.dumps({"rows": PEERS}))

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "fastest_cpu_precision", lambda: "bf16")
    out = tmp_path / "out.json"
    given = ["--presets", "tiny", "--processes", "1", "2", "--pairs", "30"]
    script.main([*given, "--sentences", "8", "--out", str(out)])
    assert len(commands) == 5  # the other libraries, and two numbers of processes in two precisions
    assert commands[0][commands[0].index("--sentences") + 1] == "8"
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows[1::2]] == [
        "MarianMT",
        "Regard, 1 process",
        "Regard, 2 processes",
    ]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| tiny")
    ]
    assert [line[-1] for line in lines] == ["0.50", "1.00", "1.00", "1.50", "1.50", "3.00", "3.00"]
