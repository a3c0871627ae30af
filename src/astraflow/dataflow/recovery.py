"""What a starting Dataflow finds of an earlier life: queues, leases, versions, instances, position in the data."""

from __future__ import annotations

import msgspec

from astraflow.dataflow.buffer import make_entry
from astraflow.dataflow.intake import HeldShare, Intake
from astraflow.dataflow.journal import Recovered, Settled
from astraflow.dataflow.policies.curation import Curation
from astraflow.dataflow.pool import Held, InstanceRecord
from astraflow.dataflow.serving import DataServing, OpenBatch
from astraflow.dataflow.shelf import Shelf, decode_models
from astraflow.dataflow.source import SourceState


def restore(
    shelf: Shelf, serving: DataServing, intake: Intake, curation: Curation, found: Recovered
) -> tuple[list[Settled], dict[str, list[str]]] | None:
    """Fill the cores from the ledger. Returns (rows, leases by reason) to be dropped because the configuration no longer has their
    place, or None for a new ledger. Trainers and instances call or are called by themselves afterwards."""
    meta, now = found.meta, shelf.clock()
    if "ledger_id" not in meta:
        return None
    for state in decode_models(meta["models"]) if "models" in meta else []:
        if state.model_id in shelf.barrier.models:
            if meta.get("ended"):
                state.registered = state.done = False  # the run ended in good order: this is a resume of all its parts
            shelf.barrier.models[state.model_id] = state
    shelf.barrier.resumed(now)
    shelf.tell_mended()
    shelf.source.restore(msgspec.msgpack.decode(meta["source"], type=SourceState))
    shelf.leases.next_number = msgspec.msgpack.decode(meta["lease_number"], type=int)
    curation.restore(meta, found.prompts)
    shelf.steps.update(msgspec.msgpack.decode(meta["steps"], type=dict[str, dict[str, float]]) if "steps" in meta else {})
    for record in msgspec.msgpack.decode(meta["instances"], type=list[InstanceRecord]) if "instances" in meta else []:
        shelf.pool.restore(record, now)
    dropped = _shares(shelf, serving, intake, found)
    gone = _leases(shelf, found)
    for model_id in shelf.buffers:
        opened = serving.open.get(model_id)
        served = sum(entry.places for entry in opened.fresh) if opened is not None else 0
        shelf.reset_pace(model_id, shelf.barrier.models[model_id].version, intake.held_places(model_id) + served)
        shelf.staleness[model_id].update(shelf.ledger.staleness(model_id))
    shelf.event(
        f"resumed: {len(found.leases)} leases out, {sum(len(b) for b in shelf.buffers.values())} groups queued,"
        f" {len(serving.open)} batches served, {len(intake.held)} groups held"
    )
    return dropped, gone


def _shares(shelf: Shelf, serving: DataServing, intake: Intake, found: Recovered) -> list[Settled]:
    dropped: list[Settled] = []
    for batch in found.served:
        if batch.policy in shelf.buffers:
            serving.open[batch.policy] = OpenBatch(batch, [], [], None, {})
    for share in found.shares:
        buffer = shelf.buffers.get(share.policy)
        entry = make_entry(share.lease_id, share.arrival, share.stats, shelf.process.dataflow.buffer.unit, share.members)
        if buffer is None:
            if share.state in ("rolled", "buffered"):
                dropped.append(Settled(share.lease_id, share.policy, "dropped", "model_gone", share.part))
        elif share.state == "buffered":
            buffer.restore(entry)
        elif share.state == "rolled":
            intake.held[(share.lease_id, share.policy)] = HeldShare(share.instance, entry, shelf.clock())
        elif share.state == "served":
            serving.open[share.policy].fresh.append(entry)
        if share.kept and buffer is not None:
            buffer.remember([entry])
    return dropped


def _leases(shelf: Shelf, found: Recovered) -> dict[str, list[str]]:
    """Put open leases back where they were; those of unknown instances wait to be issued again."""
    gone: dict[str, list[str]] = {"task_gone": [], "max_attempts": []}
    for lease in found.leases:
        task = shelf.source.find(lease.task_index, lease.task_id)
        if task is None or lease.n_samples != shelf.n_samples:
            gone["task_gone"].append(lease.lease_id)
            continue
        shelf.leases.restore(lease, task.data)
        held = Held(lease.lease_id, lease.attempt, lease.n_samples, shelf.clock())
        if found.meta.get("ended"):  # its instance was told to end: nobody runs this attempt any more
            shelf.leases.requeue(lease.lease_id)
            continue
        instance = shelf.pool.instances.get(lease.instance)
        if instance is not None:
            instance.held[lease.lease_id] = held
        else:
            gone["max_attempts"] += shelf.leases.lost([held])
    return gone
