"""The callbacks that write the run's folder: the lines of a round, and checkpoints."""

from ...analysis.statistics import late_after
from ...scale.named_arrays import bytes_in_ram
from ..folder.record import note_clients
from .callback import Callback, LiveRun, PlayedRound


class Recording(Callback):
    """Writes the lines of every round, and each client's metric with the last models."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        if not run.group.is_first:
            return
        task = run.engine.task
        since = late_after(run.rounds) + 1
        if {"stopped", "diverged"} & round.line.keys():
            since = round.number  # the run ends here, so its last model alone counts
        # Written before the line: a round that is played again is noted again.
        if "test" in round.line and round.number >= since:
            note_clients(
                run.directory.path,
                run.plan.population.num_examples_m,
                round.number,
                task.metrics[0].name,
                round.judged.by_client(),
                since,
                task.client_names,
                task.client_strata,
            )
        round.timing["server_bytes"] = bytes_in_ram(run.state)
        round.timing["evaluation_seconds"] = round.closed.read()["seconds"]
        run.directory.append(round.line, {"round": round.number, **round.timing})


class Checkpoints(Callback):
    """Keeps the state every ``checkpoint_every`` rounds and after the last.

    A state never becomes a checkpoint while the model looks wrong, not even the last one: then the
    run keeps its last good checkpoint, and the suspect model beside it; of one that is lost, the
    checkpoint alone.
    """

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        is_due = round.is_last or round.number % run.settings.checkpoint_every == 0
        if "diverged" in round.line or not is_due:
            return
        if run.watch.suspect is None:
            run.kept = round.number
            if run.group.is_first:
                run.state = run.directory.save(run.state, round.is_last)
        elif round.is_last and run.group.is_first:
            run.directory.save_suspect(run.state)
