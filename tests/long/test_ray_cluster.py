"""Ray Data on a local cluster with two nodes, one of which is killed: no row is lost, and none is there twice."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from regard.tasks import Translator

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="ray is not installed: pip install 'regard[ray]'"
)

ROWS, BLOCKS, BATCH = 1200, 12, 100

SCRIPT = """
import sys, threading, time, uuid
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from regard.ray import Translate

folder, run = Path(sys.argv[1]), sys.argv[2]


class Recorded(Translate):
    '''Records the node and the rows of each batch.'''

    def __call__(self, batch):
        time.sleep(0.5)  # so that the node is killed while there is more to do
        found = super().__call__(batch)
        node = ray.get_runtime_context().get_node_id()
        (folder / "batches" / f"{node}-{uuid.uuid4().hex}").write_text(str(batch["id"].tolist()))
        return found


# One actor per node. A second core is for reading and writing.
node = {"num_cpus": 2, "resources": {"model": 1}, "object_store_memory": 100 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
# This process belongs to a node, too. It joins before there is a second one, so that it does not die with it.
ray.init(address=cluster.address, log_to_driver=False)
other = cluster.add_node(**node)
cluster.wait_for_nodes()


def kill():
    while len(list((folder / "batches").glob(f"{other.node_id}-*"))) < 3:
        time.sleep(0.05)
    cluster.remove_node(other, allow_graceful=False)
    (folder / "killed").touch()


killer = threading.Thread(target=kill)
killer.start()
rows = ray.data.read_parquet(str(folder / "in")).repartition(int(sys.argv[3]))
rows = rows.map_batches(
    Recorded,
    fn_constructor_kwargs={"run": run, "precision": "fp32"},
    batch_size=int(sys.argv[4]),
    resources={"model": 1},
    compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2, initial_size=2),
)
rows.write_parquet(str(folder / "out"))
killer.join()
(folder / "alive").write_text(str(sum(one["Alive"] for one in ray.nodes())))
ray.shutdown()
cluster.shutdown()
"""


def test_a_killed_node_loses_no_row_and_repeats_none(finished_run: Path, tmp_path: Path) -> None:
    texts = [" ".join(["ein", "Hund"][n % 2 :] * (n % 5)) for n in range(ROWS)]
    # Blocks of more than 100 kB are stored on the node that makes them, and are lost with it.
    notes = [os.urandom(600).hex() for _ in texts]
    (tmp_path / "in").mkdir()
    (tmp_path / "batches").mkdir()
    for start in range(0, ROWS, 400):
        rows = slice(start, start + 400)
        columns = {"id": range(ROWS)[rows], "source": texts[rows], "note": notes[rows]}
        parquet.write_table(pa.table(columns), tmp_path / "in" / f"{start}.parquet")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = map(str, (tmp_path, finished_run, BLOCKS, BATCH))
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "alive").read_text() == "1"
    killed = (tmp_path / "killed").stat().st_mtime_ns
    times = [one.stat().st_mtime_ns for one in (tmp_path / "batches").iterdir()]
    assert any(time > killed for time in times), "the node was killed when all batches were done"
    table = parquet.read_table(tmp_path / "out").sort_by("id")
    assert table.column_names == ["id", "source", "note", "translation", "confidence"]
    assert table.column("id").to_pylist() == list(range(ROWS))
    assert table.column("source").to_pylist() == texts
    assert table.column("note").to_pylist() == notes
    model = Translator.load(finished_run, precision="fp32")
    assert table.column("translation").to_pylist() == model.translate(texts)
