"""The callbacks that judge the model: its evaluation on the test set, and the goal that ends a
run.
"""

from .callback import Callback, LiveRun, PlayedRound


class Evaluation(Callback):
    """Every ``evaluate_every`` rounds, after the last, and where the round looks like a
    divergence.
    """

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        is_due = round.number % run.settings.evaluate_every == 0
        if is_due or round.is_last or run.watch.wants_evaluation(round.info):
            run.evaluate(round)


class Threshold(Callback):
    """With ``stop_at_threshold``, a run that reaches the threshold is over."""

    def after_round(self, run: LiveRun, round: PlayedRound) -> None:
        goal = run.settings.threshold
        if goal is None or not run.settings.stop_at_threshold or "test" not in round.line:
            return
        test = round.line["test"]
        if run.engine.task.metric == "accuracy":
            reached = test["accuracy"] >= goal
        else:
            reached = test["loss"] <= goal
        if reached:
            round.line["stopped"] = goal
            # What follows treats it as the last: a checkpoint is due.
            round.is_last = True
