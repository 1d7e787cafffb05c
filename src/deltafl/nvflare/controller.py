"""DeltaFedAvg: deltafl's samplers and weights in NVFlare's rounds. A translation, with no
mathematics of its own.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from functools import partial
from inspect import signature
from logging import INFO, WARNING
from math import ceil
from typing import Any, Literal

import numpy as np
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController
from nvflare.fuel.f3.cellnet import cell as cells
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.fuel.utils.memory_utils import cleanup_memory

from ..errors import DeltaflError, counted, printable
from ..federation import replies
from ..federation.clients import ClientInfo
from ..federation.exchange import RECORD, Question
from ..federation.registration import NO_REGISTRATION, read_info
from ..federation.replies import ClientReply, mean_metrics, named, round_metrics
from ..federation.rules import check_seconds, check_whole, make_rules
from ..federation.service import Service, serving
from ..model.arrays import Arrays, as_array
from ..samplers.base import Sampler
from ..server.optimizers import ServerOptimizer
from ..server.table import SETTINGS
from ..types import RoundInfo
from .client import DRIFT, ROUND, trained_array

#: How often a client that does not register is asked.
_MOST = 3


class UnreadError(BaseException):
    """A result could not be read. No ``Exception``: at one NVFlare ends the server's program."""


@contextmanager
def read_apart(warn: Callable[[str], None]) -> Iterator[None]:
    """Let a result of which NVFlare can make no message be one that has not come: what a site has
    sent would end the job, and again at each new start.
    """
    read = cells.decode_payload

    def read_or_drop(message: Any, *given: Any, **more: Any) -> None:
        try:
            read(message, *given, **more)
        except Exception as error:
            if message.get_header(StreamHeaderKey.TOPIC) != ServerCommandNames.SUBMIT_UPDATE:
                raise
            reason = printable(f"{type(error).__name__}: {error}")
            warn(f"a reply that is no message counts as silence ({reason})")
            raise UnreadError from None

    cells.decode_payload = read_or_drop
    try:
        yield
    finally:
        cells.decode_payload = read


