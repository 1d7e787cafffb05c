"""deltafl in pfl, Apple's simulator of private federated learning. Needs the extra ``pfl`` and
Python below 3.13.

``DeltaBackend`` takes the place of ``SimulatedBackend``; algorithm, model, local training and
callbacks stay pfl's. pfl divides the sum of what users send by the sum of their weights, which no
unbiased estimate survives. So the last postprocessor hands on, in place of that sum, the step of
``close_round`` with weight 1: the average is the step. Users are drawn when their round opens,
never ahead of another's end: all samplers work but those that need an oracle.
"""

from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from .accumulate import Accumulator
from .errors import DeltaflError, require
from .federation.local_work import NUM_STEPS, SQUARE_LOSS, STEP_VARIANCE, LocalSteps
from .federation.replies import LOSS_NAMES, ClientReply, read_reply, reports_of, round_metrics
from .model.arrays import Arrays, as_array
from .model.parts import MEANS, ModelParts
from .model.vectors import flatten, mean_rest, unflatten
from .plan import Plan, RoundState
from .round import init_round, open_round
from .samplers.census import output_layer
from .state_file import load_state, save_state
from .store.sealed import read_array, write_sealed
from .streams import stream
from .types import Params, RoundInfo, as_number

require("pfl", "pfl")

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.common_types import Population, Saveable  # noqa: E402
from pfl.data.federated_dataset import FederatedDatasetBase  # noqa: E402
from pfl.exception import CheckpointNotFoundError  # noqa: E402
from pfl.metrics import Metrics, get_overall_value  # noqa: E402
from pfl.postprocessor.base import Postprocessor  # noqa: E402
from pfl.privacy.privacy_mechanism import CentralPrivacyMechanism  # noqa: E402
from pfl.stats import MappedVectorStatistics  # noqa: E402

__all__ = ["DeltaBackend", "LocalSteps"]

#: What users may report beside their updates, by the names of metrics.
_REPORTED = (*LOSS_NAMES, SQUARE_LOSS, STEP_VARIANCE, NUM_STEPS)
_STATE = "deltafl.safetensors"
_CENSUS = "deltafl-census.safetensors"


