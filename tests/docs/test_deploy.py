"""The files in deploy/: their options and routes exist, and they run the server with few rights."""

import configparser
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from regard.cli.main import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def dockerfile() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, in order; lines that are continued are joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines if line)]


def kubernetes() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def unit() -> dict[str, str]:
    """The section Service of the systemd unit; its keys in lower case."""
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.read(DEPLOY / "regard.service")
    return dict(parser["Service"])


def test_the_image_is_small_and_needs_no_rights() -> None:
    instructions = dockerfile()
    images = [rest.split()[0] for name, rest in instructions if name == "FROM"]
    assert all(re.fullmatch(r"python:3\.\d+-slim", image) for image in images)
    last = [name for name, _ in instructions].index("FROM", 1)
    final = dict(instructions[last:])
    assert final["USER"].isdecimal()
    assert final["USER"] != "0"
    assert final["STOPSIGNAL"] == "SIGTERM"
    assert "/ready" in final["HEALTHCHECK"]
    assert final["ENTRYPOINT"] == '["regard", "serve"]'
    assert not {"ADD"} & {name for name, _ in instructions}
    copied = [one for name, rest in instructions if name == "COPY" for one in rest.split()[:-1]]
    for name in copied:
        assert name.startswith(("--", "/")) or (ROOT / name).exists(), name


def copied_paths() -> set[str]:
    """What the Dockerfile copies from the repository."""
    copies = [rest.split() for name, rest in dockerfile() if name == "COPY"]
    return {one for words in copies if words[0][:2] != "--" for one in words[:-1]}


def test_the_image_gets_everything_that_the_build_reads() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], wheel["hooks"]["custom"]["path"]}
    needed |= {project["project"]["readme"], *project["project"]["license-files"]}
    needed |= {"pyproject.toml", project["tool"]["hatch"]["version"]["path"]}
    copied = copied_paths()
    for path in needed:
        parents = {path, *map(str, Path(path).parents)}
        assert parents & copied, f"{path} is not copied into the image"


def test_docker_may_read_only_what_is_copied() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line[0] == "!"} == copied_paths()


def test_the_build_installs_torch_as_pinned() -> None:
    (command,) = [rest for name, rest in dockerfile() if name == "RUN" and "TORCH_OPTIONS" in rest]
    substitution = re.search(r'"\$\((.+)\)"', command)
    assert substitution
    done = subprocess.run(
        ["sh", "-c", substitution[1]], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"torch==[\d.]+\n", done.stdout)


def test_the_extras_of_the_image_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (command,) = [rest for name, rest in dockerfile() if '".[' in rest]
    extras = command.partition('".[')[2].partition("]")[0].split(",")
    assert {"serve", "documents", "language-id"} == {*extras}
    assert {*extras} <= {*project["optional-dependencies"]}


def has_buildx() -> bool:
    docker = shutil.which("docker")
    command = [docker or "", "buildx", "version"]
    return docker is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(
    not has_buildx(), reason="docker buildx, which checks the file, is not installed"
)
def test_docker_accepts_the_file() -> None:
    command = ["docker", "build", "--check", "-f", str(DEPLOY / "Dockerfile"), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_linter_accepts_the_file() -> None:
    subprocess.run(["hadolint", str(DEPLOY / "Dockerfile")], check=True, timeout=60)


def test_every_option_of_the_server_exists() -> None:
    container = kubernetes()[0]["spec"]["template"]["spec"]["containers"][0]
    documented = re.findall(r"regard serve ([^`\n]+)", (ROOT / "docs/deploy.md").read_text())
    commands = [
        container["args"],
        shlex.split(unit()["execstart"])[2:],
        *map(str.split, documented),
    ]
    serve = vars(get_command(app))["commands"]["serve"]
    known = {option for parameter in serve.params for option in parameter.opts}
    used = {one for command in commands for one in command if one.startswith("--")}
    assert {"--memory", "--access-log", "--port"} <= used <= known


def test_kubernetes_asks_routes_that_exist_and_gives_time_to_stop() -> None:
    spec = kubernetes()[0]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["securityContext"]["runAsNonRoot"] is True
    from regard.server.schemas import Settings
    from regard.server.supervisor import SHUTDOWN_SECONDS

    needed = Settings().timeout + SHUTDOWN_SECONDS
    assert spec["terminationGracePeriodSeconds"] >= needed + 5  # preStop
    assert float(unit()["timeoutstopsec"]) >= needed


def test_the_proxy_lets_uploads_pass_and_names_the_scheme() -> None:
    from regard.server.schemas import Settings

    proxy = (DEPLOY / "nginx.conf").read_text()
    megabytes = re.search(r"client_max_body_size (\d+)m;", proxy)
    assert megabytes
    assert int(megabytes[1]) << 20 >= Settings().max_file_bytes
    # The address of a translated file begins with it.
    assert "proxy_set_header X-Forwarded-Proto $scheme;" in proxy


def test_the_unit_has_few_rights() -> None:
    service = unit()
    for key in ("dynamicuser", "nonewprivileges", "protecthome", "privatetmp"):
        assert service[key] == "yes"
    assert service["protectsystem"] == "strict"
    assert service["capabilityboundingset"] == ""
    assert service["execreload"] == "/bin/kill -HUP $MAINPID"