class DeltaFedAvg(ModelController):  # type: ignore[misc]
    """Client sampling of deltafl as a controller of NVFlare.

    The server aggregates *updates* (received minus sent) with weights from its own probabilities,
    whatever weights the clients send. A missing or faulty reply is non-response; the server keeps
    each client's response rate. A client is known by its name, for which NVFlare's certificates
    vouch. Scripts of clients use ``DeltaClient``.

    NVFlare writes all arguments into the job's configuration, the seed too: leave it out where who
    is next must stay a secret.

    Args:
        sampler: A label, such as ``deltafl recommend`` prints. The default keeps one update
            of each client at the server: as many models as there are clients.
        n: Clients selected per round; None for 10, or for what ``fraction_train`` says.
        num_rounds: Rounds in all, those before a restart included.
        server_optimizer: A name such as ``"sgd"`` or ``"adam"``, or an optimizer.
        state_path: Folder where the state is saved after every round and from which a new job
            resumes; or None. Not in the job's workspace, which a new job does not see.
        min_clients: Clients that must have registered before a round begins; None for n, and for 2
            with ``fraction_train``.
        timeout: Seconds that a round waits for replies.
        persistor_id: The component that loads the initial model and saves the global one, such as
            ``PTModel`` adds.
        settings: What all hosts share, by name: ``estimator``, ``weights``, ``seed``,
            ``fraction_train``, ``weighted_by_key``, ``buffers``, ``local``, ``trainable``,
            ``tied``, ``forget`` (names of clients), ``aux``, ``average``, ``mime``, ``clip``,
            ``dp``, ...; docs/how-to/flower-settings.md lists them.

    Raises:
        DeltaflError: If the sampler needs every update before the draw, or an argument is unknown
            or out of range.
    """

    def __init__(
        self,
        sampler: str | Sampler = "innovation@local-pivotal",
        n: int | Literal["auto"] | None = None,
        num_rounds: int = 5,
        server_optimizer: str | ServerOptimizer = "sgd",
        state_path: str | None = None,
        *,
        min_clients: int | None = None,
        timeout: float = 3600.0,
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
        **settings: Any,
    ) -> None:
        settings |= settings.pop("settings", {})  # so they stand in the configuration of a job
        arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        # A client that fails is non-response, as weights allow for; NVFlare would end the job.
        super().__init__(persistor_id=persistor_id, ignore_result_error=True)
        # NVFlare writes the configuration from attributes with the names of arguments.
        self.__dict__.update(arguments)
        check_whole("num_rounds", num_rounds, "at least 1", 1)
        check_seconds("timeout", timeout)  # 0 would be for ever
        if "identity" in settings:
            raise DeltaflError(
                "identity is always 'name' in NVFlare, whose certificates vouch for it; leave it "
                "out"
            )
        self.settings = {name: as_plain(value) for name, value in settings.items()}
        self.rules = make_rules(
            sampler,
            n,
            state_path,
            server_optimizer=server_optimizer,
            min_clients=min_clients,
            identity="name",
            host=[*signature(DeltaFedAvg.__init__).parameters],
            **{name: as_object(name, value) for name, value in settings.items()},
        )
        self.federation: Service | None = None
        #: The statistics of every round.
        self.history: list[RoundInfo] = []
        #: Of every round the means of the clients' metrics, and its own numbers.
        self.metrics: list[dict[str, Any]] = []
        self._registered: dict[str, ClientInfo] = {}
        self._asked = Counter[str]()

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """Add this controller to a job; sites have deltafl installed, so that its source is not
        part of the job.
        """
        job.set_app_packages([*job.job.app_packages, "deltafl"])
        super().add_to_fed_job(job, ctx, **kwargs)

    def run(self) -> None:
        """Run rounds until ``num_rounds`` are done; NVFlare calls this."""
        params = self.load_model().params
        if not params:
            raise DeltaflError(
                "the job has no initial model; add one, job.to_server(PTModel(model))"
            )
        arrays = {name: as_array(value) for name, value in params.items()}
        log = self.logger.log
        with (
            read_apart(partial(log, WARNING)),
            serving(self.rules, arrays, self.num_rounds, log) as federation,
        ):
            self.federation = federation
            if federation.round >= self.num_rounds:
                self._hand_on(federation)  # a persistor of this job has the initial model
            while federation.round < self.num_rounds and self._play(federation):
                pass

    def _play(self, federation: Service) -> bool:
        """One round; False if the job is being stopped, which is nobody's non-response."""
        registered = self._present()
        if self.abort_signal.triggered:
            return False
        present = federation.let_in(registered)
        if len(present) < self.rules.min_clients:
            raise DeltaflError(
                f"{counted(len(present), 'client has', 'clients have')} registered, "
                f"{self.rules.min_clients} are needed; "
                "raise registration_timeout, lower min_clients, or use DeltaClient in scripts"
            )
        number = federation.round
        model = federation.arrays()

        def ask(question: Question) -> dict[str, Any]:
            answers = self._send([question], number, model).items()
            return {key: reported(answer) for key, answer in answers}

        questions = federation.begin_round(present, ask)
        if federation.cohort is not None:  # else the round was the census
            self.fl_ctx.set_prop(
                AppConstants.CURRENT_ROUND,
                number,
                private=True,
                sticky=False,
            )
            self.event(AppEventType.ROUND_STARTED)
            received = self._send(questions, number, model)
            if self.abort_signal.triggered:
                return False
            info = federation.end_round(
                {key: read_reply(reply, model, number) for key, reply in received.items()}
            )
            self.history.append(info)
            means = mean_metrics(
                [(weight, received[key].metrics) for key, weight in federation.used.items()],
                self.rules.weighted_by_key,
                partial(self.logger.log, WARNING),
            )
            self.metrics.append({**means, **round_metrics(info)})
            self.logger.log(INFO, "\tmetrics: %s", printable(self.metrics[-1], 1000))
            self.event(AppEventType.ROUND_DONE)
        self._hand_on(federation)
        # NVFlare's messages are in cycles, and as large as a site likes: Python may leave them for
        # ten rounds.
        cleanup_memory()
        return True

    def _hand_on(self, federation: Service) -> None:
        """Save the model after the round that was closed last, by the persistor."""
        number = federation.round - 1
        self.save_model(
            FLModel(
                params=federation.model(),
                current_round=number,
                total_rounds=self.num_rounds,
            )
        )

    def _present(self) -> dict[str, ClientInfo]:
        """What the connected clients reported of their data.

        Who has not yet is asked, again while too few have.
        """
        known = self._registered
        while True:
            names = {client.name for client in self.engine.get_clients()} - set(self.rules.forget)
            asked = sorted(name for name in names - known.keys() if self._asked[name] < _MOST)
            received = self._send([Question(asked, self.rules.registration, {})])
            for name in asked:
                try:
                    if name not in received:
                        raise DeltaflError(NO_REGISTRATION)
                    known[name] = read_info(reported(received[name]), self.rules)
                except DeltaflError as error:
                    self._asked[name] += 1
                    text = "%s did not register: %s"
                    self.logger.log(WARNING, text, printable(name), error)
            present = {name: known[name] for name in sorted(names & known.keys())}
            if len(present) >= self.rules.min_clients or not asked or self.abort_signal.triggered:
                return present

    def _send(
        self,
        questions: Sequence[Question],
        number: int | None = None,
        model: Arrays | None = None,
    ) -> dict[str, FLModel]:
        """Ask clients, with the model of a round or without one; the replies in time, by name."""
        received = dict[str, FLModel]()
        seconds = self.rules.registration_timeout if model is None else self.timeout

        def take(reply: FLModel) -> None:
            received[reply.meta["client_name"]] = reply

        for question in questions:
            asked = {**question.asked, ROUND: number}
            if question.drift:
                asked[DRIFT] = question.drift
            if question.keys:  # none would be everybody for NVFlare
                task = FLModel(
                    params=model,
                    metrics={} if model is None else None,  # NVFlare wants one of them
                    current_round=number,
                    total_rounds=self.num_rounds,
                    meta={RECORD: asked},
                )
                # Rounded up, as 0 seconds would be for ever.
                self.send_model(
                    data=task,
                    targets=question.keys,
                    timeout=ceil(seconds),
                    callback=take,
                )
        # NVFlare hands replies over in threads of its own: ``send_model`` does not wait.
        while self.get_num_standing_tasks() and not self.abort_signal.triggered:
            time.sleep(0.1)
        # A copy: what comes in late must not appear in a round that is being closed.
        return dict(received)