class DeltaBackend(SimulatedBackend, Saveable):  # type: ignore[misc]
    """A pfl backend whose cohorts come from ``open_round`` and whose statistics are the step of
    ``close_round``.

    It takes every algorithm whose statistics are one update of the model's parameters, such as
    ``FederatedAveraging`` and ``FedProx``. The model's central optimizer moves the model along the
    step: with ``SGD(lr=1)`` the models are those of the plan. A census is taken of all users, in
    the first round.

    The vector is that of pfl's model: tied weights once, no parameters without a gradient. Every
    user begins with the buffers of a PyTorch model, such as those of batch normalisation, and the
    model gets their weighted mean.

    What ``LocalSteps`` measures counts where the algorithm's ``train_one_user`` returns it as
    metrics: ``Metrics(list(steps.metrics().items()))``. A run that was killed goes on as it would
    have, if the saveables of ``RestoreTrainingCallback`` are algorithm, model and backend.

    Args:
        plan: Population, sampler, estimator, and n, which ``train_cohort_size`` must be.
        make_dataset_fn: ``make_dataset_fn(i)``, the pfl ``Dataset`` of client i of the plan; called
            when i is trained.
        val_data: The users of pfl's validation population; None where ``val_cohort_size`` is 0.
        postprocessors: pfl's. One that weights users changes nothing: the weights are the plan's.

    Attributes:
        state: The state of the rounds; None before the first.
        history: A ``RoundInfo`` for each round of this process.

    Raises:
        DeltaflError: If the plan needs what users in pfl do not do, or a postprocessor adds central
            noise.
    """

    def __init__(
        self,
        plan: Plan,
        make_dataset_fn: Callable[[int], Any],
        val_data: FederatedDatasetBase | None = None,
        postprocessors: Sequence[Postprocessor] = (),
    ) -> None:
        _check(plan, make_dataset_fn, postprocessors)
        self.plan = plan
        self.state: RoundState | None = None
        self.history: list[RoundInfo] = []
        self._users = _Users(make_dataset_fn)
        self._answers: Any = None
        super().__init__(self._users, val_data, [*postprocessors, self._users])

    async def async_gather_results(
        self,
        model: Any,
        training_algorithm: Any,
        *,
        central_context: Any,
    ) -> Any:
        """A round of the plan for the training population; pfl's own gathering for others."""
        gather: Any = super().async_gather_results
        if central_context.population != Population.TRAIN:
            return await gather(
                model,
                training_algorithm,
                central_context=central_context,
            )
        if central_context.cohort_size != self.plan.n:
            raise DeltaflError(
                f"train_cohort_size is {central_context.cohort_size} and the plan has n = "
                f"{self.plan.n}; write the same number for both"
            )
        arrays = dict(model.get_parameters().items())
        users = self._users
        params_d = flatten(list(arrays.values()))
        users.names = list(arrays)
        buffers = users.buffers = _Buffers(model)
        if self.plan.part("dp") is not None:
            buffers.parts.require_no_means()

        async def train(clients: list[int]) -> Any:
            users.clients = clients
            if not clients:  # nobody was drawn, and pfl cannot sum over nobody
                return close()
            context = replace(central_context, cohort_size=len(clients))
            return await gather(model, training_algorithm, central_context=context)

        def close() -> Any:
            received = users.take()
            updates: list[Params | None] = []
            for user in received:
                update_d = None
                if buffers.parts.value_fault(user.buffers) is None:
                    update_d = plan.as_sent(cohort, user.update_d[None])[0]
                updates.append(update_d)
            sound_n = [update_d is not None for update_d in updates]
            round = Accumulator(plan, state, cohort)
            round.add_rows(updates, reports_of([user.reply for user in received], sound_n))
            self.state, info = round.close()
            used = [user.buffers for user in compress(received, round.reports.responded_n)]
            robust = plan.part("clip") is not None
            buffers.put(mean_rest(buffers.parts, buffers.sent, used, round.coef_n, median=robust))
            self.history.append(info)
            numbers = round_metrics(info).items()
            logged = Metrics([(f"deltafl | {name}", number) for name, number in numbers])
            return step(self.state), logged

        def close_census() -> Any:
            self._answer([part.shape for part in arrays.values()])
            buffers.put(buffers.sent)  # a census moves none
            self.state = init_round(self.plan, params_d)
            return step(self.state), Metrics()

        def step(following: RoundState) -> Any:
            change = unflatten(following.params_d - params_d, list(arrays.values()))
            return MappedVectorStatistics(
                dict(zip(arrays, change, strict=True)),
                weight=1.0,
            )

        if (
            self.state is None
            and self.plan.census is not None
            and self.plan.population.norm_m is None
        ):
            users.close = close_census
            first = await train(list(range(self.plan.population.num_clients)))
            if cast(RoundState, self.state).round > 0:  # the census was the first round
                return first
        if self.state is None:
            self.state = init_round(self.plan, params_d)
        # The central optimizer has moved the model: with SGD(lr=1) by the step, up to rounding.
        plan = self.plan
        state = self.state._replace(params_d=params_d)
        cohort = open_round(plan, state)
        users.close = close
        return await train(cohort.client_n.tolist())

    def _answer(self, shapes: list[tuple[int, ...]]) -> None:
        """Turn everybody's updates into answers to the census."""
        census = self.plan.census
        seed = self.plan.seed
        assert census is not None
        layer = output_layer(shapes)
        answers = []
        for client, user in enumerate(self._users.take()):
            rng = stream(seed, "census", 0, client)
            answers.append(census.answer(user.update_d, layer, seed, rng))
        self._answers = np.array(answers)
        self.plan = self.plan.with_census(self._answers)

    def save(self, dir_path: str) -> None:
        """Save the state of the rounds and the answers to a census."""
        if self.state is not None:
            if self._answers is not None:
                write_sealed(Path(dir_path) / _CENSUS, {"answer_mk": self._answers})
            save_state(Path(dir_path) / _STATE, self.state, self.plan)

    def load(self, dir_path: str) -> None:
        """Go on from a saved state; the rounds are those that would have followed."""
        state = Path(dir_path) / _STATE
        census = Path(dir_path) / _CENSUS
        if not state.exists():
            raise CheckpointNotFoundError(state)
        # First, as the state is of the plan with these answers.
        if census.exists():
            cure = "put a copy back, or begin anew in another folder"
            self._answers = read_array(census, cure, "answer_mk")
            self.plan = self.plan.with_census(self._answers)
        self.state = load_state(state, self.plan)


