"""DeltaStrategy: deltafl's samplers and weights in Flower's rounds. A translation, with no
mathematics of its own.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from ..arrays import BUFFERS
from ..errors import DeltaflError
from ..estimators.control_variates import ControlVariate
from ..federation.federation import Federation
from ..federation.local_work import question
from ..federation.replies import round_metrics
from ..federation.rules import check_seconds, check_texts, check_whole, make_rules
from ..federation.saved import sole_owner
from ..federation.service import admit, begin, close, log_privacy, select
from ..samplers.base import Sampler
from ..samplers.census import Census
from ..server.optimizers import ServerOptimizer
from ..types import Cohort, RoundInfo
from .client import CENSUS
from .messages import (
    by_recipient,
    content_for,
    content_for_all,
    fault_of,
    mean_metrics,
    read_census,
    read_reply,
    to_record,
)
from .registration import Directory

#: Seconds that a message outlives its round's timeout, for replies that are under way.
TTL_GRACE = 10.0
_FOREIGN_PRIVACY = (
    "Flower's wrappers for differential privacy assume that every reply counts 1 / n; importance "
    "weights count some "
    "more, which voids their guarantee: write dp=DifferentialPrivacy(clip, noise_multiplier, delta)"
)


class DeltaStrategy(Strategy):
    """Client sampling of deltafl for Flower's Message API.

    The server aggregates *updates* (received minus sent) with weights from its own probabilities,
    whatever weights the clients send. A missing or faulty reply is non-response; the server keeps
    each client's response rate.

    Args:
        sampler: A label, such as what ``deltafl.recommend`` answers, or a sampler of your own. The
            default keeps one update of each client at the server: as many models as there are
            clients.
        n: Clients selected per round.
        server_optimizer: A name such as ``"sgd"`` or ``"adam"``, or an optimizer.
        state_path: Folder where the state is saved after every round and from which a restart
            resumes; or None.
        estimator: How replies are weighted, a name or a control variate; None for the sampler's
            default.
        min_nodes: Clients that must be connected before a round begins; None for n.
        wait_for_nodes: Seconds to wait for them before an error.
        registration_timeout: Seconds that a new node has to register.
        buffers: Name patterns of floating-point arrays that are not trained.
        evaluate: Whether all connected clients evaluate the model after every round.
        forget: Keys of clients (as in the log) to drop from the saved state, with everything
            remembered about them; they are never selected again.
        settings: What all hosts share, by name: ``weights``, ``seed``, ``aux``, ``average``,
            ``mime``, ``clip``, ``dp``, ...; docs/flower-operation.md lists them.

    Raises:
        DeltaflError: If the sampler needs every update before the draw, or an argument is unknown
            or out of range.
    """

    def __init__(
        self,
        sampler: str | Sampler = "innovation@local-pivotal",
        n: int = 10,
        server_optimizer: str | ServerOptimizer = "sgd",
        state_path: str | Path | None = None,
        estimator: str | ControlVariate | None = None,
        *,
        min_nodes: int | None = None,
        wait_for_nodes: float = 600.0,
        registration_timeout: float = 120.0,
        buffers: Sequence[str] = BUFFERS,
        evaluate: bool = False,
        forget: Collection[str] = (),
        **settings: Any,
    ) -> None:
        self.name = sampler if isinstance(sampler, str) else type(sampler).__name__
        self.wait_for_nodes = check_seconds("wait_for_nodes", wait_for_nodes, "[0, inf]")
        if min_nodes is not None:
            check_whole("min_nodes", min_nodes, "at least 1, or None for n", 1)
        self.buffers = check_texts("buffers", buffers)
        self.evaluate = evaluate
        self.rules = make_rules(
            sampler,
            n,
            state_path,
            server_optimizer=server_optimizer,
            estimator=estimator,
            min_clients=min_nodes,
            **settings,
        )
        self.min_nodes = self.rules.min_clients
        self.state_path = self.rules.state_path
        seconds = check_seconds("registration_timeout", registration_timeout)
        self.directory = Directory(
            self.rules.identity, seconds, self.rules.aux, check_texts("forget", forget)
        )
        self.federation: Federation | None = None
        #: The statistics of every round, for callers who want more than Flower's metrics.
        self.history: list[RoundInfo] = []
        self._timeout = 3600.0
        #: The last round's cohort, and the messages to its clients.
        self._cohort: Cohort | None = None
        self._trainings: list[tuple[int, Message]] = []
        self._evaluations: list[tuple[str, Message]] = []

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run rounds until ``num_rounds`` are done, including those before a restart. Arguments as
        in ``Strategy``.

        ``timeout`` also bounds how long a train message lives: a late node does not start old work.
        """
        check_whole("num_rounds", num_rounds, "at least 0", 0)
        self._timeout = check_seconds("timeout", timeout)
        with sole_owner(self.state_path):
            arrays = {name: array.numpy() for name, array in initial_arrays.items()}
            federation = begin(self.rules, arrays, self.buffers, self.directory.forget, log)
            self.federation = federation
            self._cohort = None
            done = federation.round
            log_privacy(self.rules, max(done, num_rounds), log)

            def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
                assert evaluate_fn is not None
                return evaluate_fn(server_round + done, arrays)  # Flower counts from 1 again

            result = super().start(
                grid,
                to_record(federation.model()),
                max(0, num_rounds - done),
                self._timeout,
                train_config,
                evaluate_config,
                evaluate_fn and evaluate,
            )
        result.arrays = to_record(federation.model())
        for metrics in (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        ):
            counted = {number + done: record for number, record in metrics.items()}
            metrics.clear()
            metrics.update(counted)
        return result

    def summary(self) -> None:
        """Log the settings."""
        plan = self.rules.plan
        text = "\t├──> deltafl: sampler %s, n = %d, estimator %s"
        log(INFO, text, self.name, plan.n, plan.rule.name)
        log(INFO, "\t├──> weights by %s, server: %s", self.rules.weights, plan.parts)
        log(INFO, "\t└──> state kept in %s", self.state_path or "memory only")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select clients; returns a list because the deployment's grid iterates over it twice."""
        if KEY_CLIPPING_NORM in config:
            raise DeltaflError(_FOREIGN_PRIVACY)
        federation = self._active()
        is_first = self._cohort is None
        let_in = partial(admit, federation, log=log)
        present = self.directory.wait(
            grid, self.min_nodes, self.wait_for_nodes, settle=is_first, admit=let_in
        )
        number = federation.current.round + 1
        ttl = self._timeout + TTL_GRACE
        nodes = self.directory.nodes()
        content = content_for_all(federation, federation.arrays(), config, number)

        def train(content: RecordDict, node_id: int) -> Message:
            group = str(number)
            return Message(content, node_id, MessageType.TRAIN, ttl=ttl, group_id=group)

        def ask(keys: list[str], census: Census) -> dict[str, object]:
            sent = []
            for key in keys:
                asked = content_for(content, federation.step_factor)
                asked.config_records["config"][CENSUS] = question(census)
                sent.append((key, train(asked, nodes[key])))
            messages = [message for _, message in sent]
            received = grid.send_and_receive(messages, timeout=self._timeout)
            replies = by_recipient(sent, received).items()
            return {key: read_census(reply, federation.step_factor) for key, reply in replies}

        self._trainings = []
        self._cohort = cohort = select(federation, present, ask, log)
        if cohort is None:
            return []
        corrections = federation.corrections(cohort)
        # With mime one for all: a record once made is not made again.
        records = {id(correction): to_record(correction) for correction in corrections}
        for client, correction in zip(cohort.client_n.tolist(), corrections, strict=True):
            own = content_for(content, correction.step_factor, records[id(correction)])
            self._trainings.append((client, train(own, nodes[federation.keys[client]])))
        return [message for _, message in self._trainings]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round: estimate, step, the sampler's update; then save the state."""
        federation = self._active()
        cohort = self._cohort
        if cohort is None:  # the round was the census
            return to_record(federation.model()), MetricRecord()
        first = by_recipient(self._trainings, replies)
        received = {client: read_reply(reply) for client, reply in first.items()}
        info = close(federation, cohort, received, log)
        self.history.append(info)
        return to_record(federation.model()), MetricRecord(round_metrics(info))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to all connected clients, if ``evaluate`` is set."""
        self._evaluations = []
        if self.evaluate:
            federation = self._active()
            ttl = self._timeout + TTL_GRACE
            number = federation.current.round  # of the round that was closed
            content = content_for_all(federation, federation.model(), config, number)
            for key, node_id in self.directory.nodes().items():
                if key in federation.clients:
                    message = Message(
                        content, node_id, MessageType.EVALUATE, ttl=ttl, group_id=str(number)
                    )
                    self._evaluations.append((key, message))
        return [message for _, message in self._evaluations]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The mean of the clients' metrics by their weights in the target."""
        federation = self._active()
        weight_m = federation.plan.population.weight_m.tolist()
        weights = dict(zip(federation.keys, weight_m, strict=True))
        received = by_recipient(self._evaluations, replies)
        faults: dict[str, str | None] = {key: "no reply in time" for key, _ in self._evaluations}
        faults |= {key: fault_of(reply) for key, reply in received.items()}
        failed = [(key, fault) for key, fault in faults.items() if fault is not None]
        if failed:
            text = "\tevaluation: no result from %d of %d clients; the first is %s: %s"
            log(WARNING, text, len(failed), len(self._evaluations), *failed[0])
        metrics = mean_metrics((weights[key], reply) for key, reply in received.items())
        if not metrics:
            return None
        return MetricRecord(metrics)

    def _active(self) -> Federation:
        if self.federation is None:
            raise DeltaflError(_FOREIGN_PRIVACY)
        return self.federation
