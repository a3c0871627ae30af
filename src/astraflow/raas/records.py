"""Records: what a trajectory said, for people. JSON files in the run directory, the newest `keep` of them; never sent to a trainer."""

from __future__ import annotations

import json
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from astraflow.protocol.codec import array
from astraflow.protocol.errors import UnknownName
from astraflow.protocol.rollout import Segment

log = logging.getLogger(__name__)

SUFFIX = ".json"


def record_ref(instance_id: str, lease_id: str, attempt: int, index: int) -> str:
    """File name of a trajectory's record, without its suffix. `~` stands between the parts."""
    return "~".join(re.sub(r"[^A-Za-z0-9._-]", "_", str(part)) for part in (instance_id, lease_id, attempt, index))


def spans(segment: Segment, decode: Callable[[str, Sequence[int]], str]) -> list[dict[str, Any]]:
    """A segment's tokens as runs of one policy and version: `{policy, version, tokens: [text], logprobs: [nats]}`, and what no policy
    sampled in between as `{text}`. `decode(policy, ids)` is the text of ids."""
    ids, mask = array(segment.input_ids), array(segment.loss_mask)
    versions, logprobs = array(segment.versions), array(segment.logprobs)
    owner = array(segment.policy_of_token) if segment.policy_of_token is not None else np.zeros(len(ids), np.uint8)
    key = np.where(mask == 1, versions.astype(np.int64) * 256 + owner, -1)
    edges = [0, *(np.flatnonzero(np.diff(key)) + 1).tolist(), len(ids)]
    out: list[dict[str, Any]] = []
    for start, end in pairwise(edges):
        policy, run = segment.policies[int(owner[start])], ids[start:end].tolist()
        if key[start] < 0:
            out.append({"text": decode(policy, run), "n": end - start})
            continue
        tokens, values = [decode(policy, [token]) for token in run], [round(float(value), 4) for value in logprobs[start:end]]
        out.append({"policy": policy, "version": int(versions[start]), "tokens": tokens, "logprobs": values})
    return out


class Records:
    """Called from threads; `save` and `load` do I/O."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Files of an earlier life of this instance count against `keep`."""
        self.directory, self.keep = directory, keep
        self._lock = threading.Lock()
        self._kept: deque[str] = deque()
        self.failures = 0
        if keep:
            directory.mkdir(parents=True, exist_ok=True)
            found = sorted(directory.glob("*" + SUFFIX), key=lambda path: path.stat().st_mtime_ns)
            self._kept.extend(path.name.removesuffix(SUFFIX) for path in found)

    def save(self, records: dict[str, dict[str, Any]]) -> None:
        """Write one file per ref and delete the oldest above the bound. A full disk costs records, not rollouts: counted, logged."""
        if not self.keep:
            return
        for ref, record in records.items():
            try:
                path = self._path(ref)
                part = path.with_suffix(".part")
                part.write_text(json.dumps(record, ensure_ascii=False, default=str), encoding="utf-8")
                part.replace(path)
            except (OSError, TypeError, ValueError, RecursionError) as error:
                self.failures += 1
                log.warning("record %s not written: %s", ref, error)
                continue
            with self._lock:
                if ref in self._kept:  # the same attempt ran again after a cancellation; its older place must not delete the file
                    self._kept.remove(ref)
                self._kept.append(ref)
                old = [self._kept.popleft() for _ in range(len(self._kept) - self.keep)]
            for gone in old:
                self._path(gone).unlink(missing_ok=True)

    def load(self, ref: str) -> bytes:
        """The JSON bytes. Raises UnknownName for what was never written or is gone."""
        with self._lock:
            known = ref in self._kept
        if known:
            try:
                return self._path(ref).read_bytes()
            except FileNotFoundError:
                log.debug("record %s was deleted meanwhile", ref)
        raise UnknownName(f"record {ref!r}: not here; the newest {self.keep} are kept")

    def _path(self, ref: str) -> Path:
        return self.directory / (ref + SUFFIX)
