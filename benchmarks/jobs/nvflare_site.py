"""A site of ``nvflare_job.py`` as NVFlare's quick start writes it: nvflare_site.py JOB.npz."""

import sys

import numpy as np
import nvflare.client as flare
import torch
from torch.utils.data import DataLoader, TensorDataset
from work import TextbookNet


def main() -> None:
    torch.set_num_threads(1)
    flare.init()
    held = np.load(sys.argv[1])
    own = int(flare.get_site_name().removeprefix("site-")) - 1
    examples = TensorDataset(torch.from_numpy(held["x"][own]), torch.from_numpy(held["y"][own]))
    model = TextbookNet()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(5):
            for x, y in DataLoader(examples, batch_size=32, shuffle=True):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        flare.send(
            flare.FLModel(
                params=model.state_dict(), meta={"NUM_STEPS_CURRENT_ROUND": len(examples)}
            )
        )


if __name__ == "__main__":
    main()
