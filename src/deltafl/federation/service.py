"""What a server does in its rounds, whatever brings the messages: begin or resume, let clients in,
ask them, select, close, save, log.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from logging import INFO, WARNING
from typing import Any

import numpy as np

from ..errors import DeltaflError, printable
from ..model.arrays import Arrays
from ..server.privacy import DifferentialPrivacy
from ..streams import stream
from ..types import DEAREST, Cohort, RoundInfo
from .clients import ClientInfo
from .exchange import STEP_FACTOR, Question, census_question
from .federation import Federation
from .replies import ClientReply, read_answer
from .rules import Rules
from .saved import load, note_round, only_copy, save, sole_owner

#: ``logging.Logger.log``.
Log = Callable[..., None]
#: What is asked of clients together with the model -> what each reported; a text says why a client
#: failed.
Ask = Callable[[Question], Mapping[str, Any]]
#: A size so many times what it counts is named in the log.
_SUSPICIOUS = 3
#: How often a client without an answer to the census is asked.
_MOST = 3


@contextmanager
def serving(
    rules: Rules,
    arrays: Arrays,
    num_rounds: int,
    log: Log,
) -> Iterator["Service"]:
    """A federation, new or resumed, whose saved state no other server uses meanwhile."""
    with sole_owner(rules.state_path):
        service = Service(rules, arrays, log)
        kept = "memory only"
        if rules.state_path is not None:
            # Absolute: where a host starts its server is not where its user typed the path.
            kept = str(rules.state_path.absolute())
        log(INFO, "State kept in %s", kept)
        service.resume()
        if service.round >= max(1, num_rounds):
            text = (
                "All %d rounds are done: raise num_rounds above %d to go on, or name another "
                "state_path to begin anew"
            )
            log(WARNING, text, service.round, service.round)
        dp = rules.plan.part("dp")
        if isinstance(dp, DifferentialPrivacy):
            rounds = max(service.round, num_rounds)
            epsilon = dp.epsilon(rounds, rules.plan.n / rules.min_clients)
            text = "After %d rounds: epsilon = %.3g at most, with delta = %g"
            log(INFO, text, rounds, epsilon, dp.delta)
        with only_copy(rules.state_path, service.owner):
            yield service


class Service(Federation):
    """A federation that is saved after each round and logs what happens."""

    def __init__(self, rules: Rules, arrays: Arrays, log: Log) -> None:
        super().__init__(rules, arrays)
        self.log = log
        #: The cohort of the round that is open; None if the round was a census.
        self.cohort: Cohort | None = None
        #: How often a client without an answer to the census was asked for it.
        self._asked = Counter[str]()

    def resume(self) -> None:
        """Go on from the saved state, if there is one, without the clients to forget."""
        folder = self.rules.state_path
        if folder is None or not load(folder, self):
            return
        forget = set(self.rules.forget)
        unknown = forget - self.clients.keys()
        if unknown:
            names = ", ".join(sorted(unknown))
            self.log(WARNING, "forget names %s, which no saved client has", names)
        if forget > unknown:
            self.forget(forget - unknown)
            # At once: until then the last file still knows them.
            save(folder, self, anew=True)
        text = "Resuming after round %d with %d known clients"
        self.log(INFO, text, self.round, len(self.clients))

    def let_in(self, present: Mapping[str, ClientInfo]) -> dict[str, ClientInfo]:
        """Let clients join or change what they report; those of them that take part."""
        before = self.clients
        self.admit(present)
        self._log_warnings()
        if self.clients is not before:  # they come and go all the time
            self._log_joined(len(self.clients) - len(before))
        return {key: info for key, info in present.items() if key in self.clients}

    def begin_round(self, present: Collection[str], ask: Ask) -> list[Question]:
        """Take a census of those who have not answered it, draw a cohort, and say what to ask it.

        Nothing, and ``cohort`` is None, if the census itself was the round: it has brought the
        clients' first updates, and the model has moved.
        """
        number = self.round
        folder = self.rules.state_path
        self.cohort = None
        if self._take_census(present, ask) and number == 0 and folder is not None:
            save(folder, self)  # everybody has worked for it
        if self.round > number:
            text = "Round %d: the census, the model has moved by the mean of the answers"
            self.log(INFO, text, number + 1)
            return []
        self.cohort = self.open(present)
        text = "Round %d: %d of %d clients selected"
        self.log(INFO, text, number + 1, len(self.cohort.client_n), len(present))
        return self.questions(self.cohort)

    def end_round(self, received: Mapping[str, ClientReply]) -> RoundInfo:
        """Close the round with the replies by key, save the state, and log what happened."""
        assert self.cohort is not None
        keys = self.keys  # a state that is put back may have fewer
        silent = [key for key in self.keys_of(self.cohort) if key not in received]
        folder = self.rules.state_path
        info = self.close(self.cohort, received)
        if folder is not None:
            # First: a round whose line is lost would never be seen, and one that is played again
            # is written again.
            note_round(folder, info)
            save(folder, self)
        if silent:
            self.log(WARNING, "\tno reply in time: %s", _names(silent))
        for client, reason in info.rejected:
            self.log(WARNING, "\treply of %s rejected: %s", _names([keys[client]]), reason)
        self._log_sums(info)
        self._log_warnings()
        return info

    def judges(self, present: Collection[str], fraction: float) -> list[str]:
        """Who evaluates: this share of the known clients that are present, at least one."""
        keys = [key for key in self.keys if key in present]
        if fraction == 0 or not keys:
            return []
        count = max(1, int(fraction * len(keys)))
        # By the round: a server that starts again asks the same clients.
        rng = stream(self.plan.seed, "evaluation", self.round)
        return [keys[place] for place in np.sort(rng.permutation(len(keys))[:count])]

    def judged(
        self,
        asked: Collection[str],
        received: Mapping[str, Mapping[str, Any] | str],
    ) -> dict[str, float]:
        """The weights in the target of the clients that have evaluated; others are logged.

        ``received`` has the metrics of clients, or why there are none.
        """
        results = {key: received.get(key, "no reply in time") for key in asked}
        failed = [(key, fault) for key, fault in results.items() if isinstance(fault, str)]
        if failed:
            text = "\tevaluation: no result from %d of %d clients; the first is %s: %s"
            key, fault = failed[0]
            self.log(WARNING, text, len(failed), len(asked), _names([key]), printable(fault, 300))
        weights = zip(self.keys, self.plan.population.weight_m.tolist(), strict=True)
        return {
            key: weight
            for key, weight in weights
            if key in results and not isinstance(results[key], str)
        }

    def _take_census(self, present: Collection[str], ask: Ask) -> bool:
        """Ask the clients that are present and have not answered; whether anybody did.

        A client that is silent or fails is asked again in later rounds, three times in all; one
        that sends anything else is not.
        """
        census = self.plan.census
        keys = [key for key in self.unanswered() if key in present and self._asked[key] < _MOST]
        if census is None or not keys:
            return False
        for key in self._asked.keys() - self.clients.keys():
            del self._asked[key]
        length = census.length(self.layout.num_params)
        self.log(INFO, "Census: %d clients are asked for their answer", len(keys))
        asked = census_question(
            census,
            list(self.layout.trained),
            self.plan.step_factor,
        )
        reports = ask(Question(keys, asked, {}))
        answers = dict[str, tuple[float, ...]]()
        faults = dict[str, list[str]]()
        for key in keys:
            report = reports.get(key, "no reply in time")
            try:
                answers[key] = read_answer(report, length, asked.get(STEP_FACTOR))
            except DeltaflError as error:
                faults.setdefault(str(error), []).append(key)
                self._asked[key] += 1
                if not isinstance(report, str):  # asked again, it would send the same
                    self._asked[key] = _MOST
        self.answer(answers)
        for fault, silent in faults.items():
            text = "\tcensus: no answer from %d clients: %s; they count as the mean of all: %s"
            self.log(WARNING, text, len(silent), fault, _names(silent))
        self.log(INFO, "Census: %d of %d clients answered", len(answers), len(keys))
        return bool(answers)

    def _log_joined(self, num_joined: int) -> None:
        keys = self.keys
        share_m = 100 * self.plan.population.weight_m
        text = "%d clients joined, %d are known; %s counts most, %.1f %% of all"
        self.log(
            INFO,
            text,
            num_joined,
            len(keys),
            _names([keys[share_m.argmax()]]),
            share_m.max(),
        )
        self._log_claims()

    def _log_claims(self) -> None:
        """Name those who claim far more than what counts, or cost far more or less."""
        # Only ``max_ratio`` makes a client count for something else than it has reported; half of
        # all do where it is 1.
        population = self.plan.population
        size_m = population.num_examples_m
        claimed_m = np.array([info.num_examples for info in self.clients.values()])
        over = list(compress(self.clients, claimed_m > _SUSPICIOUS * size_m))
        if over:
            text = "%s reported more than %g times the %d examples that max_ratio lets them count"
            self.log(WARNING, text, _names(over), _SUSPICIOUS, size_m.max())
        if population.cost_m is None:
            return
        # Honest costs differ more than sizes do.
        counted_m = population.cost_m
        cost_m = np.array([info.cost for info in self.clients.values()], np.float64)
        is_far_m = (cost_m < counted_m / DEAREST) | (cost_m > counted_m * DEAREST)
        far = list(compress(self.clients, is_far_m))
        if far:
            text = "%s reported more than %d times the cost that max_ratio lets them have, or less"
            self.log(WARNING, text + " than 1/%d of it", _names(far), DEAREST, DEAREST)

    def _log_sums(self, info: RoundInfo) -> None:
        if info.warning is not None:
            self.log(WARNING, "\tall replies were rejected and nothing was learnt")
        text = (
            "\t%d of %d replies used; sum of weights %.3f, largest %.3f, effective sample size %.1f"
        )
        size = np.nan_to_num(info.effective_sample_size)
        weights = (info.sum_of_weights, info.largest_weight, size)
        self.log(INFO, text, info.num_responded, info.num_selected, *weights)
        if info.clip_factor < 1:
            text = "\tclipped, by factors down to %.3g: the estimate of this round is biased"
            self.log(INFO, text, info.clip_factor)

    def _log_warnings(self) -> None:
        while self.warnings:
            self.log(WARNING, "\t%s", printable(self.warnings.pop(0), 2000))


def _names(keys: Sequence[str]) -> str:
    """Clients' keys for the log, which thousands of them would fill."""
    return printable(", ".join(keys), 2000)
