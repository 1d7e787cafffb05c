"""What is checked and noted before the runs of a comparison or a tuning are played."""

from pathlib import Path

from ..errors import DeltaflError
from .directory import RunDirectory, recorded_settings, write_header, write_settings
from .own_code import note_code, with_objects
from .settings import AnySettings, CompareSettings, Settings, make_settings


def recorded_before(settings: AnySettings, out: Path) -> AnySettings | None:
    """What was begun in a folder; None if nothing was."""
    recorded = recorded_settings(out)
    if recorded is None:
        return None
    return make_settings(type(settings), with_objects(recorded, settings))


def note_settings(
    out: Path, settings: Settings, before: Settings | None, data: dict[str, str]
) -> None:
    """Write what a folder begins with, or goes on with."""
    if before is None:
        write_header(out, settings, data)
    elif before != settings:
        write_settings(out, settings)
        note_code(out, settings)


def check_comparison(
    settings: CompareSettings, out: Path, before: CompareSettings | None
) -> dict[str, str]:
    """Refuse what cannot be played before anything is written; returns the names of the data."""
    # loads torch, which the process that waits for the check does without
    from .setup import check_memory, data_of, engine_for, plan_of, require_same_sampler, task_of

    first, *others = settings.seeds
    run = settings.run(settings.samplers[0], first)
    engine = engine_for(run, out)
    task = engine.task
    data = data_of(run, task)
    if before is not None:
        RunDirectory(out).require_same_data(data)
    for sampler in settings.samplers:
        run = settings.run(sampler, first)
        check_memory(run, engine, out)
        plan_of(run, task.population(settings.weights), task)
        if before is not None and sampler in before.samplers:
            require_same_sampler(before.run(sampler, first), run, task)
    for seed in others if settings.clients is None else ():
        clients = task_of(settings.run(settings.samplers[0], seed)).num_clients
        if clients != task.num_clients:
            raise DeltaflError(
                f"{task.name} has {task.num_clients} clients with seed {first} and {clients} with "
                f"seed {seed}; make as many with every seed, or leave this seed out"
            )
    return data
