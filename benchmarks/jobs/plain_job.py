"""A job as a plain PyTorch loop: plain_job.py JOB.npz ROUNDS; prints a line after each round."""

import sys

import torch
from work import mark, read


def main() -> None:
    job = read(sys.argv[1])
    model = job.network()
    for _ in range(int(sys.argv[2])):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in range(len(job.x)):
            model.load_state_dict(start)
            job.train(model, client)
            for name, value in model.state_dict().items():
                total[name] += value / len(job.x)
        model.load_state_dict(total)
        mark(job.device)


if __name__ == "__main__":
    main()
