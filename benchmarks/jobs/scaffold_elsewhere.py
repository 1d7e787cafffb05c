"""Does another project's SCAFFOLD find the optimum? ``python benchmarks/jobs/scaffold_elsewhere.py
paper|pfl|nvflare|flgo|fluke``, in an environment that has the project.

Four clients have the losses h (w - t)^2 / 2 with different h, so federated averaging ends
elsewhere. Each takes ten steps of gradient descent a round; 400 rounds with 4, 2 and 1 clients
drawn. Printed is the mean distance from the optimum over the last 100 rounds. The project's own
client and server code runs; loops, transport and data are ours.
"""

import asyncio
import copy
import itertools
import random
import sys
from types import SimpleNamespace

import numpy as np

H = (1.0, 4.0, 2.0, 0.5)
T = (-1.0, 1.0, 3.0, -2.0)
M, LR, STEPS, ROUNDS = len(H), 0.05, 10, 400
BEST = float(np.dot(H, T) / sum(H))


def cohorts(n):
    rng = random.Random(0)
    return [rng.sample(range(M), n) for _ in range(ROUNDS)]


def paper(n, corrected=True):
    """Algorithm 1, option II; without corrections federated averaging."""
    x, c, c_m = 0.0, 0.0, [0.0] * M
    for clients in cohorts(n):
        moves, changes = [], []
        for i in clients:
            y = x
            for _ in range(STEPS):
                y -= LR * (H[i] * (y - T[i]) + corrected * (c - c_m[i]))
            new = c_m[i] - c + (x - y) / (STEPS * LR)
            moves.append(y - x)
            changes.append(new - c_m[i])
            c_m[i] = new
        x += float(np.mean(moves))
        c += n / M * float(np.mean(changes))
        yield x


def model(base=None):
    import torch

    class Model(base or torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))
            self.ingraph = False

        def forward(self, x):
            return self.w * x

        def loss(self, h, t, is_eval=False):
            return (h * (self.w - t) ** 2 / 2).sum()

        def metrics(self, h, t, is_eval=False):
            return {}

    return Model()


def pfl(n):
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel

    module = model()
    state = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), 1.0),
    )
    drawn = itertools.chain.from_iterable(cohorts(n))
    users = FederatedDataset(
        lambda i: Dataset(raw_data=[torch.tensor([H[i]]), torch.tensor([T[i]])], user_id=i),
        lambda: next(drawn),
    )
    backend = SimulatedBackend(training_data=users, val_data=None)
    scaffold = SCAFFOLD()
    params = SCAFFOLDParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=10**6,
        train_cohort_size=n,
        val_cohort_size=0,
        population=M,
        use_gradient_as_control_variate=False,  # option II
        user_state_storage=InMemoryUserStateStorage(),
    )
    train = NNTrainHyperParams(local_num_epochs=STEPS, local_learning_rate=LR, local_batch_size=1)
    for number in range(ROUNDS):
        contexts, state, _ = scaffold.get_next_central_contexts(
            state, number, params, train, NNEvalHyperParams(local_batch_size=1)
        )
        context = next(each for each in contexts if each.population.name == "TRAIN")
        statistics, metrics = asyncio.run(
            backend.async_gather_results(
                model=state, training_algorithm=scaffold, central_context=context
            )
        )
        state, _ = scaffold.process_aggregated_statistics(context, metrics, state, statistics)
        yield module.w.item()


def nvflare(n):
    import torch
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.app_constant import AlgorithmConstants
    from nvflare.app_common.workflows.scaffold import scaffold_aggregate_fn
    from nvflare.app_opt.pt.scaffold import PTScaffoldHelper

    server, control = model(), {"w": np.zeros(1, dtype=np.float32)}
    local_m, helper_m = [model() for _ in H], [PTScaffoldHelper() for _ in H]
    for module, helper in zip(local_m, helper_m, strict=True):
        helper.init(module)
    for number, clients in enumerate(cohorts(n)):
        results = []
        for i in clients:
            module, helper = local_m[i], helper_m[i]
            module.load_state_dict(server.state_dict())
            helper.load_global_controls(control)
            both = helper.get_params()
            optimizer = torch.optim.SGD(module.parameters(), LR)
            for _ in range(STEPS):
                optimizer.zero_grad()
                module.loss(H[i], T[i]).backward()
                optimizer.step()
                helper.model_update(module, LR, *both)
            helper.terms_update(module, LR, *both, server)
            meta = {
                AlgorithmConstants.SCAFFOLD_CTRL_DIFF: helper.get_delta_controls(),
                "client_name": str(i),
            }
            params = {"w": module.w.detach().numpy().copy()}
            results.append(
                FLModel(params=params, params_type=ParamsType.FULL, current_round=number, meta=meta)
            )
        total = scaffold_aggregate_fn(results)
        server.load_state_dict({"w": torch.tensor(total.params["w"])})
        control["w"] = control["w"] + total.meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF]["w"]
        yield server.w.item()


