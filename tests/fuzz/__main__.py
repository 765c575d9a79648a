"""Fuzz one target for some time: ``python -m tests.fuzz readers --seconds 600``. Needs ``pip install -e '.[fuzz]'``.

New inputs that reach new code are kept in a temporary folder; an input that breaks the target is written to the present
folder as ``crash-…``. Add it to ``tests/fuzz/seeds`` once it is fixed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile

import atheris

with atheris.instrument_imports(include=["regard"]):
    from tests.fuzz.targets import SEEDS, TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=600)
    arguments = parser.parse_args()
    logging.disable()
    found = tempfile.mkdtemp(prefix=f"regard-fuzz-{arguments.target}-")
    options = [
        f"-max_total_time={arguments.seconds}",
        "-max_len=4096",
        "-timeout=120",
        "-rss_limit_mb=4096",
    ]
    folders = [found, str(SEEDS / arguments.target)]
    atheris.Setup([sys.argv[0], *options, *folders], TARGETS[arguments.target])
    atheris.Fuzz()


main()
