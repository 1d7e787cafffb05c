"""DeltaStrategy: deltafl's samplers and weights in Flower's rounds. A translation, with no mathematics of its own."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM

from ..errors import DeltaflError
from ..samplers import make_sampler, parse_label
from ..server.optimizers import ServerOptimizer, make_server_optimizer
from ..types import Cohort, RoundInfo, Sampler
from .arrays import BUFFERS, Layout
from .checks import check_whole, texts
from .clipping import WeightedClipping
from .evaluating import Evaluating
from .federation import Federation
from .identity import check_identity, check_same_kind
from .messages import answer_of, by_request, content_of, for_client, metrics_of, to_record
from .refused import FOREIGN_PRIVACY, SECURE_AGGREGATION
from .registration import Directory
from .roster import Said
from .rules import Rules
from .saved import load, save, sole_owner
from .server_memory import ServerMemory
from .telling import tell_memory, tell_news, tell_round

#: Seconds that a message outlives its round's timeout, for replies that are under way.
TTL_GRACE = 10.0


@dataclass
class _Open:
    """A round between configure and aggregate."""

    cohort: Cohort
    messages: list[Message]


class DeltaStrategy(Strategy):
    """Client sampling of deltafl for Flower's Message API.

    The server aggregates *updates* (received minus sent) with weights from its own probabilities, whatever weights the
    clients send. A round that a client does not answer, or answers badly, is non-response; response rates are kept.

    Args:
        sampler: A label such as ``"pracdelta"`` or ``"pracdelta@pivotal@difference"``, or a sampler of your own.
        n: Clients asked a round.
        server_optimizer: A name such as ``"sgd"`` or ``"adam"``, or an optimizer.
        state_path: Folder where the state is kept after every round, and from which a restart goes on; or None.
        estimator: What a reply counts; None for the sampler's own default.
        weights: ``"data"`` for the target sum_i (n_i / N) F_i, ``"uniform"`` for the plain mean of the clients.
        seed: Seed of the draws.
        min_nodes: Clients that must be connected before a round begins; None for n.
        wait_for_nodes: Seconds to wait for them before an error.
        registration_timeout: Seconds that a new node has to say who it is.
        identity: How clients are told apart over restarts: ``"auto"``, ``"public-key"``, ``"name"`` or ``"config"``.
        buffers: Patterns of the names of floating-point arrays that are not trained.
        response_floor: Least response rate assumed of a client, in (0, 1].
        norm_guard: A factor above 1, such as 3, for ``guard.py``: bounds what one round can do, biased; None for none
            (and with noise).
        clipping: Clip weighted updates and add noise, see ``WeightedClipping``.
        sketch: Numbers of a sketch (64 is usual) if scores are to be learnt from sketches that clients send; 0 for
            norms measured on the server.
        known: Numbers that every client must tell of itself before it is asked, such as its shares of 10 labels, for
            ``balanced`` (``register(app, ..., known=...)``); 0 for none. They are the client's word.
        memory_dtype: ``"float32"`` or ``"bfloat16"``, of one update a client where the server remembers them.
        memory_path: Folder on a disk for them, with ``state_path``; None for RAM.
        evaluate: Whether all connected clients evaluate the model after every round.
        forget: Keys of clients (as the log and ``federation.json`` write them) to do without: at the start they are
            dropped from the saved state, with their weight and all that is remembered of them, and never asked.

    Raises:
        DeltaflError: If the sampler needs to know every update before the draw, or an argument is out of range.
    """

    def __init__(
        self,
        sampler: str | Sampler = "pracdelta",
        n: int = 10,
        server_optimizer: str | ServerOptimizer = "sgd",
        state_path: str | Path | None = None,
        estimator: str | None = None,
        *,
        weights: str = "data",
        seed: int = 0,
        min_nodes: int | None = None,
        wait_for_nodes: float = 600.0,
        registration_timeout: float = 120.0,
        identity: str = "auto",
        buffers: Sequence[str] = BUFFERS,
        response_floor: float = 0.1,
        norm_guard: float | None = None,
        clipping: WeightedClipping | None = None,
        sketch: int = 0,
        known: int = 0,
        memory_dtype: str = "float32",
        memory_path: str | Path | None = None,
        evaluate: bool = False,
        forget: Collection[str] = (),
    ) -> None:
        label = parse_label(sampler) if isinstance(sampler, str) else None
        self.rules = Rules(
            sampler=make_sampler(sampler) if isinstance(sampler, str) else sampler,
            n=n,
            estimator=estimator or (label.estimator if label else "horvitz-thompson"),
            server_optimizer=(
                make_server_optimizer(server_optimizer) if isinstance(server_optimizer, str) else server_optimizer
            ),
            weights=weights,
            seed=seed,
            response_floor=response_floor,
            norm_guard=norm_guard,
            clipping=clipping,
            sketch=sketch,
            known=known,
            memory=ServerMemory(memory_dtype, memory_path, None if state_path is None else Path(state_path)),
        )
        check_identity(identity)
        if min_nodes is not None:
            check_whole("min_nodes", min_nodes, "at least 1, or None for n", 1)
        self.rules.plan([1] * n, [(0.0,) * known] * n)  # refuses what is out of range before anybody is waited for
        self.name = sampler if isinstance(sampler, str) else type(sampler).__name__
        self.state_path = self.rules.memory.state_path
        self.min_nodes = n if min_nodes is None else min_nodes
        self.wait_for_nodes = wait_for_nodes
        self.buffers, self.evaluate = texts("buffers", buffers), evaluate
        self.directory = Directory(identity, registration_timeout, known, texts("forget", forget))
        self.federation: Federation | None = None
        #: What each round told, for callers who want more than the metrics.
        self.history: list[RoundInfo] = []
        self._timeout = 3600.0
        self._started = False
        self._open: _Open | None = None
        self._evaluating = Evaluating()
        self._clients_told = 0  # those of the last word on the server's memory

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
        """Run rounds until ``num_rounds`` are done, those before a restart included. Arguments as in ``Strategy``.

        ``timeout`` also bounds how long a train message lives: a node that is late does not begin old work.
        """
        with sole_owner(self.state_path):
            done = self._begin(initial_arrays)
            self._timeout, self._started = float(timeout), True
            try:
                result = super().start(
                    grid,
                    to_record(self._known().arrays()),
                    max(0, num_rounds - done),
                    timeout,
                    train_config,
                    evaluate_config,
                    evaluate_fn and (lambda server_round, arrays: evaluate_fn(server_round + done, arrays)),
                )
            finally:
                self._started = False
        result.arrays = to_record(self._known().arrays())
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            metrics: dict[int, MetricRecord] = getattr(result, name)
            setattr(result, name, {server_round + done: record for server_round, record in metrics.items()})
        return result

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "\t├──> deltafl: sampler %s, n = %d, estimator %s", self.name, self.rules.n, self.rules.estimator)
        log(INFO, "\t├──> weights by %s, server optimizer %s", self.rules.weights, self.rules.server_optimizer)
        log(INFO, "\t└──> state kept in %s", self.state_path or "memory only")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Decide who is asked; a list, for the deployment's grid reads it twice."""
        if not self._started or KEY_CLIPPING_NORM in config:
            raise DeltaflError(FOREIGN_PRIVACY)
        federation = self._known()
        first = self._open is None
        present = self.directory.wait(grid, self.min_nodes, self.wait_for_nodes, settle=first, admit=self._admit)
        self._clients_told = tell_memory(self.name, federation, self._clients_told)
        cohort = federation.open(present)
        content = content_of(federation, config)
        nodes = self.directory.nodes()
        messages = [
            Message(
                for_client(content, federation.expected(client)),
                nodes[federation.roster.keys[client]],
                MessageType.TRAIN,
                ttl=self._timeout + TTL_GRACE,
                group_id=str(federation.current.round + 1),
            )
            for client in cohort.client_n.tolist()
        ]
        log(INFO, "Round %d: %d of %d clients asked", federation.current.round + 1, len(messages), len(present))
        self._open = _Open(cohort, messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Close the round: the estimate, the step, what the sampler learns; then keep the state."""
        if self._open is None:
            raise DeltaflError("aggregate_train was called before configure_train")
        federation, opened = self._known(), self._open
        by_message = by_request(opened.messages, replies)
        answers = {
            client: answer_of(by_message[message.metadata.message_id])
            for client, message in zip(opened.cohort.client_n.tolist(), opened.messages, strict=True)
            if message.metadata.message_id in by_message
        }
        info = federation.close(opened.cohort, answers)
        self.history.append(info)
        self._open = _Open(opened.cohort, [])
        if self.state_path is not None:
            save(self.state_path, federation)
        silent = [client for client in opened.cohort.client_n.tolist() if client not in answers]
        tell_round(info, federation.roster.keys, silent)
        tell_news(federation.news)
        return to_record(federation.arrays()), MetricRecord(metrics_of(info))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all connected clients to evaluate, if the strategy is told to."""
        nodes = self.directory.nodes() if self.evaluate else {}
        return self._evaluating.ask(self._known(), config, nodes, self._timeout + TTL_GRACE)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The mean of the clients' metrics, by their weights in the target, over those that answered."""
        return self._evaluating.mean(self._known(), replies)

    def initialize_parameters(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Part of Flower's legacy API, which SecAgg+ needs: refused."""
        raise DeltaflError(SECURE_AGGREGATION)

    def configure_fit(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Part of Flower's legacy API, which SecAgg+ needs: refused."""
        raise DeltaflError(SECURE_AGGREGATION)

    def _begin(self, initial_arrays: ArrayRecord) -> int:
        """The model and, if there is one, the saved state; returns the rounds done."""
        arrays = {name: array.numpy() for name, array in initial_arrays.items()}
        self.federation = Federation(self.rules, arrays, Layout.of(arrays, self.buffers))
        self._open, self._clients_told = None, 0
        if self.state_path is None or not load(self.state_path, self.federation):
            return 0
        self.federation.forget(self.directory.to_forget(self.federation.roster.keys))
        done = self.federation.current.round
        log(INFO, "Going on after round %d with %d known clients", done, len(self.federation.roster.keys))
        return done

    def _admit(self, present: dict[str, Said]) -> dict[str, Said]:
        """Let those who are connected join; returns those who can be asked."""
        federation = self._known()
        if self._open is None:
            check_same_kind(federation.roster.keys, present)
            self.directory.tell_unknown()
        before = len(federation.roster.keys)
        federation.admit(present)
        tell_news(federation.news)
        after = len(federation.roster.keys)
        if after > before:
            log(INFO, "%d clients joined, %d are known", after - before, after)
        return {key: said for key, said in present.items() if key in federation.roster.place}

    def _known(self) -> Federation:
        if self.federation is None:
            raise DeltaflError(FOREIGN_PRIVACY)
        return self.federation