def as_plain(value: Any) -> Any:
    """A setting as JSON can hold it: an object such as ``DifferentialPrivacy`` as its fields."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_object(name: str, value: Any) -> Any:
    """A setting that ``as_plain`` may have changed."""
    return SETTINGS[name].values(**value) if isinstance(value, dict) else value


def reported(reply: FLModel) -> Mapping[str, Any]:
    """What a client reported beside its model; nothing where that is no mapping."""
    return named(named(reply.meta).get(RECORD))


def read_reply(reply: FLModel, sent: Arrays, number: int) -> ClientReply:
    """A client's reply to the model of a round, which may hold anything."""
    report = reported(reply)
    of = report.get(ROUND)
    # A reply to an earlier round, or from a script without ``DeltaClient``.
    if type(of) is not int or of != number:
        return ClientReply(
            fault=f"the reply is to round {printable(of, 60)}; use DeltaClient in its script"
        )
    params = reply.params
    if not isinstance(params, dict | None):
        return ClientReply(fault=f"the reply's params are a {type(params).__name__}, not a dict")
    readers = {name: partial(_read, reply, name, sent) for name in params or {}}
    return replies.read_reply(readers, reply.metrics, report)


def _read(reply: FLModel, name: Any, sent: Arrays) -> Any:
    if name not in sent:
        return reply.params[name]  # nobody reads it: it counts by its name alone
    shape = tuple(np.shape(reply.params[name]))
    expected = sent[name].shape
    # Before it is read: a sparse tensor, or a view of one number, may have any size. Beside a code
    # arrays are empty.
    if shape not in (expected, (0,)):
        raise DeltaflError(f"array {name!r} has shape {shape}, expected {expected}")
    return trained_array(reply, name, sent)
