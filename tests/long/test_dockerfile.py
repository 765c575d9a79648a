"""The steps of the Dockerfile, carried out without docker: in a folder with what it copies, and a new environment.

What only docker can do (base image, apt-get, useradd) is left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from regard.storage.run_dir import RunDir
from tests.cli.test_server_process import serving
from tests.docs.test_deploy import ROOT, dockerfile

PREFIX = "/opt/regard"
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment that the first stage builds."""
    root = tmp_path_factory.mktemp("image")
    source, installed = root / "src", root / "opt"
    source.mkdir()
    instructions = dockerfile()
    last = [name for name, _ in instructions].index("FROM", 1)
    variables = {"TORCH_OPTIONS": ""}
    done = 0
    for name, rest in instructions[:last]:
        if name == "COPY":
            *paths, target = rest.split()
            for path in paths:
                place = source / (target if len(paths) == 1 and target != "./" else path)
                place.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / path).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.so")
                    shutil.copytree(ROOT / path, place, ignore=ignored)
                else:
                    shutil.copy(ROOT / path, place)
        elif name == "RUN" and "apt-get" not in rest:
            command = rest.replace(PREFIX, str(installed)).replace("python ", f"{sys.executable} ")
            subprocess.run(
                ["sh", "-ec", command], cwd=source, env={**ENVIRONMENT, **variables}, check=True
            )
            done += 1
    assert done == 3, "an environment, torch, and Regard"
    shutil.rmtree(source)
    return installed


def test_the_installed_server_is_healthy(
    image: Path, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the container: ENTRYPOINT with a run, HEALTHCHECK, STOPSIGNAL; no source code, no compiler."""
    final = dict(dockerfile())
    entry = json.loads(final["ENTRYPOINT"])
    check = json.loads(final["HEALTHCHECK"].partition("CMD ")[2])
    monkeypatch.setattr("tests.cli.test_server_process.REGARD", [str(image / "bin" / entry[0])])
    monkeypatch.setattr("tests.cli.test_server_process.environment", lambda: ENVIRONMENT)
    python = image / "bin" / "python"
    where = "import regard; print(regard.__file__)"
    found = subprocess.run(
        [python, "-c", where], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert Path(found.stdout.strip()).is_relative_to(image)
    natives = list(image.rglob("regard/inference/native/*.so"))
    assert natives, "the native decoder is a part of the package"

    def healthy(client: httpx.Client) -> bool:
        command = [
            re.sub(r"127\.0\.0\.1:8000", client.base_url.netloc.decode(), one) for one in check
        ]
        command[0] = str(python)
        return subprocess.run(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL).returncode == 0

    pair = dict(
        zip(("source", "target"), RunDir(finished_run).recipe().data.language_pair, strict=True)
    )
    with serving(finished_run) as (server, client):
        assert healthy(client)
        response = client.post("/translate", json={"q": "a dog", **pair})
        assert response.status_code == 200, response.text
        markdown = {"file": ("a.md", b"# a dog\n\n`code`\n")}
        response = client.post("/translate_file", files=markdown, data=pair)
        translated = client.get(response.json()["translatedFileUrl"]).text
        assert translated.startswith("# ")
        assert translated.endswith("`code`\n")
        assert client.get("/").status_code == 200
        server.terminate()
        assert server.wait(30) == 0
        assert not healthy(client)
