"""The records of many runs in one file: ``runs/PART.jsonl.gz`` has one a line; a loose record wins
over a packed one.
"""

import gzip
import json
from functools import lru_cache
from pathlib import Path

from deltafl.errors import DeltaflError
from deltafl.simulation import Job, RunRecord, RunStore, read_record, record_line
from deltafl.store import checked, write_atomically


class PackedRuns(RunStore):
    """The records of the finished runs in a folder, loose and packed."""

    def record(self, job: Job) -> RunRecord | None:
        return super().record(job) or _packed(self._file(job.part)).get(job.key)

    def records(self, part: str) -> list[RunRecord]:
        """The records of a part, in the order of their files' names."""
        loose = [read_record(path) for path in self._loose(part)]
        found = _packed(self._file(part)) | {record.key: record for record in loose}
        return [record for _, record in sorted(found.items())]

    def pack(self, part: str) -> None:
        """Move the loose records of a part into its packed file; the same records give the same
        bytes.
        """
        with self.lock():
            loose = self._loose(part)
            if not loose:
                return
            lines = "".join(map(record_line, self.records(part)))
            write_atomically(self._file(part), gzip.compress(lines.encode(), mtime=0))
            for path in loose:
                path.unlink()
            loose[0].parent.rmdir()

    def _loose(self, part: str) -> list[Path]:
        return list((self.folder / "runs" / part).glob("*.json"))

    def _file(self, part: str) -> Path:
        return self.folder / "runs" / f"{part}.jsonl.gz"


def _packed(path: Path) -> dict[str, RunRecord]:
    """The records of a packed file by their keys; none if there is no file."""
    if not path.exists():
        return {}
    status = path.stat()
    return _lines_of(path, (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=16)
def _lines_of(path: Path, stamp: tuple[int, int]) -> dict[str, RunRecord]:
    """The content of a packed file; ``stamp`` changes with the file."""
    cure = "restore it, or delete it to run again"
    try:
        values = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise DeltaflError(f"{path} cannot be read: {error}; {cure}") from None
    where = f"{path} does not hold records of runs"
    found = [checked(RunRecord, value, where, cure) for value in values]
    return {record.key: record for record in found}
