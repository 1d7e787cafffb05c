"""The FashionMNIST job as a plain PyTorch loop: plain_job.py JOB.npz ROUNDS; prints a line after
each round.
"""

import sys

import numpy as np
import torch
from cnn import TextbookNet
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    torch.set_num_threads(1)
    job = np.load(sys.argv[1])
    clients = [
        TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        for x, y in zip(job["x"], job["y"], strict=True)
    ]
    model = TextbookNet()
    for _ in range(int(sys.argv[2])):
        start = {name: value.clone() for name, value in model.state_dict().items()}
        total = {name: torch.zeros_like(value) for name, value in start.items()}
        for examples in clients:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for _ in range(5):
                for x, y in DataLoader(examples, batch_size=32, shuffle=True):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
            for name, value in model.state_dict().items():
                total[name] += value / len(clients)
        model.load_state_dict(total)
        print("round", flush=True)


if __name__ == "__main__":
    main()