def flgo(n):
    import torch
    from flgo.algorithm.scaffold import Client, Server
    from flgo.utils.fmodule import FModule

    server = object.__new__(Server)
    server.model = model(FModule)
    server.cg, server.eta, server.num_clients = server.model.zeros_like(), 1.0, M
    client_m = [object.__new__(Client) for _ in H]
    for i, client in enumerate(client_m):
        vars(client).update(c=None, device="cpu", learning_rate=LR, num_steps=STEPS, clip_grad=0)
        vars(client).update(weight_decay=0, momentum=0, get_batch_data=lambda: None)
        client.calculator = SimpleNamespace(
            get_optimizer=lambda m, lr, **_: torch.optim.SGD(m.parameters(), lr),
            compute_loss=lambda m, _, i=i: {"loss": m.loss(H[i], T[i])},
        )
    for clients in cohorts(n):
        sent = {"model": server.model, "cg": server.cg}
        replies = [client_m[i].reply(copy.deepcopy(sent)) for i in clients]
        server.model, server.cg = server.aggregate(
            [each["dy"] for each in replies], [each["dc"] for each in replies]
        )
        yield server.model.w.item()


def fluke(n):
    import torch
    from fluke.algorithms.scaffold import SCAFFOLDClient, SCAFFOLDServer
    from fluke.utils.model import state_dict_zero_like

    sent = {}
    channel = SimpleNamespace(
        receive=lambda to, by, msg_type: SimpleNamespace(payload=sent[to, by, msg_type])
    )
    settings = {"weighted": False, "lr": 1.0, "global_step": 1.0}
    server = object.__new__(SCAFFOLDServer)
    server.model, server.device, server._channel, server.n_clients = model(), "cpu", channel, M
    server.hyper_params = SimpleNamespace(**settings, keys=settings.keys)
    server.control = state_dict_zero_like(server.model.state_dict())

    def optimizer_of(module):
        optimizer = torch.optim.SGD(module.parameters(), LR)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 1.0)

    client_m = []
    for i in range(M):
        hyper = SimpleNamespace(
            local_epochs=STEPS, loss_fn=lambda w, t, i=i: (H[i] * (w - t) ** 2 / 2).sum()
        )
        client_m.append(
            SimpleNamespace(
                index=i, model=None, control=None, optimizer=None, scheduler=None, device="cpu",
                channel=channel, hyper_params=hyper, _optimizer_cfg=optimizer_of,
                _clip_grads=lambda _: None, train_set=[(torch.ones(1), torch.tensor([T[i]]))],
            )
        )  # fmt: skip
    for clients in cohorts(n):
        for i in clients:
            sent[i, "server", "model"] = copy.deepcopy(server.model)
            sent[i, "server", "control"] = server.control
            SCAFFOLDClient.receive_model(client_m[i])
            SCAFFOLDClient.fit(client_m[i])
            sent["server", i, "control"] = client_m[i].delta_control
        drawn = [client_m[i] for i in clients]
        server.aggregate(drawn, [each.model for each in drawn])
        yield server.model.w.item()


if __name__ == "__main__":
    play = globals()[sys.argv[1]]
    for n in (4, 2, 1):
        far = np.abs(np.array(list(play(n))[-100:]) - BEST)
        print(f"{sys.argv[1]}: {n} of {M} clients a round, {far.mean():.2g} from the optimum")
    if sys.argv[1] == "paper":
        far = np.abs(np.array(list(paper(4, corrected=False))[-100:]) - BEST)
        print(f"federated averaging: {M} of {M} clients a round, {far.mean():.2g} from the optimum")
