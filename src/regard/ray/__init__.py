"""Translation with Ray Data: actors with one model each, on any number of machines.

    import ray
    import regard.ray

    rows = ray.data.read_parquet("in/")
    rows = rows.map_batches(
        regard.ray.Translate,
        fn_constructor_kwargs={"run": "runs/big", "beam": 4},
        batch_size=1024,
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=8),
    )
    rows.write_parquet("out/")

With a minimum of one actor, translation continues when machines are lost. Ray runs a batch again if its machine is
lost, and a file that is written twice has the same name, so no row is lost or written twice.
"""

from regard.ray.translate import Translate as Translate