class _Buffers:
    """The buffers of a PyTorch model that are averaged, as they were when the round began; of any
    other model none.
    """

    def __init__(self, model: Any) -> None:
        self.parts = ModelParts(())
        if hasattr(model, "pytorch_model"):
            self._module = model.pytorch_model
            self.parts = ModelParts.of(self._module)
        self._names = self.parts.names(*MEANS)
        self.sent = self.read()

    def read(self) -> Arrays:
        """What they are now."""
        # By name, as a module may put another tensor in a buffer's place.
        return {name: as_array(self._module.get_buffer(name)).copy() for name in self._names}

    def put(self, arrays: Arrays) -> None:
        """Make them these."""
        for name in self._names:
            tensor = self._module.get_buffer(name)
            tensor.copy_(tensor.new_tensor(arrays[name]))


class _Received(NamedTuple):
    """What a user sent."""

    update_d: Params
    reply: ClientReply
    buffers: Arrays


class _Users(FederatedDatasetBase, Postprocessor):  # type: ignore[misc]
    """The users of a round, and what they sent; the last postprocessor."""

    def __init__(self, make_dataset_fn: Callable[[int], Any]) -> None:
        super().__init__()
        self.make_dataset_fn = make_dataset_fn
        self.clients: list[int] = []
        #: The model's arrays.
        self.names: list[str] = []
        #: What is handed on in place of the sum.
        self.close: Callable[[], Any]
        self.buffers: _Buffers
        self._training = -1
        self._received: dict[int, _Received] = {}

    def __next__(self) -> Any:
        raise NotImplementedError("a cohort is drawn as a whole")

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[Any, int]]:
        """This process's users in turn, each with a seed for postprocessors that draw."""
        workers = self._get_ops().distributed
        if len(self.clients) < workers.world_size > 1:
            raise DeltaflError(
                f"{workers.world_size} processes share {len(self.clients)} users; start fewer "
                "processes"
            )
        for place, client in enumerate(self.clients):
            # For every user, whoever trains it: so all processes draw the same seeds.
            seed = self._get_seed()
            if place % workers.world_size == workers.global_rank:
                # It is this user's statistics that come until the next one is asked for.
                self._training = client
                self.buffers.put(self.buffers.sent)
                yield self.make_dataset_fn(client), seed

    def postprocess_one_user(self, *, stats: Any, user_context: Any) -> Any:
        """Keep the update, statistics / weight."""
        if set(stats.keys()) != set(self.names):
            raise DeltaflError(
                "the algorithm sends statistics that are not one update of the model's parameters; "
                "choose another, such as FederatedAveraging"
            )
        # pfl's statistics are updates times the user's weight.
        update_d = flatten([stats[name] for name in self.names]) / np.float32(stats.weight)
        # The names that pfl makes say the population, too.
        known = {str(name).rpartition(" | ")[2]: value for name, value in user_context.metrics}
        reported = {
            name: as_number(get_overall_value(known[name])) for name in _REPORTED if name in known
        }
        reply = read_reply({}, reported, {})
        self._received[self._training] = _Received(update_d, reply, self.buffers.read())
        return stats, Metrics()

    def postprocess_server(
        self,
        *,
        stats: Any,
        central_context: Any,
        aggregate_metrics: Metrics,
    ) -> Any:
        """The step of the round."""
        return self.close()

    def take(self) -> list[_Received]:
        """What users sent, in the cohort's order, from all processes; then it is forgotten."""
        received = self._received
        self._received = {}
        workers = self._get_ops().distributed
        if workers.world_size > 1:
            import torch

            shares: list[Any] = [None] * workers.world_size
            torch.distributed.all_gather_object(shares, received)
            received = dict(ChainMap(*shares))
        return [received[client] for client in self.clients]


def _check(
    plan: Plan,
    make_dataset_fn: Any,
    postprocessors: Sequence[Postprocessor],
) -> None:
    """Refuse what users in pfl do not do before any of them works."""
    if isinstance(make_dataset_fn, FederatedDatasetBase):
        raise DeltaflError(
            f"make_dataset_fn is a {type(make_dataset_fn).__name__}, which draws users itself, "
            "some ahead of a round; write a function from a client's index to its Dataset"
        )
    if plan.sampler.needs_oracle:
        plan.sampler.require_oracle(None, plan.method)
    if plan.drifting:
        raise DeltaflError(
            f"local training in pfl takes no drift; leave out {' and '.join(plan.drifting)}"
        )
    if plan.part("average") is not None:
        raise DeltaflError("the model is pfl's, which averages none; leave out average")
    if any(isinstance(one, CentralPrivacyMechanism) for one in postprocessors):
        raise DeltaflError(
            "central noise is scaled for users who count 1 at most, and here they count w / pi; "
            "give the plan dp=DifferentialPrivacy(...), with 'uniform@poisson'"
        )
