"""DeltaFedAvg: deltafl's samplers and weights in NVFlare's rounds. A translation, with no
mathematics of its own.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from logging import WARNING
from math import ceil
from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from ..arrays import BUFFERS, Arrays, as_array
from ..errors import DeltaflError
from ..federation.clients import ClientInfo, read_info
from ..federation.federation import Federation
from ..federation.local_work import Correction, question
from ..federation.replies import ClientReply, census_answer, reply_of
from ..federation.rules import check_seconds, check_texts, check_whole, make_rules
from ..federation.saved import sole_owner
from ..federation.service import admit, begin, close, log_privacy, select
from ..samplers.base import Sampler
from ..samplers.census import Census
from ..server.optimizers import ServerOptimizer
from ..server.table import SETTINGS
from ..types import RoundInfo
from .client import (
    AUX,
    CENSUS,
    CORRECTED,
    CORRECTION,
    NUM_EXAMPLES,
    RECORD,
    REGISTER,
    ROUND,
    STEP_FACTOR,
    TRAINED,
    trained,
)

#: How often a client that does not register is asked.
_MOST = 3


class DeltaFedAvg(ModelController):  # type: ignore[misc]
    """Client sampling of deltafl as a controller of NVFlare.

    The server aggregates *updates* (received minus sent) with weights from its own probabilities,
    whatever weights the clients send. A missing or faulty reply is non-response; the server keeps
    each client's response rate. A client is known by its name, for which NVFlare's certificates
    vouch. Scripts of clients use ``DeltaClient``.

    NVFlare writes all arguments into the job's configuration, the seed too: leave it out where who
    is next must stay a secret.

    Args:
        sampler: A label, such as what ``deltafl.recommend`` answers. The default keeps one update
            of each client at the server: as many models as there are clients.
        n: Clients selected per round.
        num_rounds: Rounds in all, those before a restart included.
        server_optimizer: A name such as ``"sgd"`` or ``"adam"``, or an optimizer.
        state_path: Folder where the state is saved after every round and from which a new job
            resumes; or None. Not in the job's workspace, which a new job does not see.
        min_clients: Clients that must have registered before a round begins; None for n.
        timeout: Seconds that a round waits for replies.
        registration_timeout: Seconds that clients have to register.
        buffers: Name patterns of floating-point arrays that are not trained.
        forget: Names of clients to drop from the saved state, and never to select again.
        persistor_id: The component that loads the initial model and saves the global one, such as
            ``PTModel`` adds.
        settings: What all hosts share, by name: ``estimator``, ``weights``, ``seed``, ``aux``,
            ``average``, ``mime``, ``clip``, ``dp``, ...; docs/flower-operation.md lists them.

    Raises:
        DeltaflError: If the sampler needs every update before the draw, or an argument is unknown
            or out of range.
    """

    def __init__(
        self,
        sampler: str | Sampler = "innovation@local-pivotal",
        n: int = 10,
        num_rounds: int = 5,
        server_optimizer: str | ServerOptimizer = "sgd",
        state_path: str | None = None,
        *,
        min_clients: int | None = None,
        timeout: float = 3600.0,
        registration_timeout: float = 120.0,
        buffers: Sequence[str] = BUFFERS,
        forget: Collection[str] = (),
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
        **settings: Any,
    ) -> None:
        settings |= settings.pop("settings", {})  # so they stand in the configuration of a job
        arguments = {
            name: value for name, value in locals().items() if name not in ("self", "__class__")
        }
        super().__init__(persistor_id=persistor_id, ignore_result_error=True)
        # NVFlare writes the configuration from attributes with the names of arguments.
        self.__dict__.update(arguments)
        check_whole("num_rounds", num_rounds, "at least 1", 1)
        check_seconds("timeout", timeout)  # 0 would be for ever
        check_seconds("registration_timeout", registration_timeout)
        self.buffers = list(check_texts("buffers", buffers))
        self.forget = list(check_texts("forget", forget))
        self.settings = {name: as_plain(value) for name, value in settings.items()}
        self.rules = make_rules(
            sampler,
            n,
            state_path,
            server_optimizer=server_optimizer,
            min_clients=min_clients,
            identity="name",
            **{name: as_object(name, value) for name, value in settings.items()},
        )
        self.federation: Federation | None = None
        #: The statistics of every round.
        self.history: list[RoundInfo] = []
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
        log = self.logger.log
        with sole_owner(self.rules.state_path):
            arrays = {name: as_array(value) for name, value in params.items()}
            federation = begin(self.rules, arrays, self.buffers, self.forget, log)
            self.federation = federation
            log_privacy(self.rules, self.num_rounds, log)
            if federation.round >= self.num_rounds:
                self._hand_on(federation)  # a persistor of this job has the initial model
            while federation.round < self.num_rounds and self._play(federation):
                pass

    def _play(self, federation: Federation) -> bool:
        """One round; False if the job is being stopped, which is nobody's non-response."""
        log = self.logger.log
        registered = self._present(federation)
        if self.abort_signal.triggered:
            return False
        present = admit(federation, registered, log)
        if len(present) < self.rules.min_clients:
            raise DeltaflError(
                f"{len(present)} clients have registered, {self.rules.min_clients} are needed; "
                "raise registration_timeout, lower min_clients, or use DeltaClient in scripts"
            )

        def ask(keys: list[str], census: Census) -> dict[str, Any]:
            factor = federation.step_factor
            asked = correction_of(Correction(step_factor=factor))
            asked[CENSUS] = question(census)
            asked[TRAINED] = list(federation.layout.trained)
            answers = dict[str, Any]()
            for key, reply in self._send(federation, [(asked, keys)], federation.arrays()).items():
                own = reported(reply)
                answers[key] = census_answer(own.get(CENSUS), own.get(CORRECTED), factor)
            return answers

        number = federation.current.round
        cohort = select(federation, present, ask, log)
        if cohort is None:  # the round was the census
            self._hand_on(federation)
            return True
        self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, number, private=True, sticky=False)
        self.event(AppEventType.ROUND_STARTED)
        sent = federation.arrays()
        keys = federation.keys
        clients = {keys[client]: client for client in cohort.client_n.tolist()}
        # One message for all with the same correction, as with mime and without any.
        questions = dict[int, tuple[dict[str, Any], list[str]]]()
        for key, correction in zip(clients, federation.corrections(cohort), strict=True):
            asked = correction_of(correction) | {ROUND: number}
            _, names = questions.setdefault(id(correction), (asked, []))
            names.append(key)
        replies = self._send(federation, list(questions.values()), federation.arrays())
        if self.abort_signal.triggered:
            return False
        received = {clients[key]: read_reply(reply, sent, number) for key, reply in replies.items()}
        self.history.append(close(federation, cohort, received, log))
        self._hand_on(federation)
        self.event(AppEventType.ROUND_DONE)
        return True

    def _hand_on(self, federation: Federation) -> None:
        """Save the model after the round that was closed last, by the persistor."""
        number = federation.current.round - 1
        self.save_model(
            FLModel(params=federation.model(), current_round=number, total_rounds=self.num_rounds)
        )

    def _present(self, federation: Federation) -> dict[str, ClientInfo]:
        """What the connected clients reported of their data.

        Who has not yet is asked, again while too few have.
        """
        known = self._registered
        aux = self.rules.aux
        while True:
            names = {client.name for client in self.engine.get_clients()} - set(self.forget)
            asked = sorted(name for name in names - known.keys() if self._asked[name] < _MOST)
            seconds = self.registration_timeout
            replies = self._send(federation, [({REGISTER: aux}, asked)], timeout=seconds)
            for name in asked:
                try:
                    if name not in replies:
                        raise DeltaflError("no answer to the registration query in time")
                    answer = reported(replies[name])
                    known[name] = read_info(answer.get(NUM_EXAMPLES), answer.get(AUX), aux)
                except DeltaflError as error:
                    self._asked[name] += 1
                    self.logger.log(WARNING, "%s did not register: %s", name, error)
            present = {name: known[name] for name in sorted(names & known.keys())}
            if len(present) >= self.rules.min_clients or not asked or self.abort_signal.triggered:
                return present

    def _send(
        self,
        federation: Federation,
        questions: Sequence[tuple[Mapping[str, Any], Sequence[str]]],
        params: Arrays | None = None,
        timeout: float | None = None,
    ) -> dict[str, FLModel]:
        """Send clients their questions, with a model or without; the replies in time, by name."""
        replies = dict[str, FLModel]()
        seconds = ceil(timeout or self.timeout)

        def take(reply: FLModel) -> None:
            replies[reply.meta["client_name"]] = reply

        for asked, names in questions:
            if names:  # none would be everybody for NVFlare
                task = FLModel(
                    params=params,
                    metrics={} if params is None else None,  # NVFlare wants one of them
                    current_round=federation.round,
                    total_rounds=self.num_rounds,
                    meta={RECORD: dict(asked)},
                )
                self.send_model(data=task, targets=list(names), timeout=seconds, callback=take)
        while self.get_num_standing_tasks() and not self.abort_signal.triggered:
            time.sleep(0.1)
        return dict(replies)


