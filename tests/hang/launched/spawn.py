"""torch.multiprocessing.spawn: the ranks are told their number by an argument."""

import sys

import rank
import torch.multiprocessing as mp


def main(number, world, port, directory):
    rank.join(init_method=f"tcp://127.0.0.1:{port}", rank=number, world_size=world)
    rank.train(directory)


if __name__ == "__main__":
    port, directory = sys.argv[1:]
    mp.spawn(main, args=(4, int(port), directory), nprocs=4)
