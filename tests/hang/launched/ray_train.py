"""Ray Train: each worker's training function runs in a thread."""

import os
import sys

DIRECTORY = os.environ["HANG_DIRECTORY"]
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


def train():
    sys.path.insert(0, os.environ["HANG_HERE"])
    import rank

    rank.train(os.environ["HANG_DIRECTORY"])


if __name__ == "__main__":
    import ray
    from ray.train import ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    here = os.path.dirname(os.path.abspath(__file__))
    variables = {"HANG_DIRECTORY": DIRECTORY, "HANG_HERE": here}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    TorchTrainer(
        train,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=DIRECTORY),
    ).fit()