def as_plain(value: Any) -> Any:
    """A setting as JSON can hold it: an object such as ``DifferentialPrivacy`` as its fields."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_object(name: str, value: Any) -> Any:
    """A setting that ``as_plain`` may have changed."""
    return SETTINGS[name].values(**value) if isinstance(value, dict) else value


def reported(reply: FLModel) -> Mapping[str, Any]:
    """What a client reported beside its model; nothing where that is no mapping."""
    answer = reply.meta.get(RECORD)
    if isinstance(answer, dict):
        return answer
    return {}


def correction_of(correction: Correction) -> dict[str, Any]:
    """What a client is sent to correct its local steps; nothing for one that is not to."""
    if not correction and correction.step_factor == 1:
        return {}
    return {CORRECTION: dict(correction), STEP_FACTOR: correction.step_factor}


def read_reply(reply: FLModel, sent: Arrays, number: int) -> ClientReply:
    """A client's reply to the model of a round, which may hold anything."""
    own = reported(reply)
    if own.get(ROUND) != number:
        return ClientReply(
            fault=f"the reply is to round {own.get(ROUND)}; use DeltaClient in the client's script"
        )
    try:
        arrays = trained(reply, list(reply.params or {}), sent)
    except Exception as error:  # whatever a client's arrays can make NumPy raise
        return ClientReply(fault=f"the reply's arrays cannot be read ({type(error).__name__})")
    return reply_of(arrays, reply.metrics or {}, confirmed=own.get(CORRECTED))
