"""WeightManager: the trainer's handle on published weights.

`offload` copies the parameters into the half that does not serve and switches; everything else (digest, deltas, transfers) happens in
the sender process meanwhile. The trainer waits only for the copy and, rarely, for readers of the half it needs.

With several ranks every one of them calls `offload`. The ranks of a node share one memory, each writes its own rows (copy.py), and the
first of them runs the node's sender. Every node's sender serves the whole model: where the ranks of one node do not hold all of it
(sharding over nodes), its tensors are gathered over all ranks first, one at a time. With HSDP whose shards stay within the nodes nothing
crosses them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from astraflow.lib.aio import one_line
from astraflow.lib.net import http_url, reachable_host
from astraflow.lib.wire import Identity
from astraflow.protocol.codec import encode
from astraflow.protocol.errors import DeadlinePassed, RemoteError, UserError
from astraflow.weights import copy, layout, lora
from astraflow.weights.config import WeightsConfig
from astraflow.weights.control import GRACE_S, SenderLink
from astraflow.weights.copy import Source, Standing
from astraflow.weights.frames import HalfState, Setup
from astraflow.weights.memory import HalfMemory
from astraflow.weights.node import TROUBLE, Crew, Follower, Leader, place

log = logging.getLogger(__name__)


class _Introduction(msgspec.Struct):
    """What every rank tells every other one at the first offload."""

    place: str
    ties: dict[str, str] = {}
    trouble: str = ""


class _Offer(msgspec.Struct):
    layout_hash: str
    address: str = ""
    """Where the first rank of a node lets the others in."""
    trouble: str = ""


class WeightManager:
    """Publishes the versions of one model. Call it from one thread; `published` and `stats` may be called from others too.

    `node`: ranks with the same value share memory; empty = found out.
    """

    def __init__(self, model_id: str, config: WeightsConfig, identity: Identity, run_dir: Path, node: str = ""):
        self.model_id, self.config, self._identity = model_id, config, identity
        self._log_path = Path(run_dir) / "logs" / f"sender-{model_id}.log"
        self._node = node
        self._at = copy.ALONE
        self._crew: Crew | None = None
        self._layout: layout.Layout | None = None
        self._sharded: frozenset[str] = frozenset()
        self._memory: HalfMemory | None = None
        self._link: SenderLink | None = None
        self._unlock: Callable[[], object] | None = None
        self._own: dict[str, float] = {"offloads": 0.0, "offload_s": 0.0, "offload_wait_s": 0.0}

    def offload(
        self,
        named: Iterable[tuple[str, Source]],
        version: int,
        rank: int = 0,
        world_size: int = 1,
        tied: Mapping[str, str] | None = None,
    ) -> None:
        """Publish these parameters as `version`; returns when their words are copied. The first call starts the sender.

        With torch.distributed initialised it is a collective: every rank calls it with its own view of the same parameters, DTensors
        as `named_parameters()` of an FSDP2 model yields them. Without, rank 0 copies (replicated) parameters and the others do nothing.
        `tied`: name → the name that holds its bytes. Raises UserError or LayoutMismatch for tensors that cannot be published,
        DeadlinePassed when readers do not let go or ranks do not come, RemoteError when the sender had to be given up or another rank
        failed. After an error, on whichever rank, nothing of this version is served by this node.
        """
        if not 0 <= rank < world_size:
            raise UserError(f"rank {rank}: expected 0…{world_size - 1}")
        if version < 0:
            raise UserError(f"version {version}: expected 0 or more")
        distributed = world_size > 1 and dist.is_available() and dist.is_initialized()
        if distributed and (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
            raise UserError(f"rank {rank} of {world_size}: torch.distributed has {dist.get_rank()} of {dist.get_world_size()}")
        if rank != 0 and not distributed:
            return
        look: Callable[[], dict[str, Source]]
        if self._crew is None:
            tensors = self._meet(named, tied or {}) if distributed else self._start(*copy.collect(named, tied or {}))
            look = partial(self._checked, tensors)
        else:
            look = partial(self._collected, named, tied or {})
        self._publish(version, look)

    def tensors_of(self, model: torch.nn.Module) -> Iterator[tuple[str, Source]]:
        """What `offload` takes for a model: its named parameters; of one with LoRA adapters what the configuration says (lora.py)."""
        return lora.published(model, self.config.lora)

    def _publish(self, version: int, look: Callable[[], dict[str, Source]]) -> None:
        """Look at the tensors, claim a half, write it, publish it: each step by all ranks of the node before anyone takes the next."""
        crew, shape, memory = self._crew, self._layout, self._memory
        assert crew is not None
        assert shape is not None
        assert memory is not None
        began = time.monotonic()
        tensors, half = crew.together(f"version {version}: begin", look, lambda: self._claim(version))
        claimed = time.monotonic()
        write = partial(copy.copy_into, memory.half(half), shape, tensors, self._at)
        crew.together(f"version {version}: write", write, lambda: self._switch(half, version))
        self._own["offloads"] += 1
        self._own["offload_wait_s"] = claimed - began
        self._own["offload_s"] = time.monotonic() - claimed

    def _claim(self, version: int) -> int:
        """The half to write, free of readers. On the first rank of a node."""
        half = self._sender.target()
        granted = self._sender.claim(half, self.config.reader_wait_s)
        if granted.cancelled:
            log.warning("version %d: %d slow transfers of the older version were cancelled", version, granted.cancelled)
        return half

    def _switch(self, half: int, version: int) -> int:
        self._sender.publish(half, version)
        return version

    # ---- tensors ----

    def _collected(self, named: Iterable[tuple[str, Source]], tied: Mapping[str, str]) -> dict[str, Source]:
        assert self._layout is not None
        # What was tied at the first offload stays tied: a rank without rows of a tensor cannot see it again.
        known = self._layout.tied if len(self._at.node_of) > 1 else {}
        return self._checked(copy.collect(named, {**known, **tied})[0])

    def _checked(self, tensors: dict[str, Source]) -> dict[str, Source]:
        assert self._layout is not None
        copy.check_same(self._layout, tensors, self._sharded)
        return tensors

    # ---- the first offload ----

    def _start(self, tensors: dict[str, Source], ties: dict[str, str], crew: Leader | None = None) -> dict[str, Source]:
        """On the first rank of a node: lay out, reserve the memory and start the sender."""
        shape = self._lay_out(tensors, ties)
        if crew is None and self._sharded and dist.get_world_size() > 1:
            raise UserError(f"parameter {min(self._sharded)!r} is sharded over several ranks: offload needs rank and world_size")
        memory = HalfMemory.create(f"astraflow-{self._identity.run_id}-{self.model_id}", shape.size_bytes)
        link = SenderLink(f"sender of {self.model_id}", self.config, self._log_path, (memory.fd,), self._setup)
        self._crew, self._memory, self._link = crew or Leader(self._at.rank), memory, link
        started = False
        try:
            link.start()
            started = True
        finally:
            if not started:
                self.close()
        self._lock_pages(tensors)
        return tensors

    def _lay_out(self, tensors: dict[str, Source], ties: dict[str, str]) -> layout.Layout:
        self._layout = layout.build(copy.specs(tensors, self.config.dtype, self.config.float32_names), ties)
        self._sharded = copy.sharded_names(tensors)
        return self._layout

    def _lock_pages(self, tensors: dict[str, Source]) -> None:
        """For copies from a GPU: it writes into the halves directly."""
        assert self._memory is not None
        if copy.on_cuda(tensors):
            self._unlock = copy.page_lock(self._memory.all)
            if self._unlock is None:
                log.warning("%s: shared memory could not be page-locked; copies from the GPU are slower", self.model_id)

    def _meet(self, named: Iterable[tuple[str, Source]], tied: Mapping[str, str]) -> dict[str, Source]:
        """The first offload of several ranks: who shares a node, what is tied, one layout, one memory per node."""
        tensors: dict[str, Source] = {}
        mine = _Introduction(self._node or place())
        failure: Exception | None = None
        try:
            tensors, mine.ties = copy.collect(named, tied)
        except TROUBLE as error:
            failure, mine.trouble = error, one_line(error)
        with self._meeting() as group:
            all_ranks = [msgspec.msgpack.decode(data, type=_Introduction) for data in self._told(encode(mine), group)]
            _stop_together(failure, [each.trouble for each in all_ranks])
            ties = {alias: target for each in all_ranks for alias, target in each.ties.items()}
            places = list(dict.fromkeys(each.place for each in all_ranks))
            self._at = Standing(dist.get_rank(), tuple(places.index(each.place) for each in all_ranks))
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ties}
            self._share(tensors, ties, group)
        return tensors

    @contextmanager
    def _meeting(self) -> Iterator[dist.ProcessGroup]:
        """A group of all ranks for what they have to say to each other. Raises DeadlinePassed when one of them does not come."""
        wait_s = self.config.ranks_wait_s
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=wait_s))
        except RuntimeError as error:
            raise DeadlinePassed(f"first offload: not all ranks came within {wait_s:g} s: {one_line(error)}") from None
        try:
            yield group
        finally:
            dist.destroy_process_group(group)

    def _share(self, tensors: dict[str, Source], ties: dict[str, str], group: dist.ProcessGroup) -> None:
        """The first rank of each node starts; the others attach to its memory."""
        at, wait_s = self._at, self.config.ranks_wait_s
        offer, failure = _Offer(""), None
        leader = Leader(at.rank, at.node[1:], wait_s) if at.leads else None
        try:
            shape = self._lay_out(tensors, ties)
            offer.layout_hash = shape.hash
            if leader is not None:
                self._start(tensors, ties, leader)
                offer.address = leader.address
        except TROUBLE as error:
            failure, offer.trouble = error, one_line(error)
        offers = [msgspec.msgpack.decode(data, type=_Offer) for data in self._told(encode(offer), group)]
        try:
            _stop_together(failure, [each.trouble for each in offers])
            different = [rank for rank, each in enumerate(offers) if each.layout_hash != offers[0].layout_hash]
            if different:
                raise UserError(f"ranks {different} publish other names, shapes or ties than rank 0")
            if leader is not None:
                assert self._memory is not None
                leader.admit(self._memory.fd)
            else:
                patience_s = self.config.reader_wait_s + 2 * GRACE_S + self.config.start_s
                follower = Follower(at.rank, offers[at.node[0]].address, wait_s, patience_s)
                self._crew, self._memory = follower, HalfMemory.attach(follower.fd, shape.size_bytes)
                self._lock_pages(tensors)
        except TROUBLE:
            if leader is not None:
                leader.close()
            self.close()
            raise

    def _told(self, data: bytes, group: dist.ProcessGroup) -> list[bytes]:
        """Everybody's bytes. Raises DeadlinePassed when a rank does not come."""
        try:
            return exchange(data, group)
        except RuntimeError as error:
            wait_s = self.config.ranks_wait_s
            raise DeadlinePassed(f"first offload: not all ranks came within {wait_s:g} s: {one_line(error)}") from None

    def _setup(self, halves: tuple[HalfState | None, HalfState | None], newest: int, ports: tuple[int, int]) -> Setup:
        assert self._layout is not None
        assert self._memory is not None
        return Setup(
            model_id=self.model_id,
            run_id=self._identity.run_id,
            token=self._identity.token,
            tls=self._identity.tls,
            config=self.config,
            tensors=list(self._layout.tensors),
            tied=dict(self._layout.tied),
            memory_fd=self._memory.fd,
            halves=halves,
            newest=newest,
            port=ports[0],
            stream_port=ports[1],
        )

    # ---- what others ask ----

    @property
    def _sender(self) -> SenderLink:
        if self._link is None:
            raise UserError("nothing was offloaded yet" if self._crew is None else f"rank {self._at.node[0]} has this node's sender")
        return self._link

    def published(self, version: int, deadline_s: float = 60.0) -> str:
        """Digest of a published version, computed by the sender. Raises DeadlinePassed, or RemoteError when there is no sender."""
        return self._sender.published(version, deadline_s)

    @property
    def endpoint(self) -> str:
        """Address of this node's sender for receivers; the same over restarts of the sender. On the first rank of a node."""
        host = self.config.advertise_host or reachable_host(self.config.host)
        return http_url(host, self._sender.port, bool(self._identity.tls.cert))

    @property
    def serves(self) -> bool:
        """Whether this node's sender is ours."""
        return self._link is not None

    @property
    def sender_pid(self) -> int:
        """Process id of the sender; 0 while it is being restarted."""
        return self._sender.pid

    def check(self) -> None:
        """Raise RemoteError when the sender died too often. A dead sender is restarted on its own; this is the trainer's look at it."""
        if self._link is not None:
            self._link.check()

    def stats(self) -> dict[str, float]:
        """Numbers for metrics and report, over all lives of the sender: `weights/{full,delta}_{transfers,bytes,s}`, … """
        values = dict(self._own)
        if self._link is not None:
            stats = self._link.stats()
            for name in ("full_transfers", "full_bytes", "delta_transfers", "delta_bytes", "failed_transfers", "cancelled_transfers"):
                values[name] = 0.0
            values |= stats.counters | stats.gauges | {"sender_restarts": float(self._link.restarts)}
        return {f"weights/{name}": float(value) for name, value in values.items()}

    def show(self, values: dict[str, float]) -> None:
        """The trainer's newest step for `GET /metrics` of its sender. On the first rank of a node."""
        self._sender.show(values)

    def receivers(self) -> dict[str, dict[str, float]]:
        """The same counters per receiver (instance id)."""
        return self._link.stats().receivers if self._link is not None else {}

    def close(self) -> int | None:
        """End the sender and free the memory; the sender's exit code, None when there was none to end. Safe to call twice."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None
        code = self._link.close() if self._link is not None else None
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        return code


def exchange(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Everybody's bytes, in the order of ranks; `group` is one of gloo. Raises RuntimeError when a rank is gone or does not come."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    most = int(max(sizes))
    rows = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, most - len(mine))), group=group)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _stop_together(own: Exception | None, troubles: list[str]) -> None:
    """Raise on every rank when one of them failed: its own error there, RemoteError elsewhere."""
    if own is not None:
        raise own
    found = [f"rank {rank}: {trouble}" for rank, trouble in enumerate(troubles) if trouble]
    if found:
        raise RemoteError("; ".join(found)[:2000])
