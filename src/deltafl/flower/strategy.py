"""DeltaStrategy: deltafl's samplers and weights in Flower's rounds. A translation, with no
mathematics of its own.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Literal

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from ..errors import DeltaflError, is_in
from ..estimators.control_variates import ControlVariate
from ..federation.exchange import NUM_EXAMPLES, RECORD, Question
from ..federation.replies import mean_metrics, round_metrics
from ..federation.rules import check_seconds, check_whole, make_rules
from ..federation.service import Service, serving
from ..samplers.base import Sampler
from ..samplers.label import method_of
from ..server.optimizers import ServerOptimizer
from ..types import RoundInfo
from .client import CORRECTION, MODEL
from .messages import (
    by_recipient,
    metrics_in,
    read_apart,
    reply_in,
    report_in,
    to_arrays,
    to_record,
)
from .registration import Directory

#: Of FedAvg: the contents of replies, and the metric that weighs them.
Aggregate = Callable[[list[RecordDict], str], MetricRecord]
#: Seconds that a message outlives its round's timeout, for replies that are under way.
TTL_GRACE = 10.0
#: Arguments of FedAvg and of other hosts that have another name here, or none.
_ELSEWHERE = {
    "min_available_nodes": "write min_nodes",
    "min_clients": "write min_nodes",
    "min_train_nodes": "write n, so many clients train in each round",
    "min_evaluate_nodes": "write fraction_evaluate, at least one client evaluates",
    "arrayrecord_key": "clients find the model in message.content['arrays']",
    "configrecord_key": "clients find the config in message.content['config']",
    "evaluate_fn": "give it to start(..., evaluate_fn=...)",
    "initial_parameters": "give them to start, as an ArrayRecord",
}
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
        sampler: A label, such as ``deltafl recommend`` prints, or a sampler of your own. The
            default keeps one update of each client at the server: as many models as there are
            clients.
        n: Clients selected per round; None for 10, or for what ``fraction_train`` says.
        server_optimizer: A name such as ``"sgd"`` or ``"adam"``, or an optimizer.
        state_path: Folder where the state is saved after every round and from which a restart
            resumes; or None.
        estimator: How replies are weighted, a name or a control variate; None for the sampler's
            default.
        min_nodes: Clients that must be connected before a round begins; None for n, and for 2 with
            ``fraction_train``.
        wait_for_nodes: Seconds to wait for them before an error.
        evaluate: The same as ``fraction_evaluate=1.0``.
        fraction_evaluate: The share in [0, 1] of the connected clients that evaluate the model
            after every round, drawn anew each time; at least one.
        train_metrics_aggr_fn: As in Flower's ``FedAvg``: (the contents of the replies that were
            used, ``weighted_by_key``) -> ``MetricRecord``; None for their means by the
            coefficients of the estimate.
        evaluate_metrics_aggr_fn: The same for evaluations; None for their means by the weights of
            the target.
        settings: What all hosts share, by name: ``weights``, ``seed``, ``fraction_train``,
            ``weighted_by_key``, ``buffers``, ``local``, ``trainable``, ``tied``, ``forget``,
            ``aux``, ``average``, ``mime``, ``clip``, ``dp``, ...; docs/how-to/flower-settings.md
            lists them.

    Raises:
        DeltaflError: If the sampler needs every update before the draw, or an argument is unknown
            or out of range.
    """

    def __init__(
        self,
        sampler: str | Sampler = "innovation@local-pivotal",
        n: int | Literal["auto"] | None = None,
        server_optimizer: str | ServerOptimizer = "sgd",
        state_path: str | Path | None = None,
        estimator: str | ControlVariate | None = None,
        *,
        min_nodes: int | None = None,
        wait_for_nodes: float = 600.0,
        evaluate: bool = False,
        fraction_evaluate: float | None = None,
        train_metrics_aggr_fn: Aggregate | None = None,
        evaluate_metrics_aggr_fn: Aggregate | None = None,
        **settings: Any,
    ) -> None:
        self.name = sampler if isinstance(sampler, str) else method_of(sampler)
        self.wait_for_nodes = check_seconds(
            "wait_for_nodes",
            wait_for_nodes,
            "[0, inf]",
        )
        #: Whether somebody chose that nobody evaluates.
        self._wants_none = fraction_evaluate == 0 and evaluate_metrics_aggr_fn is None
        if fraction_evaluate is None:
            fraction_evaluate = float(evaluate)
        if not is_in(fraction_evaluate, "[0, 1]"):
            raise DeltaflError(
                f"fraction_evaluate is {fraction_evaluate!r}; it must be a number in [0, 1]"
            )
        self.fraction_evaluate = fraction_evaluate
        for aggregate in (train_metrics_aggr_fn, evaluate_metrics_aggr_fn):
            if aggregate is not None and not callable(aggregate):
                raise DeltaflError(
                    f"a function for metrics is {aggregate!r:.60}; write one that takes the "
                    "contents of the replies and the key of their weights, or None"
                )
        self.train_metrics_aggr_fn = train_metrics_aggr_fn
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn
        for name in settings.keys() & _ELSEWHERE:
            raise DeltaflError(f"DeltaStrategy has no {name}: {_ELSEWHERE[name]}")
        self.rules = make_rules(
            sampler,
            n,
            state_path,
            server_optimizer=server_optimizer,
            estimator=estimator,
            min_clients=min_nodes,
            host=[*signature(DeltaStrategy.__init__).parameters],
            **settings,
        )
        self.directory = Directory(self.rules)
        self.federation: Service | None = None
        #: The statistics of every round, for callers who want more than Flower's metrics.
        self.history: list[RoundInfo] = []
        self._timeout = 3600.0
        #: The model that Flower was handed last.
        self._handed = ArrayRecord()
        #: The round's messages, by client.
        self._trainings: list[tuple[str, Message]] = []
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
        Rounds are counted in all, those before a restart included.
        """
        check_whole("num_rounds", num_rounds, "at least 0", 0)
        self._timeout = check_seconds("timeout", timeout)
        if not isinstance(initial_arrays, Mapping):
            raise DeltaflError(
                f"initial_arrays is a {type(initial_arrays).__name__}; write "
                "ArrayRecord(model.state_dict()), or ArrayRecord of a list of arrays"
            )
        arrays = to_arrays(initial_arrays)
        with serving(self.rules, arrays, num_rounds, log) as federation:
            self.federation = federation
            # Once: it may be the base of a language model, and never changes.
            self._unsent = to_record(federation.unsent)
            self._settled = False
            done = federation.round
            # Rounds of an earlier start that this one does not go on from are of another run.
            self.history = [info for info in self.history if info.round < done]

            def evaluate(
                server_round: int,
                arrays: ArrayRecord,
            ) -> MetricRecord | None:
                assert evaluate_fn is not None
                # A record of its own, as what it takes out of ours would be missing in the result;
                # and Flower counts from 1 again.
                return evaluate_fn(server_round + done, ArrayRecord(dict(arrays)))

            continued: Any = self
            if done > 0:
                continued = _Continued(self, done)
            self._handed = self._whole()
            with read_apart(grid, partial(log, WARNING)):
                result = Strategy.start(
                    continued,
                    grid,
                    self._handed,
                    max(0, num_rounds - done),
                    self._timeout,
                    train_config,
                    evaluate_config,
                    evaluate_fn and evaluate,
                )
        result.arrays = self._handed
        for metrics in (
            result.train_metrics_clientapp,
            result.evaluate_metrics_clientapp,
            result.evaluate_metrics_serverapp,
        ):
            # Flower counts from 1 after each start; these are rounds in all.
            counted = {number + done: record for number, record in metrics.items()}
            metrics.clear()
            metrics.update(counted)
        return result

    def summary(self) -> None:
        """Log the settings."""
        plan = self.rules.plan
        selected = f"n = {plan.n}"
        if self.rules.fraction_train is not None:
            selected = f"fraction_train = {self.rules.fraction_train:g}"
        text = "\t├──> deltafl: sampler %s, %s, estimator %s"
        log(INFO, text, self.name, selected, plan.rule.name)
        if self.fraction_evaluate == 0:
            text = "\t├──> clients do not evaluate; FedAvg's default is fraction_evaluate=1.0"
            level = WARNING
            # The server cannot see whether their app could: only a 0 that was written is a choice.
            if self._wants_none:
                level = INFO
            log(level, text)
        log(INFO, "\t└──> weights by %s, server: %s", self.rules.weights, plan.parts)

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Select clients; a list, because the deployment's grid iterates over it twice."""
        if KEY_CLIPPING_NORM in config:
            raise DeltaflError(_FOREIGN_PRIVACY)
        federation = self._active()
        if arrays is not self._handed and dict(arrays) != dict(self._handed):
            raise DeltaflError(
                "aggregate_train returned other arrays than those of DeltaStrategy, which goes on "
                "from its own model; return what super().aggregate_train returns, and change the "
                "model by server_optimizer or average"
            )
        seconds = self.wait_for_nodes
        present = self.directory.wait(
            grid,
            seconds,
            federation.let_in,
            settle=not self._settled,
        )
        self._settled = True
        number = federation.round + 1
        # Made once, as the messages to all clients share it.
        model = to_record(federation.arrays())

        def ask(question: Question) -> Mapping[str, Any]:
            sent = self._messages(MessageType.TRAIN, question, model, config, number)
            messages = [message for _, message in sent]
            received = grid.send_and_receive(messages, timeout=self._timeout)
            return {key: report_in(reply) for key, reply in by_recipient(sent, received).items()}

        self._trainings = []
        for question in federation.begin_round(present, ask):
            sent = self._messages(MessageType.TRAIN, question, model, config, number)
            self._trainings.extend(sent)
        return [message for _, message in self._trainings]

    def aggregate_train(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round: estimate, step, the sampler's update; then save the state."""
        federation = self._active()
        metrics = MetricRecord()
        received = _replies_to(self._trainings, replies, "configure_train")
        if federation.cohort is not None:  # else the round was the census
            info = federation.end_round({key: reply_in(reply) for key, reply in received.items()})
            self.history.append(info)
            metrics = self._aggregated(self.train_metrics_aggr_fn, federation.used, received)
            # A client's metric cannot pose as a number of the round; that of a user's function can.
            for name, number in round_metrics(info).items():
                if self.train_metrics_aggr_fn is None or name not in metrics:
                    metrics[name] = number
        self._handed = self._whole()
        return self._handed, metrics

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Send the model to ``fraction_evaluate`` of the connected clients."""
        federation = self._active()
        question = Question(
            federation.judges(self.directory.nodes(), self.fraction_evaluate),
            {},
            {},
        )
        model = to_record(federation.layout.sent(federation.model()))
        number = federation.round  # of the round that was closed
        self._evaluations = self._messages(MessageType.EVALUATE, question, model, config, number)
        return [message for _, message in self._evaluations]

    def aggregate_evaluate(
        self,
        server_round: int,
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """The metrics of the clients that evaluated, aggregated; None if nobody did."""
        sent = self._evaluations
        # A subclass may let nobody evaluate in the next round.
        self._evaluations = []
        received = _replies_to(sent, replies, "configure_evaluate")
        weights = self._active().judged(
            [key for key, _ in sent],
            {key: metrics_in(reply) for key, reply in received.items()},
        )
        return self._aggregated(self.evaluate_metrics_aggr_fn, weights, received) or None

    def _whole(self) -> ArrayRecord:
        """The model to use, with the arrays that are never sent."""
        model = self._active().model()
        moved = {name: array for name, array in model.items() if name not in self._unsent}
        record = {**to_record(moved), **self._unsent}
        return ArrayRecord({name: record[name] for name in model})

    def _aggregated(
        self,
        function: Aggregate | None,
        weights: Mapping[str, float],
        received: Mapping[str, Message],
    ) -> MetricRecord:
        """The metrics of the replies of clients with these weights."""
        by = self.rules.weighted_by_key
        if function is not None and weights:
            contents = [received[key].content for key in weights]
            # FedAvg takes None for no metrics.
            metrics = function(contents, by or NUM_EXAMPLES) or MetricRecord()
            if not isinstance(metrics, MetricRecord):
                raise DeltaflError(
                    f"the function for metrics returned {metrics!r:.60}; return a MetricRecord, or "
                    "None for no metrics"
                )
            return metrics
        weighted = [(weight, metrics_in(received[key])) for key, weight in weights.items()]
        return MetricRecord(mean_metrics(weighted, by, partial(log, WARNING)))

    def _messages(
        self,
        kind: str,
        question: Question,
        model: ArrayRecord,
        config: ConfigRecord,
        number: int,
    ) -> list[tuple[str, Message]]:
        """What each client is sent: the model, the user's config with the number of the round from
        1, and what deltafl asks.
        """
        nodes = self.directory.nodes()
        group = str(number)
        ttl = self._timeout + TTL_GRACE
        # One for all: with mime a message would otherwise hold a second model.
        drift = to_record(question.drift)
        messages = []
        for key in question.keys:
            # A client in this process takes entries out of its message: only arrays are shared.
            own = ConfigRecord({**config, "server-round": number})
            content = RecordDict({MODEL: model, "config": own})
            if question.asked:
                content[RECORD] = ConfigRecord(question.asked)
            if drift:
                content[CORRECTION] = drift
            message = Message(content, nodes[key], kind, ttl=ttl, group_id=group)
            messages.append((key, message))
        return messages

    def _active(self) -> Service:
        if self.federation is None:  # a wrapper has its own ``start``
            raise DeltaflError(
                "no rounds have begun: call DeltaStrategy.start, not the start of a strategy "
                f"around it. {_FOREIGN_PRIVACY}"
            )
        return self.federation


def _replies_to(
    sent: list[tuple[str, Message]],
    replies: Iterable[Message],
    where: str,
) -> dict[str, Message]:
    """The replies to the messages of a round, by client."""
    came = list(replies)
    # Flower gives a message its id as it sends it: a subclass has sent others in the place of ours.
    if came and not any(message.metadata.message_id for _, message in sent):
        raise DeltaflError(
            f"the replies are to other messages than those of DeltaStrategy, and would count for "
            f"nobody; let {where} return what super().{where} returns, and change these messages "
            "themselves, not copies: message.content['config']['lr'] = 0.1"
        )
    return by_recipient(sent, came)


class _Continued:
    """A strategy after rounds that are done, for Flower's loop, which counts from 1 in each
    start.
    """

    def __init__(self, strategy: Strategy, done: int) -> None:
        self.strategy = strategy
        self.done = done

    def __getattr__(self, name: str) -> Any:
        step = getattr(self.strategy, name)
        if name == "summary":
            return step
        # Every other step of that loop begins with the number of the round.
        return lambda server_round, *given: step(server_round + self.done, *given)
