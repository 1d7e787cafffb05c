"""A site's script, with NVFlare's Client API and PyTorch. What deltafl adds to an ordinary one
is marked.
"""

import argparse

import nvflare.client as flare
import torch
from digits import SoftmaxRegression, batches, site_data

from deltafl.nvflare import DeltaClient, LocalSteps, corrected_steps

LR = 0.05
EPOCHS = 2
BATCH_SIZE = 10


def main(num_sites: int, seed: int) -> None:
    """Train whenever the server asks."""
    flare.init()
    number = int(flare.get_site_name().removeprefix("site-")) - 1
    x, y = site_data(number, num_sites, seed)
    model = SoftmaxRegression()
    client = DeltaClient(num_examples=len(y))  # deltafl: how much data I hold
    while flare.is_running():
        received = client.receive()  # deltafl: was flare.receive()
        if received is None:
            break
        model.load_state_dict(received.params)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        correction = client.take_correction()  # deltafl: optional, for scaffold and mime
        steps = LocalSteps(
            LR * correction.step_factor
        )  # deltafl: optional, how much the local steps vary
        rows_k = list(batches(len(y), BATCH_SIZE, EPOCHS, seed, received.current_round, number))
        with corrected_steps(correction, model, optimizer, len(rows_k)):  # deltafl: optional
            for rows in rows_k:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                steps.add(loss.item(), [p.grad for p in model.parameters()])  # deltafl
                optimizer.step()
        client.send(
            flare.FLModel(params=model.state_dict(), metrics=steps.metrics())
        )  # deltafl: was flare.send


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_sites", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
